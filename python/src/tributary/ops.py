"""A layer of a session as an operator of torch, which `torch.compile` keeps as it is and CUDA graphs may capture.

Needs torch, which `import tributary` does not bring.
"""

from __future__ import annotations

import itertools
import weakref

import torch

from .errors import refused
from .session import Session

_numbers = itertools.count(1)
_sessions: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()
# Layers are handed over in order. Each operator seems to write to this tensor of its device, so a compiler neither
# exchanges two of them, nor makes one of two, nor leaves one out whose output nobody reads.
_order: dict[str, torch.Tensor] = {}


class Handle:
    """Names a session in compiled code. Make it once, before the model is compiled; the session must outlive it."""

    def __init__(self, session: Session, device: torch.device | str = "cpu") -> None:
        if session.output_dtype != session.dtype:
            raise refused("session", f"must have outputs of its own dtype, {session.dtype}")
        self.number = next(_numbers)
        self.order = _order.setdefault(str(device), torch.zeros(1, dtype=torch.int32, device=device))
        self._session = session
        _sessions[self.number] = session


@torch.library.custom_op("tributary::attend", mutates_args=("order",))
def _attend(
    order: torch.Tensor,
    session: int,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    value_head_dim: int,
) -> torch.Tensor:
    return _sessions[session].attend(q, k, v, value_head_dim=value_head_dim)


@_attend.register_fake
def _(
    order: torch.Tensor,
    session: int,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    value_head_dim: int,
) -> torch.Tensor:
    return q.new_empty(q.shape[0], q.shape[1], value_head_dim)


def attend(
    handle: Handle,
    q: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    value_head_dim: int | None = None,
) -> torch.Tensor:
    """Hands over the next layer of the steps submitted, as `Session.attend` does.

    The step is submitted outside of compiled code, whose graph is then the same for every step of one shape.

    Parameters
    ----------
    handle : Handle
        The session's.
    q : [rows, q_heads, head_dim]
        Of the session's dtype, in its memory.
    k, v : [new tokens, kv_heads, head_dim or value_head_dim], or None
    value_head_dim : int
        Where no v says it; None: head_dim.

    Returns
    -------
    [rows, q_heads, value_head_dim]
    """
    if value_head_dim is None:
        value_head_dim = q.shape[2] if v is None else v.shape[2]
    output: torch.Tensor = torch.ops.tributary.attend(handle.order, handle.number, q, k, v, value_head_dim)
    return output
