"""The runtime image built for real, by buildah without a daemon, and the programs of this build run in it.

The image's base is made by mmdebstrap, since a registry may be out of reach: every step after FROM is the
Dockerfile's. It takes root, a Debian mirror and about a minute, so it runs when it is asked for
(TRIBUTARY_IMAGE_BUILD=1, as `make image-test` does). The build stages, which compile everything, are what `make
install` is; image_test.py runs that.
"""

import json
import os
import pathlib
import tempfile
import unittest

import image_test
import support

BASE = "localhost/debian:bookworm"
IMAGE = "localhost/tributary:runtime"
SERVES = """
tributary-coordinator --listen=unix:/tmp/socket --admin_listen=127.0.0.1:0 --embedded_workers=2 --threads=1 2>/tmp/log &
until tributary health --target=unix:/tmp/socket >/dev/null; do
  kill -0 $! || { cat /tmp/log; exit 1; }
  sleep 0.1
done
tributary check --target=unix:/tmp/socket
kill -TERM $!
wait $!
"""


@unittest.skipUnless(os.environ.get("TRIBUTARY_IMAGE_BUILD"), "builds an image for a minute: run `make image-test`")
@unittest.skipUnless(os.geteuid() == 0, "needs root")
@unittest.skipIf(os.environ.get("TRIBUTARY_SANITIZE"), "a build with sanitizers needs their libraries besides")
class Image(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        support.need("buildah"), support.need("mmdebstrap")
        folder = tempfile.TemporaryDirectory(prefix="tributary-image-")
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        base = cls.folder / "base.tar"
        made = support.run("mmdebstrap", "--variant=apt", "--quiet", "bookworm", base, timeout=500)
        if made.returncode != 0:
            raise unittest.SkipTest(f"no base image could be made: {made.stdout.strip()[-400:]}")
        scratch = cls.buildah("from", "scratch").strip()
        cls.buildah("add", "--quiet", scratch, base, "/")
        cls.buildah("commit", "--quiet", "--rm", scratch, BASE)
        base.unlink()
        cls.said = cls.buildah("build", "--format=docker", "--pull-never", "--target=runtime",
                               f"--build-arg=DEBIAN_IMAGE={BASE}", "--build-arg=REVISION=abc123",
                               f"--file={image_test.DOCKERFILE}", f"--tag={IMAGE}", support.SOURCE)
        cls.container = cls.buildah("from", "--pull-never", IMAGE).strip()
        programs = [support.BIN / name for name in image_test.PROGRAMS]
        cls.buildah("copy", "--quiet", cls.container, *programs, "/usr/local/bin/")

    @classmethod
    def buildah(cls, *words):
        store = [f"--root={cls.folder / 'store'}", f"--runroot={cls.folder / 'run'}", "--storage-driver=vfs"]
        result = support.run("buildah", *store, *words, timeout=500, env=os.environ | {"BUILDAH_ISOLATION": "chroot"})
        if result.returncode != 0:
            raise AssertionError(f"buildah {words[0]}:\n{result.stdout[-4000:]}")
        return result.stdout

    def inside(self, script):
        return self.buildah("run", self.container, "--", "/usr/bin/tini", "-s", "-g", "--",
                            "/bin/bash", "-euo", "pipefail", "-c", script)

    def test_is_what_the_dockerfile_says(self):
        config = json.loads(self.buildah("inspect", "--type=image", IMAGE))["Docker"]["config"]
        self.assertEqual(config["User"], "65532:65532")
        self.assertEqual(config["Entrypoint"], ["/usr/bin/tini", "-s", "-g", "--"])
        self.assertEqual(config["Cmd"], ["tributary-coordinator"])
        self.assertEqual(config["StopSignal"], "SIGTERM")
        self.assertEqual(sorted(config["ExposedPorts"]), ["7400/tcp", "7401/tcp", "7402/tcp", "9464/tcp"])
        self.assertEqual(config["Labels"]["org.opencontainers.image.revision"], "abc123")
        self.assertNotRegex(self.said.lower(), r"warn(?!.*debconf)")

    def test_programs_run_as_its_user_and_find_their_libraries(self):
        self.assertEqual(self.inside("id -u").split(), ["65532"])
        for name in image_test.PROGRAMS:
            self.assertNotIn("not found", self.inside(f"ldd /usr/local/bin/{name} || true"))
        self.assertIn("2 ranks", self.inside(SERVES))

    def test_has_the_providers_of_infiniband_and_its_packages_are_listed(self):
        self.assertIn("libmlx5", self.inside("ls /usr/lib/*-linux-gnu/libibverbs/ /etc/libibverbs.d"))
        installed = self.inside("dpkg-query -W -f '${Package}\\n'").split()  # what makers of SBOMs read
        self.assertLessEqual(set(image_test.LISTS["runtime"]), set(installed))
        self.assertFalse({"gcc", "g++", "make", "cmake", "git"} & set(installed))


if __name__ == "__main__":
    support.main()
