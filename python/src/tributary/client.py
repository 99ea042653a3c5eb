"""Caches, sequences and attention over one connection."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from . import _core
from ._tensors import (
    CODES,
    bits,
    dtype_code,
    empty_beside,
    empty_output,
    output_bits,
    output_code,
    shape_of,
    written,
)
from .errors import refused
from .session import MEMORIES, Invitation, Session

_KV_DTYPES = ("fp8_e4m3", "fp8_e5m2", "bf16", "f16", "f32", "nvfp4")
_MODES = {"causal": 1, "dflash": 2}
_WINDOW_BASES = {"query": 1, "anchor": 2}
_UPDATES = {"open": 1, "fork": 2, "truncate": 3, "close": 4}


def _update(update: tuple[Any, ...]) -> tuple[int, Any, Any, Any]:
    """A change as the core takes it: kind, sequence, parent, length; of a fork with all tokens the length is None."""
    match update:
        case ("open",):
            return (_UPDATES["open"], 0, 0, 0)
        case ("fork", parent):
            return (_UPDATES["fork"], 0, parent, None)
        case ("fork", parent, length):
            return (_UPDATES["fork"], 0, parent, length)
        case ("truncate", sequence, length):
            return (_UPDATES["truncate"], sequence, 0, length)
        case ("close", sequence):
            return (_UPDATES["close"], sequence, 0, 0)
    raise refused("updates", f"{update!r} is no change of a sequence")


@dataclass(frozen=True)
class LayerSpec:
    """What differs in one layer. 0, ``()`` and None stand for the cache's value, or for none."""

    window_left: int | None = None  #: a row at position p sees keys from p - window_left on
    sinks: Sequence[float] = ()  #: [q_heads] logits, natural log
    soft_cap: float | None = None  #: 0.0: none, whatever the cache has
    sm_scale: float = 0.0
    q_heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    value_head_dim: int = 0
    k_scale: Sequence[float] = ()  #: of FP8, real = stored * scale: one value, or [kv_heads]
    v_scale: Sequence[float] = ()
    kv_dtype: str = ""  #: as in `CacheSpec`; "": the cache's
    window_right: int | None = None  #: of drafts ("dflash"): keys up to p + window_right are seen
    window_base: str = "query"  #: of drafts: p is each row's position, or that of the block's first row ("anchor")
    causal_block: bool = False  #: of drafts: a row does not see the rows after it
    o_scale: float = 0.0  #: of outputs in FP8 and NVFP4, real = stored * scale; 0: 1.0

    def __post_init__(self) -> None:
        if self.kv_dtype and self.kv_dtype not in _KV_DTYPES:
            raise refused("kv_dtype", f"must be one of {', '.join(_KV_DTYPES)}, is {self.kv_dtype!r}")
        if self.window_base not in _WINDOW_BASES:
            raise refused("window_base", f"must be one of {', '.join(_WINDOW_BASES)}, is {self.window_base!r}")

    @property
    def _kv_dtype_code(self) -> int:
        return CODES[self.kv_dtype] if self.kv_dtype else 0

    @property
    def _window_base_code(self) -> int:
        return _WINDOW_BASES[self.window_base]


