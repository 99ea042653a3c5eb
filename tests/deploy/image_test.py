"""The images: the Dockerfile against the rules, and its steps and package lists against real programs.

No image is built here (that takes an image engine). What the Dockerfile does is done instead: the same make target
installs the programs, and the runtime list is compared with what they are linked with.
"""

import os
import pathlib
import re
import shutil
import tempfile
import unittest

import dockerfile
import support

DOCKERFILE = support.SOURCE / "deploy/docker/Dockerfile"
PACKAGES = support.SOURCE / "deploy/packages"
TARGETS = ["cpu", "cuda"]
PROGRAMS = ["tributary", "tributary-coordinator", "tributary-worker"]
# Every Debian system has it.
ESSENTIAL = {"libc6", "libgcc-s1"}


def package_list(name):
    lines = (PACKAGES / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return [line.split()[0] for line in lines if line.strip() and not line.startswith("#")]


def loaded_or_run():
    """Packages of the runtime list that no program is linked with, as their lines say."""
    lines = (PACKAGES / "runtime.txt").read_text(encoding="utf-8").splitlines()
    return {line.split()[0] for line in lines if re.search(r"# (loaded|run): ", line)}


OF_NO_PROGRAM = loaded_or_run()
LISTS = {path.stem: package_list(path.stem) for path in PACKAGES.glob("*.txt")}


class DockerfileRules(unittest.TestCase):
    def setUp(self):
        self.text = DOCKERFILE.read_text(encoding="utf-8")

    def test_holds_all_rules(self):
        self.assertEqual(dockerfile.problems(self.text, TARGETS, LISTS), [])

    def test_each_breach_is_named(self):
        breaches = [
            (r"@sha256:[0-9a-f]{64}", "", "build: base debian:bookworm-20260918-slim is not pinned"),
            (r"nvidia/cuda:13.0.0-devel-ubuntu22.04@sha256:[0-9a-f]{64}", "nvidia/cuda:13.0.0",
             "cuda-toolkit: base nvidia/cuda:13.0.0 is not pinned"),
            (r"(?m)^USER .*$", "USER root", "cpu: USER root must be a number"),
            (r"(?m)^STOPSIGNAL.*$", "", "cpu: STOPSIGNAL must be SIGTERM"),
            (r"(?m)^ENTRYPOINT.*$", 'ENTRYPOINT ["tributary-coordinator"]', "cpu: ENTRYPOINT must begin with tini"),
            (r"org\.opencontainers\.image\.revision", "revision", "cpu: label org.opencontainers.image.revision"),
            (r"install-packages.sh runtime", "install-packages.sh build", "cpu: build tool build-essential"),
            (r"/deploy/install-packages.sh runtime", "apt-get install -y gdb", "cpu: RUN uses apt-get"),
            (r"(?m)^USER 65532:65532$", "USER 65532:65532\nCOPY . /src", "cpu: COPY . /src brings files"),
            (r"--from=build-cpu", "--from=build-gpu", "cpu: COPY from unknown stage build-gpu"),
        ]
        for pattern, replacement, expected in breaches:
            with self.subTest(expected):
                broken, count = re.subn(pattern, replacement, self.text)
                self.assertGreater(count, 0, "the breach changed nothing")
                found = dockerfile.problems(broken, TARGETS, LISTS)
                self.assertTrue(any(problem.startswith(expected) for problem in found), found)

    def test_shell_steps_pass_shellcheck(self):
        shellcheck = support.need("shellcheck")
        for stage in dockerfile.parse(self.text).values():
            for instruction in stage.all("RUN"):
                script = "#!/bin/bash\nset -euo pipefail\n" + instruction.value + "\n"
                result = support.run(shellcheck, "-", input=script)
                self.assertEqual(result.returncode, 0, f"{instruction.value}\n{result.stdout}")

    def test_copied_and_run_files_exist(self):
        for stage in dockerfile.parse(self.text).values():
            for instruction in stage.all("COPY"):
                if any(option.startswith("--from=") for option in instruction.options):
                    continue
                for source in instruction.value.split()[:-1]:
                    self.assertTrue((support.SOURCE / source).exists(), instruction.value)
            for instruction in stage.all("RUN"):
                for name in re.findall(r"install-packages\.sh (\w+)", instruction.value):
                    self.assertIn(name, LISTS)

    def test_build_stages_use_the_preset_of_their_target(self):
        stages = dockerfile.parse(self.text)
        for target in TARGETS:
            steps = " ".join(i.value for i in stages[f"build-{target}"].all("RUN"))
            self.assertIn(f"make install PRESET={target} PREFIX=/opt/tributary", steps)
            self.assertTrue(any("build-" + target in o for i in stages[target].all("COPY") for o in i.options))

    def test_nothing_names_an_architecture(self):
        instructions = re.sub(r"(?m)^#.*$", "", self.text)
        for name in ("x86_64", "amd64", "aarch64", "arm64"):
            self.assertNotIn(name, instructions)

    def test_kernels_are_for_arm_too(self):
        """What differs by architecture, read by a cross compiler; the libraries of the other sources are not there."""
        compiler = shutil.which("aarch64-linux-gnu-g++")
        if compiler is None:
            raise unittest.SkipTest("g++-aarch64-linux-gnu is not installed")
        settings = (support.SOURCE / "kernels/CMakeLists.txt").read_text(encoding="utf-8")
        disabled = re.search(r'"(HWY_DISABLED_TARGETS=[^"]*)"', settings)[1]
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "hwy").symlink_to("/usr/include/hwy")  # headers alone, of every architecture
            for source in ("attend_chunk.cc", "attend_chunk_bf16.cc", "instruction_set.cc", "thread_pool.cc"):
                result = support.run(compiler, "-std=c++20", "-fsyntax-only", "-DHWY_WANT_AVX3_DL=1", f"-D{disabled}",
                                     f"-I{support.SOURCE}", f"-I{folder}", support.SOURCE / "kernels/cpu" / source)
                self.assertEqual(result.returncode, 0, f"{source}\n{result.stdout[-3000:]}")

    def test_nccl_finds_infiniband(self):
        self.assertEqual(OF_NO_PROGRAM, {"ibverbs-providers", "libibverbs1", "librdmacm1", "tini"})

    def test_make_install_builds_and_installs_programs_only(self):
        # The suite itself is often started by make, whose own flags would change what this one prints.
        environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
        plan = support.run("make", "-n", "install", "PRESET=cpu", "PREFIX=/opt/tributary", cwd=support.SOURCE,
                           env=environment)
        self.assertEqual(plan.returncode, 0, plan.stdout)
        steps = plan.stdout.splitlines()
        self.assertEqual(steps[0], "deploy/install-packages.sh build")
        self.assertEqual(steps[-1], "cmake --install build/cpu --prefix /opt/tributary --component programs --strip")


