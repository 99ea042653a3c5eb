"""The documentation: every link leads somewhere, and the commands marked `checked` do what the page says.

A fenced block that opens with ```sh checked is run; the blocks of a page in order, in one shell, in a folder that looks
like a checkout whose build/cpu is this build; nothing else is on the PATH than a user has. Where the machine allows it the shell has a
network of its own, so that the pages' well-known ports are free. Of the other blocks (they need a cluster, an image
engine, a GPU) every flag, value, profile and service that they name must exist. A block that opens with ```c PATH or
```cpp PATH is an excerpt of that file.
"""

import functools
import os
import pathlib
import re
import signal
import socket
import subprocess
import tempfile
import unittest
import xml.etree.ElementTree

import yaml

import support

FENCE = re.compile(r"^(```|~~~)(.*)$")
LINK = re.compile(r"!?\[[^\]]*\]\(([^()\s]+(?:\([^()]*\))?)\)")
MARKER = "checked"
BASH = ["/bin/bash", "-euo", "pipefail"]
PAGE_TIMEOUT = 120


def pages():
    listing = support.run("git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md", cwd=support.SOURCE)
    if listing.returncode == 0:
        names = listing.stdout.split()
    else:  # an unpacked archive
        names = [p.relative_to(support.SOURCE) for top in support.SOURCE.iterdir() if top.name != "build"
                 for p in ([top] if top.suffix == ".md" else top.rglob("*.md"))]
    return {str(name): (support.SOURCE / name).read_text(encoding="utf-8") for name in names}


def split(text):
    """(prose without code, [(info string, code)])."""
    prose, blocks, current = [], [], None
    for line in text.splitlines():
        fence = FENCE.match(line.strip())
        if current is None and fence:
            current = (fence[2].strip(), [])
        elif current is not None and fence and not fence[2].strip():
            blocks.append((current[0], "\n".join(current[1])))
            current = None
        elif current is not None:
            current[1].append(line)
        else:
            prose.append(line)
    if current is not None:
        raise ValueError(f"a code block is not closed: {current[0]}")
    return re.sub(r"`[^`\n]*`", "", "\n".join(prose)), blocks