@dataclass(frozen=True)
class CacheSpec:
    """The attention geometry of one model."""

    layers: int
    q_heads: int  #: a multiple of kv_heads, at most 16 times as many
    kv_heads: int
    head_dim: int  #: of queries and keys: 64, 80, 96, 128, 192 or 256
    capacity_tokens: int  #: over all sequences
    value_head_dim: int = 0  #: of values and outputs; 0: head_dim
    kv_dtype: str = "fp8_e4m3"  #: or "fp8_e5m2", "bf16", "f16", "nvfp4"; on CPU workers "f32"
    page_size: int = 0  #: tokens of a worker's page; 0: 16
    sm_scale: float = 0.0  #: 0: 1 / sqrt(head_dim)
    soft_cap: float = 0.0  #: 0: none
    window_capacity_tokens: int = 0  #: tokens of layers with a window, in pages of their own; 0: shared pages
    rollback_tokens: int = 0  #: how far a sequence may be truncated once tokens were given up; 0: 1024
    layer_specs: Sequence[LayerSpec] = field(default=())  #: none, one for all layers, or one for each
    modes: Sequence[str] = ()  #: which modes will be asked for, and no others; (): any that the service has
    interleave: int = 0  #: tokens dealt to one worker at a time, a divisor of page_size; 0: page_size
    fp8_queries: bool = False  #: queries are rounded to FP8 where they meet a cache that is FP8
    fp8_weights: bool = False  #: with fp8_queries: weights of prompts may be, too, on GPUs
    replicas: int | None = None  #: other workers that keep each worker's tokens as well, 0 or 1; None: the service's

    def __post_init__(self) -> None:
        if self.kv_dtype not in _KV_DTYPES:
            raise refused("kv_dtype", f"must be one of {', '.join(_KV_DTYPES)}, is {self.kv_dtype!r}")
        for index, layer in enumerate(self.layer_specs):
            if not isinstance(layer, LayerSpec):
                raise refused(f"layer_specs[{index}]", f"must be a LayerSpec, is {type(layer).__name__}")
        for mode in self.modes:
            if mode not in _MODES:
                raise refused("modes", f"must be of {', '.join(_MODES)}, has {mode!r}")

    @property
    def _kv_dtype_code(self) -> int:
        return CODES[self.kv_dtype]

    @property
    def _mode_codes(self) -> list[int]:
        return [_MODES[mode] for mode in self.modes]


class Entry(NamedTuple):
    """One sequence's part of a call."""

    sequence: int
    first_position: int  #: of the first row and of the first new token
    rows: int  #: query rows; of an append: tokens
    new_tokens: int = 0  #: tokens whose k and v come with the call: 0 or ``rows``


class Attention(NamedTuple):
    """What a call computed."""

    output: Any  #: [rows, q_heads, value_head_dim] in q's dtype, or as `output_dtype` of the call says
    lse: Any  #: [rows, q_heads] float32, natural log, -inf where a row sees no key; None when not asked for


class Call:
    """A call in flight; made by `Cache.start`. It goes on when nobody keeps this."""

    def __init__(self, core: _core.Client, attention: Attention) -> None:
        self._core = core
        self._attention = attention
        self._number = 0
        self._error: Exception | None = None
        self._over = threading.Event()

    def _start(self, args: tuple[Any, ...], timeout: float | None) -> None:
        self._number = self._core.attend_async(*args, self._end, timeout)

    def _end(self, error: Exception | None) -> None:  # on a thread of the client
        self._error = error
        self._over.set()

    def done(self) -> bool:
        """Whether `result` would not wait."""
        return self._over.is_set()

    def result(self) -> Attention:
        """Waits for the answer. Raises what `Cache.attend` would have raised, and `Cancelled` after `cancel`."""
        if not self._over.is_set():
            self._core.check_process()  # in a child of fork() nobody would end it
            self._over.wait()  # the client ends every call by its timeout
        if self._error is not None:
            raise self._error
        return self._attention

    def cancel(self) -> None:
        """Gives the call up: `result` raises `Cancelled`, unless the answer is there before.

        The service drops a call that has not taken effect. Whether it has is not known afterwards, as after
        `DeadlineExceeded`, and is settled by repeating it.
        """
        self._core.cancel(self._number)


