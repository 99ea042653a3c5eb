"""What the deployment tests share: where things are, running programs, free ports, and skipping aloud."""

import contextlib
import fcntl
import os
import pathlib
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import unittest

SOURCE = pathlib.Path(os.environ.get("TRIBUTARY_SOURCE_DIR", pathlib.Path(__file__).resolve().parents[2]))
BUILD = pathlib.Path(os.environ.get("TRIBUTARY_BUILD_DIR", SOURCE / "build/cpu"))
# Set apart so that the tests can run against programs built elsewhere.
BIN = pathlib.Path(os.environ.get("TRIBUTARY_BIN_DIR", BUILD / "bin"))
TOOLS = pathlib.Path(os.environ.get("TRIBUTARY_DEPLOY_TOOLS", BUILD / "deploy-tools"))

ALL_SKIPPED = 77  # CTest's SKIP_RETURN_CODE


def need(program):
    """The path of a program, or the test is skipped with the reason."""
    path = shutil.which(str(program))
    if path is None:
        raise unittest.SkipTest(f"{program} is not installed: deploy/install-packages.sh deploy")
    return path


def need_tool(name):
    """The path of a tool that tools.sh makes, or the test is skipped."""
    path = TOOLS / name
    if not path.exists():
        raise unittest.SkipTest(f"{path} was not made: tests/deploy/tools.sh says why")
    return path


def run(*command, timeout=120, **options):
    """Runs a command to its end; its output (both streams) and exit code are in the result."""
    return subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, timeout=timeout, check=False, **options)


def own_network():
    """The beginning of a command that runs the rest in a network of its own, with mounts that nobody else sees, or []
    where that is not permitted."""
    for unshare in (["unshare", "--net", "--mount"], ["unshare", "--net", "--mount", "--user", "--map-root-user"]):
        command = [*unshare, sys.executable, "-B", __file__]
        try:
            if run(*command, "true").returncode == 0:
                return command
        except FileNotFoundError:
            break
    return []


def _bring_loopback_up():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(any_socket, 0x8913, request))[1]  # SIOCGIFFLAGS
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", flags | 1))  # SIOCSIFFLAGS, IFF_UP


class FreePorts:
    """Ports that were free when asked for; no two alike.

    They lie below the range from which the kernel picks ports for outgoing connections, so that nobody takes one
    between this and the program that listens on it, other than by the same method.
    """

    def __init__(self):
        self._next = 12000 + os.getpid() % 15000

    def take(self):
        while True:
            self._next += 1
            with contextlib.closing(socket.socket()) as probe:
                try:
                    probe.bind(("127.0.0.1", self._next))
                    return self._next
                except OSError:
                    continue


class Process:
    """A program in the background, its output in a file."""

    def __init__(self, name, command, cwd=None, env=None):
        self.name = name
        self.command = [str(word) for word in command]
        self._log = tempfile.NamedTemporaryFile("w+", prefix=f"{name}-", suffix=".log")
        self._child = subprocess.Popen(self.command, stdout=self._log, stderr=subprocess.STDOUT,
                                       stdin=subprocess.DEVNULL, cwd=cwd, env=env)

    def output(self):
        return pathlib.Path(self._log.name).read_text(encoding="utf-8", errors="replace")

    def pid(self):
        return self._child.pid

    def exit_code(self):
        """None while it runs."""
        return self._child.poll()

    def terminate(self, number=signal.SIGTERM):
        if self._child.poll() is None:
            self._child.send_signal(number)

    def wait(self, seconds):
        return self._child.wait(timeout=seconds)

    def kill(self):
        """Ends it, if it runs, and forgets its output."""
        if self._child.poll() is None:
            self._child.kill()
            self._child.wait()
        self._log.close()


def wait_until(what, condition, seconds, processes=()):
    """Asks until `condition` holds. Ends early, with the output, when one of the processes has ended."""
    deadline = time.monotonic() + seconds
    while not condition():
        for process in processes:
            if process.exit_code() is not None:
                raise AssertionError(f"{process.name} ended with {process.exit_code()} while waiting for {what}:\n"
                                     f"{' '.join(process.command)}\n{process.output()}")
        if time.monotonic() > deadline:
            logs = "\n".join(f"--- {process.name}\n{process.output()}" for process in processes)
            raise AssertionError(f"{what}: not within {seconds} s\n{logs}")
        time.sleep(0.05)


# Set while the tests run in a network of their own, where listening on all addresses reaches nobody.
ISOLATED = "TRIBUTARY_TEST_NETWORK"


def main(isolated=False):
    """unittest.main, with an exit code of its own when nothing could run. `isolated`: in a network of its own, if the
    machine permits it."""
    if isolated and ISOLATED not in os.environ and (prefix := own_network()):
        os.execvpe(prefix[0], [*prefix, sys.executable, "-B", *sys.argv], {**os.environ, ISOLATED: "own"})
    program = unittest.main(exit=False, verbosity=2)
    result = program.result
    if not result.wasSuccessful():
        sys.exit(1)
    if result.testsRun > 0 and len(result.skipped) < result.testsRun:
        sys.exit(0)
    print("skipped:", "; ".join(sorted({reason for _, reason in result.skipped})) or "no test ran")
    sys.exit(ALL_SKIPPED)


if __name__ == "__main__":  # own_network() calls it: inside, and with a command to go on with
    _bring_loopback_up()
    os.execvp(sys.argv[1], sys.argv[1:])
