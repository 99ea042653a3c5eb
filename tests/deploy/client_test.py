"""The component `development`: a project outside of the tree builds against what is installed, and talks to a service."""

import os
import pathlib
import re
import shlex
import tempfile
import unittest

import support

OUTSIDE = pathlib.Path(__file__).parent / "outside"


@unittest.skipIf(os.environ.get("TRIBUTARY_SANITIZE"), "what is installed is built without sanitizers")
class InstalledClient(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.scratch = pathlib.Path(folder.name)
        # Moved after it was installed, and far from the build: nothing may remember another place.
        installed = cls.scratch / "installed"
        must_run("cmake", "--install", support.BUILD, "--prefix", installed, "--component", "development")
        cls.prefix = installed.rename(cls.scratch / "moved")
        cls.target = f"unix:{cls.scratch}/socket"
        cls.service = support.Process("coordinator", [support.BIN / "tributary-coordinator", "--embedded_workers=1",
                                                      "--admin_listen=", f"--listen={cls.target}"])
        cls.addClassCleanup(cls.service.kill)

    def try_against_service(self, *command, **options):
        ready = [support.BIN / "tributary", "health", f"--target={self.target}"]
        support.wait_until("the service", lambda: support.run(*ready).returncode == 0, 60, [self.service])
        must_run(*command, **options)

    def test_nothing_tells_of_the_source_tree(self):
        for file in self.prefix.rglob("*"):
            if file.suffix in (".cmake", ".pc", ".h"):
                text = file.read_text(encoding="utf-8")
                self.assertNotIn(str(support.SOURCE), text, file)
                self.assertNotIn(str(support.BUILD), text, file)

    def test_headers_are_those_of_hosts(self):
        headers = {str(p.relative_to(self.prefix)) for p in self.prefix.rglob("*.h")}
        self.assertIn("include/tributary/service/client/client.h", headers)
        for header in headers:
            self.assertRegex(header, r"^include/tributary/(service/client|base|tributary/v1|google/rpc)/"
                                     r"|^include/tributary(_embedded)?.h$")

    def test_cmake_project(self):
        build = self.scratch / "with_cmake"
        must_run("cmake", "-S", OUTSIDE, "-B", build, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={self.prefix}")
        must_run("cmake", "--build", build)
        self.try_against_service(build / "outside", self.target)
        protos = pathlib.Path((build / "proto_dir").read_text(encoding="utf-8"))
        self.assertTrue((protos / "tributary/v1/attention.proto").exists())

    def test_pkg_config(self):
        lib = next(self.prefix.rglob("tributary-client.pc")).parent
        environment = {**os.environ, "PKG_CONFIG_PATH": str(lib)}
        flags = must_run("pkg-config", "--cflags", "--libs", "tributary-client", env=environment)
        program = self.scratch / "with_pkg_config"
        must_run("c++", "-std=c++20", OUTSIDE / "main.cc", *shlex.split(flags), "-o", program)
        self.try_against_service(program, self.target)


    def test_c_program(self):
        lib = next(self.prefix.rglob("tributary.pc")).parent
        flags = must_run("pkg-config", "--cflags", "--libs", "tributary",
                         env={**os.environ, "PKG_CONFIG_PATH": str(lib)})
        program = self.scratch / "in_c"
        for example in ("attend", "session"):
            must_run("cc", support.SOURCE / f"examples/c/{example}.c", *shlex.split(flags), "-o", program)
            self.try_against_service(program, self.target, env={**os.environ, "LD_LIBRARY_PATH": str(lib.parent)})

    def test_c_program_with_a_service_of_its_own(self):
        lib = next(self.prefix.rglob("tributary-embedded.pc")).parent
        flags = must_run("pkg-config", "--cflags", "--libs", "tributary-embedded",
                         env={**os.environ, "PKG_CONFIG_PATH": str(lib)})
        program = self.scratch / "embedded"
        must_run("cc", support.SOURCE / "tests/service/embedded/embedded.c", *shlex.split(flags), "-o", program)
        must_run(program, self.scratch / "embedded.sock", env={**os.environ, "LD_LIBRARY_PATH": str(lib.parent)})

    def test_c_libraries_show_nothing_but_their_interface(self):
        for name, headers in (("tributary", ["tributary.h"]),
                              ("tributary_embedded", ["tributary.h", "tributary_embedded.h"])):
            library = next(self.prefix.rglob(f"lib{name}.so.1"))
            declared = set()
            for header in headers:
                text = (self.prefix / "include" / header).read_text(encoding="utf-8")
                declared |= set(re.findall(r"^[a-z].*?\b(tributary_\w+)\(", text, re.MULTILINE))
            defined = must_run("nm", "-D", "--defined-only", library).split()
            shown = {symbol.partition("@")[0] for symbol in defined if "@" in symbol}
            self.assertEqual(shown - {"TRIBUTARY_1", "TRIBUTARY_1.1", "TRIBUTARY_1.2", "TRIBUTARY_1.3"}, declared)
            self.assertEqual({symbol for symbol in defined
                              if "@@TRIBUTARY_1" not in symbol and symbol.startswith("_Z")}, set())


def must_run(*command, **options):
    """The output of a command that must succeed."""
    result = support.run(*command, **options)
    if result.returncode != 0:
        raise AssertionError(f"{shlex.join(str(word) for word in command)}\n{result.stdout}")
    return result.stdout


if __name__ == "__main__":
    support.main()
