"""Forward passes as steps of sessions: one submission for all layers."""

from __future__ import annotations

import threading
import warnings
from typing import Any

from .. import client, errors
from ..session import Session, StepEntry

# A session that ends so may be followed by another; what it did not finish is repeated by calls.
TRANSIENT = (errors.Aborted, errors.Unavailable, errors.DeadlineExceeded, errors.Cancelled)


class Ride:
    """One forward pass on a session."""

    def __init__(self, steps: Steps, session: Session, number: int) -> None:
        self._steps, self._session, self._number = steps, session, number
        #: what was handed over: (layer of the service, k, v); repeated by calls when the session ends too early
        self.sent: list[tuple[int, Any, Any]] = []

    def attend(self, layer: int, q: Any, k: Any, v: Any, out: Any) -> None:
        """Hands over the next layer."""
        self._session.attend(q, k, v, out=out)
        self.sent.append((layer, k, v))

    def finish(self) -> None:
        """Waits until all tokens are held, and leaves the session to the next pass."""
        self._session.wait(self._number)
        self._steps.give_back(self._session)

    def abandon(self) -> None:
        """Ends the session: no length has changed."""
        self._session.abandon()


class Steps:
    """The sessions of one attachment: each pass has one for itself."""

    def __init__(self, held: client.Cache, layers: int, dtype: str, max_rows: int) -> None:
        self._held, self._layers, self._dtype = held, layers, dtype
        self.max_rows = max_rows  #: a pass with more tokens goes by calls; 0: all do
        self._lock = threading.Lock()
        self._idle: list[Session] = []

    def begin(self, entries: list[StepEntry]) -> Ride | None:
        """Submits a pass over all layers. None: there is no session to be had, and the pass goes by calls."""
        while (session := self._take()) is not None:
            try:
                return Ride(self, session, session.submit(entries, layers=self._layers))
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

    def _take(self) -> Session | None:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        try:
            return self._held.session(max_rows=self.max_rows, dtype=self._dtype)
        except TRANSIENT:
            return None
        except errors.TributaryError as error:
            warnings.warn(f"tributary: no session, so each layer is a call: {error}", stacklevel=2)
            self.max_rows = 0
            return None
