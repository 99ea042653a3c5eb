"""Sessions: a model step is submitted once, and then one layer after another is handed over."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from . import _core
from ._tensors import CODES, address, empty_beside, empty_output, output_bits, shape_of, strided, written
from .errors import refused

MEMORIES = {"default": 0, "host": 1, "device": 2, "messages": 3}
_MODES = {"causal": 1, "dflash": 2}


class StepEntry(NamedTuple):
    """One sequence's part of a step. The fork, the truncation and the rows apply in this order."""

    sequence: int
    first_position: int  #: of the first row and of the first new token
    rows: int  #: query rows; 0 in an append-only step
    new_tokens: int = 0  #: tokens whose k and v come with the layers: 0 or ``rows``; of an append-only step any
    truncate_to: int | None = None  #: tokens that the sequence is first rolled back to
    fork_from: int | None = None  #: the sequence first becomes a fork of this one, as that is before the step
    fork_length: int | None = None  #: tokens of the fork; None: all


@dataclass(frozen=True)
class LayerShape:
    """What the tensors of a layer must be."""

    q_heads: int
    kv_heads: int  #: 0: another endpoint hands k and v over
    head_dim: int  #: of queries and keys
    value_head_dim: int  #: of values and outputs
    first_q_head: int = 0  #: which of the layer's query heads is this endpoint's first
    first_kv_head: int = 0


@dataclass(frozen=True)
class Invitation:
    """What a process needs to join a session with several endpoints (`Client.join_session`).

    It is good while the session lives, for clients of the identity that opened it.
    """

    session: int  #: the session's number
    secret: bytes
    memory: str  #: "host" or "device"