def anchors(text):
    """The anchors GitHub makes of a page's headings."""
    found, without_code = set(), []
    fenced = False
    for line in text.splitlines():
        if FENCE.match(line.strip()):
            fenced = not fenced
        elif not fenced:
            without_code.append(line)
    for heading in re.findall(r"(?m)^#{1,6} +(.+?)\s*$", "\n".join(without_code)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number = 0
        while (unique := f"{slug}-{number}" if number else slug) in found:
            number += 1
        found.add(unique)
    return found


def broken_links(name, text):
    prose, _ = split(text)
    for target in LINK.findall(prose):
        if re.match(r"(https?|mailto):", target):
            continue
        path, _, anchor = target.partition("#")
        file = (support.SOURCE / name).parent / path
        if path and not file.exists():
            yield f"{name}: {target}: no such file"
        elif anchor and (not path or file.suffix == ".md"):
            if anchor not in anchors(file.read_text(encoding="utf-8") if path else text):
                yield f"{name}: {target}: no such heading"


class Links(unittest.TestCase):
    def test_lead_somewhere(self):
        all_pages = pages()
        self.assertGreater(len(all_pages), 20)
        self.assertEqual([problem for name, text in all_pages.items() for problem in broken_links(name, text)],
                         [])

    def test_broken_ones_are_seen(self):
        text = "# A b\n[x](nowhere.md) [y](#a-b) [z](#c) [r](README.md#no-such) `[code](gone.md)`\n"
        self.assertEqual(list(broken_links("page.md", text)),
                         ["page.md: nowhere.md: no such file", "page.md: #c: no such heading",
                          "page.md: README.md#no-such: no such heading"])

    def test_pictures_are_well_formed(self):
        for picture in (support.SOURCE / "docs").rglob("*.svg"):
            root = xml.etree.ElementTree.parse(picture).getroot()
            self.assertIsNotNone(root.find("{http://www.w3.org/2000/svg}title"), f"{picture}: no title to read out")

    def test_every_guide_is_in_the_index(self):
        index = (support.SOURCE / "docs/README.md").read_text(encoding="utf-8")
        for page in (support.SOURCE / "docs").glob("*.md"):
            if page.name != "README.md":
                self.assertIn(f"({page.name})", index)


def ports_in_use():
    used = []
    for port in (7400, 7401, 7402, 9464):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                used.append(port)
    return used


def paths_without_nvcc():
    """The PATH of a machine that has no nvcc."""
    folders = os.environ["PATH"].split(os.pathsep)
    return os.pathsep.join(folder for folder in folders if not os.path.exists(os.path.join(folder, "nvcc")))


class Presets(unittest.TestCase):
    """What `make` builds, where nvcc is found and where it is not."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        nvcc = pathlib.Path(folder.name) / "nvcc"
        nvcc.write_text("#!/bin/sh\n", encoding="utf-8")
        nvcc.chmod(0o755)
        without = paths_without_nvcc()
        self.machines = {"with nvcc": f"{folder.name}{os.pathsep}{without}", "without": without}

    @staticmethod
    def steps(command, path):
        """What `make` would run, whatever the settings of a `make` that runs this test."""
        makefile = (support.SOURCE / "Makefile").read_text(encoding="utf-8")
        settings = re.findall(r"^([A-Z_]+) \?=", makefile, re.MULTILINE)
        of_make = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", *settings}
        environment = {k: v for k, v in os.environ.items() if k not in of_make}
        return support.run(*command.split(), "-n", cwd=support.SOURCE, env=environment | {"PATH": path}).stdout

    def test_pages_say_how_the_folders_that_they_use_are_built(self):
        count = 0
        for name, text in pages().items():
            blocks = "\n".join(code for info, code in split(text)[1] if MARKER in info.split()[1:])
            folders = set(re.findall(r"build/(\w+)/bin", blocks))
            if not folders:
                continue
            count += 1
            said = {" ".join(found.split()) for found in re.findall(r"make build\s+PRESET=\w+", text)}
            self.assertTrue(said, f"{name} uses build/{folders} and says nowhere what builds it")
            for machine, path in self.machines.items():
                with self.subTest(name, machine=machine):
                    built = {preset for command in said
                             for preset in re.findall(r"cmake --build --preset (\w+)", self.steps(command, path))}
                    self.assertLessEqual(folders, built)
        self.assertGreaterEqual(count, 5)

    def test_targets_run_what_they_build(self):
        for machine, path in self.machines.items():
            for target in ("demo", "test", "build", "bench-cpu", "soak", "hostile", "image-test"):
                with self.subTest(target, machine=machine):
                    steps = self.steps(f"make {target}", path)
                    built = set(re.findall(r"cmake --build --preset (\w+)", steps))
                    used = set(re.findall(r"build/(\w+)(?:/bin|$)", steps, re.MULTILINE))
                    used |= set(re.findall(r"ctest --preset (\w+)", steps))
                    self.assertEqual(len(built), 1, steps)
                    self.assertLessEqual(used, built, steps)
                    expected = "cuda" if machine == "with nvcc" and target != "demo" else "cpu"
                    self.assertEqual(built, {expected})

    def test_both_kinds_of_machine_are_told_apart(self):
        with_nvcc, without = (self.steps("make build", path) for path in self.machines.values())
        self.assertIn("--preset cuda", with_nvcc)
        self.assertIn("--preset cpu", without)


class Commands(unittest.TestCase):
    def scratch(self):
        """A folder like a checkout in which `make build PRESET=cpu` has built."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        top = pathlib.Path(folder.name)
        for entry in support.SOURCE.iterdir():
            if entry.name not in ("build", ".git"):
                (top / entry.name).symlink_to(entry)
        (top / "build/cpu").mkdir(parents=True)
        (top / "build/cpu/bin").symlink_to(support.BIN)
        return top

    def run_script(self, script, prefix):
        """(exit code, output); everything it left running is ended."""
        # A page's background programs end with it.
        script = "trap 'kill $(jobs -p) 2>/dev/null || true; wait || true' EXIT\n" + script
        with tempfile.TemporaryFile("w+") as output:
            child = subprocess.Popen([*prefix, *BASH, "-c", script], stdout=output, stderr=subprocess.STDOUT,
                                     stdin=subprocess.DEVNULL, cwd=self.scratch(),
                                     env=os.environ | {"PATH": paths_without_nvcc()}, start_new_session=True)
            try:
                code = child.wait(PAGE_TIMEOUT)
            except subprocess.TimeoutExpired:
                code = f"not done within {PAGE_TIMEOUT} s"
            finally:
                try:
                    os.killpg(child.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                child.wait()
            output.seek(0)
            return code, output.read()

    def test_checked_blocks(self):
        prefix = support.own_network()
        if not prefix and ports_in_use():
            raise unittest.SkipTest(f"ports {ports_in_use()} are in use, and no network of one's own is permitted here")
        count = 0
        for name, text in pages().items():
            blocks = [code for info, code in split(text)[1] if MARKER in info.split()[1:]]
            if not blocks:
                continue
            count += len(blocks)
            with self.subTest(name):
                code, output = self.run_script("\n".join(blocks), prefix)
                self.assertEqual(code, 0, output)
        self.assertGreaterEqual(count, 11)

    def test_excerpts(self):
        """A block that names a file after its language is that file's own, but for how far it is indented."""
        count = 0
        for name, text in pages().items():
            for info, code in split(text)[1]:
                words = info.split()
                if len(words) != 2 or "/" not in words[1]:
                    continue
                count += 1
                plain = "\n".join(line.strip() for line in code.splitlines())
                source = (support.SOURCE / words[1]).read_text(encoding="utf-8")
                self.assertIn(plain, "\n".join(line.strip() for line in source.splitlines()), f"{name}: {words[1]}")
        self.assertGreaterEqual(count, 16)

    def test_a_command_that_fails_is_seen(self):
        code, _ = self.run_script("build/cpu/bin/tributary health --target=unix:/nowhere --timeout=100ms\ntrue", [])
        self.assertEqual(code, 1)

    def test_only_shell_is_marked(self):
        for name, text in pages().items():
            for info, _ in split(text)[1]:
                if MARKER in info.split():
                    self.assertEqual(info, f"sh {MARKER}", name)


PROGRAM = re.compile(r"^(?:\S+/bin/)?(tributary(?:-coordinator|-worker)?)$")


@functools.lru_cache(maxsize=None)
def flags_of(program, command=None):
    """Names of the flags that --help explains, with underscores."""
    words = ["help", command] if command else ["--help"]
    text = support.run(support.BIN / program, *words).stdout
    return frozenset(re.findall(r"(?m)^ +--(\w+)", text)) | {"help"}


def commands(text):
    """The commands of a page's shell blocks, as lists of words."""
    for info, code in split(text)[1]:
        if info.split()[:1] != ["sh"]:
            continue
        code = re.sub(r"\\\n\s*", " ", re.sub(r"<<'?(\w+)'?\n.*?\n\1", "", code, flags=re.DOTALL))
        for line in code.splitlines():
            yield from (part.split() for part in re.split(r"&&|\|\||[;|&]", re.sub(r"(^|\s)#.*", "", line)))


class Names(unittest.TestCase):
    """What pages name exists, run or not."""

    def test_flags_of_commands(self):
        seen = 0
        for page, text in pages().items():
            for words in commands(text):
                places = [i for i, word in enumerate(words) if PROGRAM.search(word)]
                if not places or words[0] in ("helm", "kubectl"):  # a release may be called tributary
                    continue
                words = words[places[-1]:]
                program = PROGRAM.search(words[0])[1]
                known = flags_of(program, words[1] if program == "tributary" and len(words) > 1 else None)
                self.assertGreater(len(known), 3, f"{page}: {' '.join(words)}")
                for name in re.findall(r"(?<=\s)--(\w[\w-]*)", " ".join(words)):
                    seen += 1
                    name = name.replace("-", "_")
                    self.assertTrue(name in known or name.removeprefix("no") in known,
                                    f"{page}: {program} has no flag --{name}")
        self.assertGreater(seen, 50)

    def test_settings_files(self):
        settings = [code for text in pages().values() for info, code in split(text)[1]
                    if info == "yaml" and code.startswith("# tributary-coordinator --config")]
        self.assertTrue(settings)
        for code in settings:
            self.assertLessEqual(set(yaml.safe_load(code)), flags_of("tributary-coordinator"))

    def test_flags_that_mean_the_same_are_called_the_same(self):
        coordinator, worker = flags_of("tributary-coordinator"), flags_of("tributary-worker")
        caller = flags_of("tributary", "check")
        self.assertLessEqual({"tls_ca", "tls_cert", "tls_key", "tls_server_name", "token_file"}, worker & caller)
        self.assertLessEqual(
            {"admin_listen", "config", "device", "drain_timeout", "join_secret_file", "log_format", "log_level",
             "max_message_bytes", "memory_limit", "metrics_port", "otlp_ca", "otlp_endpoint", "otlp_headers_file",
             "otlp_interval", "threads", "tls_cert", "tls_key", "token_file", "trace_file", "trace_spans"},
            coordinator & worker)
        self.assertIn("threads", flags_of("tributary", "bench"))

    def test_operations_explains_every_flag(self):
        page = pages()["docs/operations.md"]
        for program in ("tributary-coordinator", "tributary-worker"):
            missing = {flag for flag in flags_of(program) - {"help"} if not re.search(rf"--{flag}\b", page)}
            self.assertEqual(missing, set(), program)

    def test_values_of_the_chart(self):
        values = yaml.safe_load((support.SOURCE / "deploy/helm/tributary/values.yaml").read_text(encoding="utf-8"))
        named = {name for text in pages().values() for words in commands(text) if words[:1] == ["helm"]
                 for name in re.findall(r"--set (\S+?)=", " ".join(words))}
        self.assertGreater(len(named), 3)
        # In prose: `section.name`, of a section of the chart.
        for name in ("deploy/helm/tributary/README.md", "docs/deployment.md"):
            found = re.findall(r"`(\w+(?:\.\w+)+)`", pages()[name])
            named |= {path for path in found if path.split(".")[0] in values}
        self.assertGreater(len(named), 15)
        for name in sorted(named):
            found = values
            for key in name.split("."):
                self.assertIn(key, found, name)
                found = found[key]

    def test_profiles_and_services_of_compose(self):
        file = yaml.safe_load((support.SOURCE / "deploy/compose.yaml").read_text(encoding="utf-8"))
        profiles = {profile for service in file["services"].values() for profile in service["profiles"]}
        used = 0
        for page, text in pages().items():
            for words in commands(text):
                if "compose" not in words[:3]:
                    continue
                for before, word in zip(words, words[1:]):
                    if before == "--profile":
                        used += 1
                        self.assertIn(word, profiles, page)
                    elif before in ("exec", "up") and not word.startswith("-"):
                        self.assertIn(word, file["services"], page)
        self.assertGreater(used, 2)


if __name__ == "__main__":
    support.main()
