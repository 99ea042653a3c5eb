"""A service of one's own, for examples and tests: in this process, or in one beside it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
import weakref
from types import TracebackType

from . import _core, errors
from .client import Client

_MOST_WORKERS = 1024  # of one process, as the service has it
_DRAIN = 5.0  # seconds that calls in flight may take to finish
# What the driver must find when the process first uses a GPU. Streams that share a queue of the GPU would wait for each
# other, and so would a kernel that is loaded when it is first launched and one that waits for it.
_CUDA = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}


def _stop_process(process: subprocess.Popen[bytes], folder: str, owner: int) -> None:
    if os.getpid() != owner:
        return  # a child of fork() has a copy of this: the process and its folder are its parent's
    process.terminate()
    try:
        process.wait(timeout=2 * _DRAIN)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)


def _await(target: str, process: subprocess.Popen[bytes], timeout: float) -> str:
    """Waits until the process serves; why it does not, or ""."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            Client(target, timeout=0.5).close()
            return ""
        except errors.Unavailable as error:
            if process.poll() is not None or time.monotonic() >= deadline:
                return str(error)


class Service:
    """A running service; made by `serve`. It ends with `close`, with its ``with``, or with this process.

    A child of `os.fork` leaves it alone, whatever it does and however it ends.
    """

    def __init__(self, device: str, workers: int, program: str | None, timeout: float) -> None:
        self.target: str  #: what `Client` connects to
        self.process: subprocess.Popen[bytes] | None = None  #: the coordinator's; None: it is this process
        if program is None:
            service = _core.EmbeddedService(device, workers)
            self.target = service.target()
            self._finalizer: weakref.finalize[..., Service] = weakref.finalize(self, service.stop, _DRAIN)
            return
        # Not a TemporaryDirectory, which a child of fork() would delete when it ends.
        folder = tempfile.mkdtemp(prefix="tributary-")
        self.target = f"unix:{folder}/socket"
        log = os.path.join(folder, "log")
        words = [f"--device={device}", f"--embedded_workers={workers}", f"--listen={self.target}", "--admin_listen="]
        try:
            with open(log, "wb") as output:
                self.process = subprocess.Popen(
                    [program, *words], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
                )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._finalizer = weakref.finalize(self, _stop_process, self.process, folder, os.getpid())
        if _await(self.target, self.process, timeout):
            with open(log, encoding="utf-8", errors="replace") as said:
                why = said.read()
            self.close()
            raise errors.Unavailable(f"the service did not start: {why}")

    def close(self) -> None:
        """Ends the service; calls in flight may finish, for a few seconds."""
        self._finalizer()

    def __enter__(self) -> Service:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _prepare_cuda() -> None:
    torch = sys.modules.get("torch")
    late = torch is not None and torch.cuda.is_initialized()
    if late and any(name not in os.environ for name in _CUDA):
        stated = " ".join(f"{name}={value}" for name, value in _CUDA.items())
        warnings.warn(f"the GPU is in use already: call serve() before, or start Python with {stated}", stacklevel=3)
    for name, value in _CUDA.items():
        os.environ.setdefault(name, value)


def serve(device: str = "cpu", workers: int = 1, *, program: str | None = None, timeout: float = 60.0) -> Service:
    """Starts a service on this machine that only this user reaches.

    Parameters
    ----------
    device : "cpu" or "cuda"
        With "cuda" each worker has a GPU. A service in this process shares the GPU with the host without MPS; call this
        before anything else uses the GPU, since the driver reads its settings then.
    workers : int
        How many parts each sequence is spread over.
    program : str or None
        None: the service runs in this process, and its caches end with it. Else it runs in a process beside this one: the
        path of tributary-coordinator; "": ``$TRIBUTARY_COORDINATOR``, or the one on the PATH.
    timeout : float
        Seconds within which a process must answer.

    Raises
    ------
    InvalidArgument
        ``.field`` says of which parameter.
    FailedPrecondition
        The device is missing.
    """
    if device not in ("cpu", "cuda"):
        raise errors.refused("device", f"must be cpu or cuda, is {device!r}")
    if not isinstance(workers, int) or not 1 <= workers <= _MOST_WORKERS:
        raise errors.refused("workers", f"must be 1 to {_MOST_WORKERS}, is {workers!r}")
    _core.milliseconds(timeout, "timeout")
    if program == "" or (program is None and not _core.has_embedded_service):
        program = os.environ.get("TRIBUTARY_COORDINATOR") or shutil.which("tributary-coordinator")
        if not program:
            raise FileNotFoundError("tributary-coordinator is not on the PATH: `make install`, or state `program`")
    if program is None and device == "cuda":
        _prepare_cuda()
    return Service(device, workers, program, timeout)
