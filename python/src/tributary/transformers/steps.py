"""Forward passes on their way through the layers: as a step of a session, submitted once for all, or by calls."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable
from typing import Any

import torch

from .. import client, errors
from ..session import Session, StepEntry

# A session that ends so may be followed by another; what it did not finish is repeated by calls.
TRANSIENT = (errors.Aborted, errors.Unavailable, errors.DeadlineExceeded, errors.Cancelled)


def split(pieces: Iterable[tuple[int, int, int]], most: int) -> list[list[tuple[int, int, int]]]:
    """Deals (sequence, first position, rows) to calls of at most `most` rows each, in order."""
    calls: list[list[tuple[int, int, int]]] = [[]]
    free = most
    for sequence, position, rows in pieces:
        while rows > 0:
            if free == 0:
                calls.append([])
                free = most
            now = min(rows, free)
            calls[-1].append((sequence, position, now))
            position, rows, free = position + now, rows - now, free - now
    return calls


class Pass:
    """One forward pass: rows of sequences, handed over layer by layer.

    Parameters
    ----------
    steps : Steps
    pieces : list of (sequence, first position, rows)
    session, number
        The session that it goes by, and its step there; None: calls.
    """

    def __init__(
        self, steps: Steps, pieces: list[tuple[int, int, int]], session: Session | None = None, number: int = 0
    ) -> None:
        self._steps, self.pieces = steps, pieces
        self._session, self._number = session, number
        self._done = 0  # layers that the session was given
        # What it was given: (layer of the service, k, v), repeated by calls when the session ends too early. Of a GPU
        # nothing: when a session ends there, the pass is over.
        self._sent: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    @property
    def on_device(self) -> bool:
        """Whether layers are launched into a GPU's stream, and their results come later."""
        return self._session is not None and self._session.memory == "device"

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pieces: list[tuple[int, int, int]] | None = None,
        new: bool = True,
    ) -> torch.Tensor:
        """The next layer's output, [rows, heads, dim], where the query is.

        Parameters
        ----------
        layer : int
            Of the service.
        query, key, value : [rows, heads, dim]
        pieces
            Of the query's rows, where they are not all rows of the pass.
        new : bool
            Whether keys and values are appended.
        """
        home = query.device
        if not self.on_device:
            query, key, value = query.to("cpu"), key.to("cpu"), value.to("cpu")
        output = query.new_empty(*query.shape[:2], value.shape[2])
        if self._session is None or not self._by_session(layer, query, key, value, output):
            self._by_calls(layer, query, key, value, output, pieces or self.pieces, new)
        return output.to(home)

    def finish(self) -> None:
        """Waits for the GPU that is at it, until all tokens are held; to be called after the last layer."""
        if self.on_device:
            self._end()

    def abandon(self) -> None:
        """Gives it up: no length has changed where it went by a session."""
        if self._session is not None:
            self._session.abandon()

    def _end(self) -> None:
        assert self._session is not None
        self._session.wait(self._number)
        self._steps.give_back(self._session)

    def _by_session(self, layer: int, query: Any, key: Any, value: Any, output: Any) -> bool:
        """Whether the layer was computed. If not, what the session had been given is written by calls."""
        assert self._session is not None
        try:
            self._session.attend(query, key, value, out=output)
            self._done += 1
            if self.on_device:
                return True
            self._sent.append((layer, key, value))
            if self._done == self._steps.layers:
                self._end()
            return True
        except TRANSIENT:
            if self.on_device:
                raise
            # The group of workers has formed anew, say. Calls wait for it.
            self._session.abandon()
            self._session = None
        held = self._steps.held
        for sequence, at, _ in self.pieces:
            held.truncate(sequence, at)
        for sent, k, v in self._sent:
            if sent != layer:
                held.append(sent, self.pieces, k, v)
        return False

    def _by_calls(
        self, layer: int, query: Any, key: Any, value: Any, output: Any, pieces: list[tuple[int, int, int]], new: bool
    ) -> None:
        row_bytes = sum(t[0].numel() * t.element_size() for t in (query, key, value, output) if len(t))
        begin = 0
        for part in split(pieces, max(1, self._steps.most_bytes // max(1, row_bytes))):
            end = begin + sum(rows for _, _, rows in part)
            if begin == end:
                continue
            self._steps.held.attend(
                layer,
                [client.Entry(sequence, at, rows, rows if new else 0) for sequence, at, rows in part],
                query[begin:end],
                key[begin:end] if new else None,
                value[begin:end] if new else None,
                out=output[begin:end],
            )
            begin = end


class Steps:
    """The sessions of one attachment: each pass has one for itself.

    Parameters
    ----------
    held : Cache
        The service's.
    layers : int
        All layers that have keys and values.
    dtype : "f32", "bf16" or "f16"
        The model's.
    max_rows : int
        A pass with more tokens goes by calls; 0: all do.
    most_bytes : int
        Of a call's tensors.
    gpu : torch.device
        On which tensors stay; None: they are in host memory.
    """

    def __init__(
        self, held: client.Cache, layers: int, dtype: str, max_rows: int, most_bytes: int, gpu: torch.device | None
    ) -> None:
        self.held, self.layers, self.dtype = held, layers, dtype
        self.max_rows, self.most_bytes, self.gpu = max_rows, most_bytes, gpu
        self._lock = threading.Lock()
        self._idle: list[Session] = []

    def begin(self, pieces: list[tuple[int, int, int]], truncate: bool = False) -> Pass | None:
        """A pass as a step of a session, submitted for all layers; None: it has to go by calls.

        `truncate`: sequences are first rolled back to where their rows begin.
        """
        if not 0 < sum(rows for _, _, rows in pieces) <= self.max_rows:
            return None
        entries = [StepEntry(sequence, at, rows, rows, at if truncate else None) for sequence, at, rows in pieces]
        while (session := self._take()) is not None:
            try:
                return Pass(self, pieces, session, session.submit(entries, layers=self.layers))
            except TRANSIENT:  # it ended while it was idle
                session.abandon()
            except BaseException:
                self.give_back(session)  # the step was refused, and nothing else
                raise
        return None

    def give_back(self, session: Session) -> None:
        with self._lock:
            self._idle.append(session)

    def close(self) -> None:
        """Ends the sessions that are idle."""
        with self._lock:
            idle, self._idle = self._idle, []
        for session in idle:
            session.abandon()

    def open(self, max_rows: int) -> Session:
        """A session whose tensors lie beside the model where the service allows it, else in host memory."""
        if self.gpu is not None:
            try:
                with torch.cuda.device(self.gpu):
                    return self.held.session(max_rows=max_rows, dtype=self.dtype, memory="device")
            except (errors.FailedPrecondition, errors.Unimplemented) as error:
                warnings.warn(f"tributary: tensors are copied to host memory, for {error}", stacklevel=2)
                self.gpu = None
        return self.held.session(max_rows=max_rows, dtype=self.dtype)

    def _take(self) -> Session | None:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        try:
            return self.open(self.max_rows)
        except TRANSIENT:
            return None
        except errors.TributaryError as error:
            warnings.warn(f"tributary: no session, so each layer is a call: {error}", stacklevel=2)
            self.max_rows = 0
            return None