class InstalledPrograms(unittest.TestCase):
    """The programs as `make install` leaves them."""

    @classmethod
    def setUpClass(cls):
        cls.prefix = tempfile.TemporaryDirectory()
        result = support.run("cmake", "--install", support.BUILD, "--prefix", cls.prefix.name, "--component",
                             "programs", "--strip")
        if result.returncode != 0:
            raise AssertionError(result.stdout)

    @classmethod
    def tearDownClass(cls):
        cls.prefix.cleanup()

    def program(self, name):
        return pathlib.Path(self.prefix.name, "bin", name)

    def test_nothing_else_is_installed(self):
        files = [str(p.relative_to(self.prefix.name)) for p in pathlib.Path(self.prefix.name).rglob("*") if p.is_file()]
        self.assertEqual(sorted(files), [f"bin/{name}" for name in PROGRAMS])

    def test_they_run_without_the_build_tree(self):
        for name in PROGRAMS:
            result = support.run(self.program(name), "help" if name == "tributary" else "--version", cwd="/")
            self.assertEqual(result.returncode, 0, f"{name}: {result.stdout}")

    def test_they_name_the_commit(self):
        for name in PROGRAMS:
            result = support.run(self.program(name), "--version", cwd="/")
            self.assertRegex(result.stdout, rf"^{name} [\d.]+ \(commit ([0-9a-f]{{12}}|unknown)\)\n$")

    def test_bad_flags_end_each_with_one_code_and_one_form(self):
        for name, flag in (("tributary-coordinator", "workers"), ("tributary-worker", "rank"),
                           ("tributary bench", "sequences")):
            program, *command = name.split()
            for words in (["--no_such_flag=1"], [f"--{flag}=many"], [f"--{flag}"], ["word"]):
                result = support.run(self.program(program), *command, *words, cwd="/")
                self.assertEqual(result.returncode, 2, f"{name} {words}: {result.stdout}")
                self.assertEqual(len(result.stdout.splitlines()), 1, result.stdout)
                form = "unexpected" if words == ["word"] else words[0].split("=")[0] + ": "
                self.assertTrue(result.stdout.startswith(f"{name}: {form}"), result.stdout)

    @unittest.skipIf(os.environ.get("TRIBUTARY_SANITIZE"), "a build with sanitizers needs their libraries besides")
    def test_runtime_list_is_what_they_are_linked_with(self):
        listed = set(LISTS["runtime"]) - OF_NO_PROGRAM
        needed, unowned = self.packages_needed()
        self.assertEqual(sorted(needed - listed - ESSENTIAL), [], "missing in deploy/packages/runtime.txt")
        self.assertEqual(sorted(listed - needed), [], "in deploy/packages/runtime.txt, but nothing needs them")
        copied = DOCKERFILE.read_text(encoding="utf-8")
        for library in unowned:
            self.assertIn(f"/{library} ", copied, f"{library} is of no Debian package and the image does not copy it")

    def packages_needed(self):
        """Owners of the libraries the programs name themselves, and the names of those that have none."""
        libraries = {}
        for name in PROGRAMS:
            paths = dict(re.findall(r"(\S+) => (/\S+)", support.run("ldd", self.program(name)).stdout))
            dynamic = support.run("readelf", "-d", self.program(name)).stdout
            for library in re.findall(r"NEEDED.*\[(.*)\]", dynamic):
                if library.startswith("ld-linux"):
                    continue
                self.assertIn(library, paths, f"{name} needs {library}, which is not found")
                libraries[library] = paths[library]
        owners = self.owners(libraries.values())
        needed = {owners[path] for path in libraries.values() if path in owners}
        return needed, {library for library, path in libraries.items() if path not in owners}

    @staticmethod
    def owners(paths):
        """{path: Debian package} of those that belong to one."""
        # With a merged /usr the loader may name a file by a path that its package does not use.
        spellings = {}
        for path in paths:
            real = str(pathlib.Path(path).resolve())
            for spelling in (path, real, real.removeprefix("/usr"), "/usr" + real):
                spellings[spelling] = path
        listing = support.run("dpkg", "-S", *spellings).stdout
        return {spellings[file]: package.split(":")[0]
                for package, file in re.findall(r"(?m)^(\S+): (/\S+)$", listing) if file in spellings}


if __name__ == "__main__":
    support.main()