class Session:
    """A session with a service; made by `Cache.session`.

    Threads may share it, and take turns: layers are handed over in the order of steps and layers. It ends with
    `close`, or with its ``with``: after an error there, at once. No method holds the GIL while it waits.

    Attributes
    ----------
    memory : "host", "device" or "messages"
        Where the tensors of its layers travel.
    dtype : "f32", "bf16" or "f16"
        Of q, k and v.
    output_dtype : "f32", "bf16", "f16" or "fp8_e4m3"
        Of outputs. FP8 is in bytes: ``torch.uint8`` or ``numpy.uint8``.
    max_rows, max_new_tokens, max_steps : int
        Rows and new tokens of a slot, and how many steps may be submitted and not over. Larger steps go in pieces.
    endpoint, endpoints : int
        Which endpoint of the session this is, and how many there are.
    invitation : Invitation or None
        With this the other endpoints join. None: this one has joined itself, or there are no others.
    warning : str
        What would make it faster, as the service says; "": nothing. `Cache.session` warns of it, once for a cache.
    """

    def __init__(self, core: _core.Session) -> None:
        self._core = core
        weakref.finalize(self, core.abandon)  # before Python ends, at the latest
        memory, self.max_rows, self.max_new_tokens, self.max_steps, self._lse, *dtypes = core.info()
        self.memory = next(name for name, code in MEMORIES.items() if code == memory)
        self.dtype, self.output_dtype = (next(name for name, code in CODES.items() if code == d) for d in dtypes)
        self._alike = self.dtype == self.output_dtype
        self.endpoint, self.endpoints, number, secret = core.endpoint()
        invites = self.endpoint == 0 and self.endpoints > 1
        self.invitation = Invitation(number, secret, self.memory) if invites else None
        self.warning = core.warning()
        self._shapes: dict[int, LayerShape] = {}

    def layer_shape(self, layer: int) -> LayerShape:
        """What the tensors of a layer must be."""
        if layer not in self._shapes:
            self._shapes[layer] = LayerShape(*self._core.layer_shape(layer))
        return self._shapes[layer]

    def submit(
        self,
        entries: Sequence[StepEntry | tuple[Any, ...]],
        *,
        layers: int,
        first_layer: int = 0,
        mode: str = "causal",
        append_only: bool = False,
    ) -> int:
        """Submits a step; returns its number, for `wait`, when the service has accepted it for all its layers.

        Steps may be submitted while earlier ones run, up to `max_steps`.

        Parameters
        ----------
        entries : sequence of StepEntry
        layers : int
            How many, from `first_layer` on.
        mode : "causal" or "dflash"
        append_only : bool
            The tokens are written and nothing is computed: layers are handed over with `append`.

        Raises
        ------
        OutOfRange, ResourceExhausted, InvalidArgument, FailedPrecondition
            The step is refused, and nothing has changed.
        """
        if mode not in _MODES:
            raise refused("mode", f"must be one of {', '.join(_MODES)}, is {mode!r}")
        return self._core.submit(_MODES[mode], first_layer, layers, entries, append_only)

    def attend(
        self,
        q: Any,
        k: Any = None,
        v: Any = None,
        *,
        out: Any = None,
        lse: Any = None,
        value_head_dim: int | None = None,
        stream: int | None = None,
    ) -> Any:
        """Hands over the next layer of the steps submitted, and takes its results.

        In host memory it returns when they are there. On a GPU it puts two launches into a stream and returns; they
        may be captured in a CUDA graph. When the session ends before its time, results there are NaN, and `check`
        says why.

        Parameters
        ----------
        q : [rows, q_heads, head_dim]
            Of the session's dtype. Rows and heads may lie apart; what is not dense within a head is copied first.
        k : [new tokens, kv_heads, head_dim], or None
        v : [new tokens, kv_heads, value_head_dim], or None
        out : [rows, q_heads, value_head_dim], or None
            Where the output goes, of `output_dtype` and dense within a head; None: it is made, beside q.
        lse : [rows, q_heads] float32, or None
            Where the log-sum-exp goes (natural log, -inf where a row sees no key).
        value_head_dim : int
            Of `out`, where it is made and no v says it; None: head_dim.
        stream : int
            A ``cudaStream_t``; None: torch's current one.

        Returns
        -------
        out

        Raises
        ------
        InvalidArgument
            A tensor does not fit the step; the layer has not been handed over.
        TributaryError
            Any other is why the session is over.
        """
        if out is None:
            rows, heads, head_dim = shape_of("q", q)
            dim = shape_of("v", v)[2] if v is not None else value_head_dim or head_dim
            shape = (rows, heads, dim)
            out = empty_beside(q, shape) if self._alike else empty_output(q, shape, self.output_dtype)
        q, k, v = strided(q), strided(k), strided(v)
        into = address("out", written("out", out) if self._alike else output_bits(written("out", out)))
        self._core.attend(
            address("q", q), address("k", k), address("v", v), into, self._lse_address(q, lse), _stream(q, stream)
        )
        return out

    def append(self, k: Any, v: Any, *, rows: int = 0, stream: int | None = None) -> None:
        """Hands over a layer of an append-only step, and waits for nothing.

        Parameters
        ----------
        k : [new tokens, kv_heads, head_dim], or None
            None: of an endpoint without KV heads.
        v : [new tokens, kv_heads, value_head_dim], or None
        rows : int
            New tokens, where k and v are None.
        stream : int
            As of `attend`. An endpoint without KV heads states it, if its memory is "device".
        """
        k, v = strided(k), strided(v)
        self._core.append(address("k", k), address("v", v), rows, _stream(k, stream))

    def wait(self, step: int) -> None:
        """Waits until a step is over. Raises what it failed with; without that, its tokens are held."""
        self._core.wait(step)

    def check(self) -> None:
        """Raises why the session is over; does nothing while it is not."""
        self._core.status()

    def close(self) -> None:
        """Ends the session when its steps are over; may be repeated. Raises what they failed with."""
        self._core.close()

    def abandon(self) -> None:
        """Ends the session at once: steps that are not over have changed no length. May be repeated."""
        self._core.abandon()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abandon()

    def _lse_address(self, q: Any, lse: Any) -> Any:
        if lse is None:
            return None
        if not self._lse:
            raise refused("lse", "the session was opened without lse=True")
        if isinstance(lse, np.ndarray):
            return lse
        if not hasattr(lse, "data_ptr"):
            raise refused("lse", f"must be a tensor of numpy or torch, is {type(lse).__name__}")
        written("lse", lse)
        if tuple(lse.shape) != tuple(q.shape[:2]) or not lse.is_contiguous() or not str(lse.dtype).endswith("float32"):
            raise refused("lse", "must be float32 [rows, q_heads], contiguous")
        return lse.data_ptr()


def _stream(tensor: Any, stream: int | None) -> int:
    if stream is not None:
        return stream
    if not getattr(tensor, "is_cuda", False):
        return 0
    found: int = sys.modules["torch"].cuda.current_stream(tensor.device).cuda_stream
    return found
