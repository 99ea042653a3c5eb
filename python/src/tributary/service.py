"""A service of one's own, for examples and tests: a coordinator with its workers, in a process beside this one."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
import weakref
from types import TracebackType

from . import errors
from .client import Client


def _stop(process: subprocess.Popen[bytes], folder: tempfile.TemporaryDirectory[str]) -> None:
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    folder.cleanup()


class Service:
    """A running service; made by `serve`. It ends with `close`, with its ``with``, or with this process."""

    def __init__(self, command: list[str], timeout: float) -> None:
        folder = tempfile.TemporaryDirectory(prefix="tributary-")
        self.target = f"unix:{folder.name}/socket"  #: what `Client` connects to
        log = os.path.join(folder.name, "log")
        with open(log, "wb") as output:
            process = subprocess.Popen(
                [*command, f"--listen={self.target}", "--admin_listen="],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.process = process  #: of the coordinator
        self._finalizer = weakref.finalize(self, _stop, process, folder)
        deadline = time.monotonic() + timeout
        while True:
            try:
                Client(self.target, timeout=0.5).close()
                return
            except errors.Unavailable as error:
                if process.poll() is None and time.monotonic() < deadline:
                    continue
                with open(log, encoding="utf-8", errors="replace") as said:
                    why = said.read()
                self.close()
                raise errors.Unavailable(f"the service did not start: {why}") from error

    def close(self) -> None:
        """Ends the service; calls in flight may finish, for a few seconds."""
        self._finalizer()

    def __enter__(self) -> Service:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serve(device: str = "cpu", workers: int = 1, *, program: str = "", timeout: float = 60.0) -> Service:
    """Starts a service on this machine that only this user reaches.

    Parameters
    ----------
    device : "cpu" or "cuda"
        With "cuda" each worker has a GPU.
    workers : int
        How many parts each sequence is spread over.
    program : str
        Path of tributary-coordinator; "": ``$TRIBUTARY_COORDINATOR``, or the one on the PATH.
    timeout : float
        Seconds within which it must answer.
    """
    path = program or os.environ.get("TRIBUTARY_COORDINATOR") or shutil.which("tributary-coordinator")
    if not path:
        raise FileNotFoundError("tributary-coordinator is not on the PATH: `make install`, or state `program`")
    return Service([path, f"--device={device}", f"--embedded_workers={workers}"], timeout)
