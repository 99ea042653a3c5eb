"""The same for asyncio: methods are coroutines, and the event loop runs while the service works.

>>> async with await tributary.aio.connect("unix:/run/tributary.sock") as client:
...     cache = await client.create_cache("my-model", spec)
...     sequence = await cache.open()
...     done = await cache.attend(0, [Entry(sequence, 0, 1, 1)], q, k, v)

`Cache.attend` takes no thread: many may be in flight. The others, which are rare, wait on threads of the loop's default
executor. Cancelling `Cache.attend` cancels the call: the service drops it, if it has not taken effect, and its tensors
are let go of. The others, when they are cancelled, give up the answer and not the call. Either way what the call did
is unknown, as after `DeadlineExceeded`, and is settled by repeating it.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from . import client as blocking
from . import session as blocking_session
from .client import Attention, CacheSpec, Entry
from .session import Invitation, StepEntry

__all__ = ["Cache", "Client", "Session", "connect"]


class Session:
    """A `tributary.Session` for asyncio; made by `Cache.session`. Layers are handed over in the order of the calls."""

    def __init__(self, session: blocking_session.Session) -> None:
        self.blocking = session  #: the session itself, for threads
        self._turn = asyncio.Lock()

    async def submit(
        self,
        entries: Sequence[StepEntry | tuple[Any, ...]],
        *,
        layers: int,
        first_layer: int = 0,
        mode: str = "causal",
        append_only: bool = False,
    ) -> int:
        """As `tributary.Session.submit`."""
        async with self._turn:
            return await asyncio.to_thread(
                self.blocking.submit, entries, layers=layers, first_layer=first_layer, mode=mode, append_only=append_only
            )

    async def attend(self, q: Any, k: Any = None, v: Any = None, *, out: Any = None, lse: Any = None) -> Any:
        """As `tributary.Session.attend`."""
        async with self._turn:
            return await asyncio.to_thread(self.blocking.attend, q, k, v, out=out, lse=lse)

    async def append(self, k: Any, v: Any) -> None:
        """As `tributary.Session.append`."""
        async with self._turn:
            await asyncio.to_thread(self.blocking.append, k, v)

    async def wait(self, step: int) -> None:
        """As `tributary.Session.wait`."""
        async with self._turn:
            await asyncio.to_thread(self.blocking.wait, step)

    async def close(self) -> None:
        """As `tributary.Session.close`."""
        async with self._turn:
            await asyncio.to_thread(self.blocking.close)

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.blocking.close if error is None else self.blocking.abandon)


class Cache:
    """A `tributary.Cache` for asyncio; made by `Client.create_cache`."""

    def __init__(self, cache: blocking.Cache) -> None:
        self.blocking = cache  #: the cache itself, for threads

    @property
    def id(self) -> str:
        return self.blocking.id

    @property
    def spec(self) -> CacheSpec:
        return self.blocking.spec

    async def delete(self, *, timeout: float | None = None) -> None:
        """As `tributary.Cache.delete`."""
        await asyncio.to_thread(self.blocking.delete, timeout=timeout)

    async def open(self, *, timeout: float | None = None) -> int:
        """As `tributary.Cache.open`."""
        return await asyncio.to_thread(self.blocking.open, timeout=timeout)

    async def reopen(self, sequence: int, *, timeout: float | None = None) -> None:
        """As `tributary.Cache.reopen`."""
        await asyncio.to_thread(self.blocking.reopen, sequence, timeout=timeout)

    async def fork(self, parent: int, length: int | None = None, *, timeout: float | None = None) -> int:
        """As `tributary.Cache.fork`."""
        return await asyncio.to_thread(self.blocking.fork, parent, length, timeout=timeout)

    async def truncate(self, sequence: int, length: int, *, timeout: float | None = None) -> int:
        """As `tributary.Cache.truncate`."""
        return await asyncio.to_thread(self.blocking.truncate, sequence, length, timeout=timeout)

    async def close(self, sequence: int, *, timeout: float | None = None) -> None:
        """As `tributary.Cache.close`."""
        await asyncio.to_thread(self.blocking.close, sequence, timeout=timeout)

    async def session(self, **options: Any) -> Session:
        """As `tributary.Cache.session`."""
        return Session(await asyncio.to_thread(self.blocking.session, **options))

    async def append(
        self, layer: int, entries: Sequence[tuple[int, int, int]], k: Any, v: Any, *, timeout: float | None = None
    ) -> None:
        """As `tributary.Cache.append`."""
        await asyncio.to_thread(self.blocking.append, layer, entries, k, v, timeout=timeout)

    async def attend(
        self,
        layer: int,
        entries: Sequence[Entry | tuple[int, int, int, int]],
        q: Any,
        k: Any = None,
        v: Any = None,
        *,
        out: Any = None,
        lse: bool = False,
        mode: str = "causal",
        yield_ms: int = 0,
        output_dtype: str | None = None,
        o_scale: float | None = None,
        timeout: float | None = None,
    ) -> Attention:
        """As `tributary.Cache.attend`. Calls of one sequence take effect in the order in which they are begun."""
        args, result = self.blocking._call(
            layer, entries, q, k, v, out, lse, mode, yield_ms, output_dtype, o_scale
        )
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[None] = loop.create_future()

        def tell(error: Exception | None) -> None:
            if answer.done():  # cancelled
                return
            if error is None:
                answer.set_result(None)
            else:
                answer.set_exception(error)

        def done(error: Exception | None) -> None:  # on a thread of the client
            if not loop.is_closed():
                loop.call_soon_threadsafe(tell, error)

        call = self.blocking._core.attend_async(*args, done, timeout)
        try:
            await answer
        except asyncio.CancelledError:
            self.blocking._core.cancel(call)
            raise
        return result


class Client:
    """A connection to a service; made by `connect`. It ends with `close`, with its ``async with``, or the process."""

    def __init__(self, client: blocking.Client) -> None:
        self.blocking = client  #: the client itself, for threads
        # Before Python ends: calls in flight are told CANCELLED while there is one to tell it to.
        self._finalizer = weakref.finalize(self, client.close)

    async def create_cache(self, id: str, spec: CacheSpec, *, timeout: float | None = None) -> Cache:
        """Creates a cache, or finds the one that has this id and this spec."""
        return Cache(await asyncio.to_thread(self.blocking.create_cache, id, spec, timeout=timeout))

    async def join_session(self, invitation: Invitation, endpoint: int, *, timeout: float | None = None) -> Session:
        """As `tributary.Client.join_session`."""
        return Session(await asyncio.to_thread(self.blocking.join_session, invitation, endpoint, timeout=timeout))

    async def close(self) -> None:
        """Ends the connection. Calls in flight raise `Cancelled`."""
        await asyncio.to_thread(self._finalizer)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def connect(target: str, **options: Any) -> Client:
    """Connects to a service. `options` are those of `tributary.Client`."""
    return Client(await asyncio.to_thread(blocking.Client, target, **options))