class Cache:
    """A cache of a service; made by `Client.create_cache`.

    Tensors are host memory: numpy arrays, or whatever exports DLPack or a buffer (torch tensors on the CPU). Their
    dtypes are float32, float16 and bfloat16; arrays of uint16 are taken for the bits of bfloat16. What is not
    contiguous is copied first. No method holds the GIL while it waits.

    Each method that asks the service takes `timeout`, in seconds: its call ends by then, repeats included. None: the
    client's.
    """

    def __init__(self, core: _core.Client, id: str, spec: CacheSpec, timeout: float | None = None) -> None:
        if not isinstance(spec, CacheSpec):
            raise refused("spec", f"must be a CacheSpec, is {type(spec).__name__}")
        self._core = core
        self.id = id
        self.spec = spec
        #: workers that it is spread over, tokens of a worker's page, tokens that it holds
        self.ranks, self.page_size, self.capacity_tokens = core.create_cache(id, spec, timeout)
        self._warnings: set[str] = set()  # of sessions, that were shown

    def delete(self, *, timeout: float | None = None) -> None:
        """Frees the cache and all its sequences."""
        self._core.delete_cache(self.id, timeout)

    def open(self, *, timeout: float | None = None) -> int:
        """Opens an empty sequence; returns its id."""
        return self._core.open_sequence(self.id, timeout)

    def reopen(self, sequence: int, *, timeout: float | None = None) -> None:
        """Opens a sequence that raised `DataLoss` again, empty."""
        self._core.reopen_sequence(self.id, sequence, timeout)

    def fork(self, parent: int, length: int | None = None, *, timeout: float | None = None) -> int:
        """A sequence that begins with the first `length` tokens of another (None: with all); returns its id."""
        return self._core.fork_sequence(self.id, parent, length, timeout)

    def truncate(self, sequence: int, length: int, *, timeout: float | None = None) -> int:
        """Rolls back to at most `length` tokens; returns how many are left."""
        return self._core.truncate_sequence(self.id, sequence, length, timeout)

    def close(self, sequence: int, *, timeout: float | None = None) -> None:
        """Closes a sequence and frees its pages."""
        self._core.close_sequence(self.id, sequence, timeout)

    def update(self, updates: Sequence[tuple[Any, ...]], *, timeout: float | None = None) -> list[int]:
        """Changes many sequences in one call, in order, all of them or none; returns the sequence of each change.

        Parameters
        ----------
        updates : sequence of tuples
            ``("open",)``, ``("fork", parent)``, ``("fork", parent, length)``, ``("truncate", sequence, length)`` or
            ``("close", sequence)``, each as the method of its name.
        """
        return self._core.update_sequences(self.id, [_update(update) for update in updates], timeout)

    def session(
        self,
        *,
        max_rows: int = 1,
        max_new_tokens: int | None = None,
        dtype: str = "f32",
        output_dtype: str | None = None,
        memory: str = "default",
        lse: bool = False,
        max_steps: int = 2,
        wait_timeout: float = 10.0,
        endpoints: int = 1,
        kv_replicated: bool = False,
        timeout: float | None = None,
    ) -> Session:
        """Opens a session: model steps are submitted once, and then their layers are handed over.

        Parameters
        ----------
        max_rows, max_new_tokens : int
            Of a step, over all its sequences; None: as many new tokens as rows.
        dtype : "f32", "bf16" or "f16"
            Of q, k and v.
        output_dtype : "f32", "bf16", "f16" or "fp8_e4m3"
            Of outputs; None: `dtype`. FP8 outputs have the scale ``LayerSpec.o_scale`` of their layer. Of "device"
            memory only `dtype`.
        memory : "default", "host", "messages" or "device"
            Where they travel. "host": shared memory of this machine. "device": a mailbox on torch's current GPU;
            wants a client library with CUDA. "default": "host" over a Unix socket where the service offers it, else
            "messages".
        lse : bool
            Whether layers may ask for their log-sum-exp.
        max_steps : int
            Steps that are submitted and not over, at a time.
        wait_timeout : float
            Seconds that either side waits for a layer before the session is given up.
        endpoints : int
            Processes that the model's heads are split over, each with an endpoint of the session. The others join
            with `Client.join_session` and this one's `Session.invitation`. Of "host" and "device" memory.
        kv_replicated : bool
            Whether every endpoint has all KV heads. Then endpoint 0 alone hands k and v over.

        Raises
        ------
        InvalidArgument
            The model's heads cannot be split over so many endpoints (``open.endpoints``).
        FailedPrecondition
            The service has no such memory for this host (``open.memory``).
        Unimplemented
            "device", and the client library was built without CUDA.

        Warns
        -----
        RuntimeWarning
            With what would make the session faster, as the service says (`Session.warning`); once for a cache.
        """
        if memory not in MEMORIES:
            raise refused("memory", f"must be one of {', '.join(MEMORIES)}, is {memory!r}")
        tokens = max_rows if max_new_tokens is None else max_new_tokens
        core = self._core.open_session(
            self.id,
            MEMORIES[memory],
            max_rows,
            tokens,
            (dtype_code(dtype), output_code(output_dtype)),
            lse,
            max_steps,
            wait_timeout,
            endpoints,
            kv_replicated,
            timeout,
        )
        session = Session(core)
        if session.warning and session.warning not in self._warnings:
            self._warnings.add(session.warning)
            warnings.warn(f"tributary: {session.warning}", RuntimeWarning, stacklevel=2)
        return session

    def append(
        self, layer: int, entries: Sequence[tuple[int, int, int]], k: Any, v: Any, *, timeout: float | None = None
    ) -> None:
        """Writes keys and values of one layer, and computes nothing.

        Parameters
        ----------
        entries : sequence of (sequence, first_position, tokens)
            `Entry` fits too. A position is the layer's length, or such that all tokens are held already (a repeat).
        k : [tokens of all entries, kv_heads, head_dim]
        v : [tokens of all entries, kv_heads, value_head_dim]

        Raises
        ------
        OutOfRange
            A position beyond the end; ``.length`` tokens are held.
        AlreadyExists
            The position holds other bytes.
        ResourceExhausted
            No free pages. Nothing was changed.
        """
        self._core.append(self.id, layer, entries, bits(k), bits(v), timeout)

    def attend(
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
        """Appends the new tokens of the entries, and computes one layer's attention of their rows.

        Parameters
        ----------
        entries : sequence of Entry
        q : [rows of all entries, q_heads, head_dim]
        k : [new tokens of all entries, kv_heads, head_dim], or None
        v : [new tokens of all entries, kv_heads, value_head_dim], or None
        out : [rows, q_heads, value_head_dim], contiguous, q's dtype or as output_dtype says
            Where the output goes; None: it is made, beside q (a tensor of torch for a tensor of torch).
        lse : bool
            Whether the log-sum-exp of each row and head is wanted.
        mode : "causal" or "dflash"
        yield_ms : int
            Calls that come up to so many milliseconds later go first: for work that nobody waits for. At most 1000.
        output_dtype : "f32", "bf16", "f16", "fp8_e4m3" or "nvfp4"
            Of the output; None: q's. "fp8_e4m3" is uint8, or torch's float8_e4m3fn where `out` is that. "nvfp4" is
            one-dimensional uint8, with the elements, two to a byte, ahead of their block scales (``types.proto``).
        o_scale : float
            Of "fp8_e4m3" and "nvfp4", real = stored * scale; None: the layer's.

        Raises
        ------
        OutOfRange, AlreadyExists, ResourceExhausted
            As `append` does. Any other error of `tributary.errors`; after `Aborted`, `Unavailable` and
            `DeadlineExceeded` the call may be repeated as it was.
        """
        args, result = self._call(layer, entries, q, k, v, out, lse, mode, yield_ms, output_dtype, o_scale)
        self._core.attend(*args, timeout)
        return result

    def start(
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
    ) -> Call:
        """As `attend`, without waiting: returns the call, which tells the result or is cancelled.

        Many may be in flight. Calls of one sequence take effect in the order in which they are started. Tensors must
        not change until the call is over.
        """
        args, result = self._call(layer, entries, q, k, v, out, lse, mode, yield_ms, output_dtype, o_scale)
        call = Call(self._core, result)
        call._start(args, timeout)
        return call

    def _call(
        self,
        layer: int,
        entries: Sequence[Any],
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: bool,
        mode: str,
        yield_ms: int,
        output_dtype: str | None,
        o_scale: float | None,
    ) -> tuple[tuple[Any, ...], Attention]:
        """What the extension module is told of a call, and where its results will be."""
        if mode not in _MODES:
            raise refused("mode", f"must be one of {', '.join(_MODES)}, is {mode!r}")
        dim = self._value_head_dim(layer)
        kind = (output_code(output_dtype), o_scale, dim)
        rows, heads, _ = shape_of("q", q)
        shape = (rows, heads, dim)
        if out is None:
            out = empty_beside(q, shape) if output_dtype is None else empty_output(q, shape, output_dtype)
        sums = np.empty((rows, heads), np.float32) if lse else None
        written("out", out)
        into = bits(out) if output_dtype is None else output_bits(out)
        args = (self.id, layer, _MODES[mode], entries, bits(q), bits(k), bits(v), into, sums, yield_ms, kind)
        return args, Attention(out, sums)

    def _value_head_dim(self, layer: int) -> int:
        specs = self.spec.layer_specs
        if specs:
            of_layer = specs[layer if isinstance(layer, int) and 0 <= layer < len(specs) else 0]
            if of_layer.value_head_dim or of_layer.head_dim:
                return of_layer.value_head_dim or of_layer.head_dim
        return self.spec.value_head_dim or self.spec.head_dim


class Client:
    """A connection to a service, for all threads of a process.

    Parameters
    ----------
    target : str
        "host:port" or "unix:/path".
    timeout : float
        Seconds after which every call ends, repeats included.
    shared_memory_bytes : int
        > 0: tensors travel in shared memory of this size (same machine, same user).
    max_attempts : int
        How often a call is tried on UNAVAILABLE and ABORTED. 1: it is not repeated; 0: as often as
        the timeout allows.
    tls_certificate, tls_key, tls_authorities, token_file : str
        Paths of files; "" when not used.
    lease : str
        The lease that sequences opened by this client belong to: 1 to 128 of [A-Za-z0-9._-], drawn
        at random. The service closes them when no client has presented the lease for a while, as
        after this process died. "": they stay until they are closed.

    Raises
    ------
    Unavailable
        Nobody answers within the timeout.
    """

    def __init__(
        self,
        target: str,
        *,
        timeout: float = 30.0,
        shared_memory_bytes: int = 0,
        max_attempts: int = 0,
        tls_certificate: str = "",
        tls_key: str = "",
        tls_authorities: str = "",
        token_file: str = "",
        lease: str = "",
    ) -> None:
        self._core = _core.Client(
            target,
            timeout,
            shared_memory_bytes,
            max_attempts,
            tls_certificate,
            tls_key,
            tls_authorities,
            token_file,
            lease,
        )

    def create_cache(self, id: str, spec: CacheSpec, *, timeout: float | None = None) -> Cache:
        """Creates a cache, or finds the one that has this id and this spec."""
        return Cache(self._core, id, spec, timeout)

    def join_session(self, invitation: Invitation, endpoint: int, *, timeout: float | None = None) -> Session:
        """Joins a session that another process of the same host has opened with several endpoints.

        From then on all endpoints do the same: `Session.submit`, `Session.attend` or `Session.append` for each layer,
        `Session.wait`. Endpoint 0 sends the step, the others wait for what becomes of it. Tensors are those of the
        endpoint's heads: see `Session.layer_shape`. The session ends for all of them when one leaves, or hands nothing
        over for the session's wait timeout.

        Parameters
        ----------
        invitation : Invitation
            `Session.invitation` of the process that opened the session. It may be pickled.
        endpoint : int
            Which one this process is to be: 1 to endpoints - 1. Each joins once.

        Raises
        ------
        NotFound
            No session with this number and secret is open (``join.session_id``).
        InvalidArgument, AlreadyExists
            There is no such endpoint, or it has joined (``join.endpoint``).
        """
        memory = MEMORIES[invitation.memory]
        return Session(self._core.join_session(invitation.session, invitation.secret, endpoint, memory, timeout))

    @property
    def options(self) -> dict[str, str]:
        """The options in force by name, each as text with its unit, those that were not given too.

        Files are shown by their paths, and a lease as "(set)": sequences are open to whoever knows it.
        """
        lines = self._core.options().splitlines()
        return {name: value for name, _, value in (line.partition(": ") for line in lines)}

    def close(self) -> None:
        """Ends the connection, when calls of other threads have ended."""
        self._core.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
