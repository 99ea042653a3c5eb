"""What a model's attention is, asked from the model itself: one short forward pass, whose calls are recorded.

A config says what its model's author thought of; the calls say what a layer does: heads, dimensions, scale, soft cap,
sinks and the window of its mask.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch

from ..client import CacheSpec, LayerSpec

# (head_dim, value_head_dim) that the service takes; smaller heads are filled up with zeros.
_SERVED = [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
_MOST_GROUP = 16  # query heads for each KV head
_FAR = 1 << 30  # a position that no window reaches back from to the beginning


class Refused(ValueError):
    """The model, or a call of it, asks for what the service cannot do. ``reasons`` lists why."""

    def __init__(self, reasons: list[str]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = reasons


@dataclass(frozen=True)
class Layer:
    """One layer that has keys and values of its own."""

    q_heads: int
    kv_heads: int
    head_dim: int  #: of queries and keys
    value_head_dim: int
    scale: float
    soft_cap: float  #: 0: none
    window_left: int | None
    sinks: tuple[float, ...]
    chunk: int | None = None  #: a row sees its own chunk of so many tokens alone, up to itself

    @property
    def copies(self) -> int:
        """How often each KV head is held, so that no more than 16 query heads share one."""
        group = self.q_heads // self.kv_heads
        return next(n for n in range(1, group + 1) if group % n == 0 and group // n <= _MOST_GROUP)

    @property
    def held_dims(self) -> tuple[int, int]:
        """(head_dim, value_head_dim) with the zeros that the service's sizes want."""
        fits = [dims for dims in _SERVED if dims[0] >= self.head_dim and dims[1] >= self.value_head_dim]
        return min(fits, key=sum)

    def reasons(self, index: int) -> list[str]:
        """Why the service cannot hold this layer."""
        why = []
        most = _SERVED[-1]
        if self.head_dim > most[0] or self.value_head_dim > most[1]:
            why.append(f"layer {index}: heads of {self.head_dim} and {self.value_head_dim} dimensions; at most 256")
        if self.q_heads % self.kv_heads:
            why.append(f"layer {index}: {self.q_heads} query heads are no multiple of {self.kv_heads} KV heads")
        return why

    def spec(self) -> LayerSpec:
        """As the service is told."""
        head_dim, value_head_dim = self.held_dims
        return LayerSpec(
            window_left=self.window_left,
            sinks=self.sinks,
            soft_cap=self.soft_cap,
            sm_scale=self.scale,
            q_heads=self.q_heads,
            kv_heads=self.kv_heads * self.copies,
            head_dim=head_dim,
            value_head_dim=value_head_dim,
        )


def cache_spec(layers: list[Layer], capacity_tokens: int, kv_dtype: str, **more: Any) -> CacheSpec:
    """The spec of a cache with these layers, in this order."""
    specs = [layer.spec() for layer in layers]
    first = specs[0]
    return CacheSpec(
        layers=len(specs),
        q_heads=first.q_heads,
        kv_heads=first.kv_heads,
        head_dim=first.head_dim,
        value_head_dim=first.value_head_dim,
        capacity_tokens=capacity_tokens,
        kv_dtype=kv_dtype,
        layer_specs=tuple(specs),
        **more,
    )


def cache_id(spec: CacheSpec) -> str:
    """The id under which all processes with this spec find one cache."""
    return "hf-" + hashlib.sha256(repr(spec).encode()).hexdigest()[:24]


def sees(mask_function: Any, query: int, keys: list[int]) -> list[bool]:
    """Which of the keys a query sees by a mask function of Transformers; it may raise what it likes."""
    one = torch.zeros(1, dtype=torch.long)  # of the batch, and of its heads
    seen = mask_function(one, one, torch.full((len(keys),), query), torch.tensor(keys))
    return [bool(each) for each in seen.reshape(-1).expand(len(keys)).tolist()]


def is_window(mask_function: Any, left: int | None) -> bool:
    """Whether a mask is causal and reaches `left` positions back (None: to the beginning), and is nothing else."""
    for query in (_FAR, _FAR + 1):  # a chunk begins at the same key for both
        last = 0 if left is None else query - left
        keys = [last, (last + query) // 2, query, query + 1, *([] if left is None else [last - 1])]
        try:
            if sees(mask_function, query, keys) != [True, True, True, False, *([] if left is None else [False])]:
                return False
        except (IndexError, RuntimeError):  # it looks up what each token is: images, packed texts
            return False
    return True


def window_of(mask_function: Any) -> int | None:
    """How far a causal mask reaches back; None: to the beginning. Refuses every other mask."""
    low, high = 0, _FAR  # the first key that is seen lies in [low, high]
    try:
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if sees(mask_function, _FAR, [middle])[0] else (middle + 1, high)
    except (IndexError, RuntimeError):
        low = _FAR
    left = _FAR - low if low > 0 else None
    if not is_window(mask_function, left):
        raise Refused(["its mask is neither causal nor a sliding window (chunks, blocks or packed texts)"])
    return left


def chunk_of(mask_function: Any) -> int | None:
    """The size of the chunks of a causal mask whose rows see their own chunk alone; None: it is no such mask."""
    try:
        if sees(mask_function, _FAR, [0])[0]:
            return None
        low, high = 1, _FAR  # the first query that does not see the first key
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if sees(mask_function, middle, [0])[0] else (low, middle)
    except (IndexError, RuntimeError):
        return None
    return low if low > 1 and is_chunk(mask_function, low, 0) else None


def is_chunk(mask_function: Any, chunk: int, padding: int) -> bool:
    """Whether a mask is that of chunks of this size, counted from behind the padding of the first row."""
    for query in (chunk - 1, chunk, 5 * chunk + chunk // 2, 6 * chunk - 1):
        begin = query // chunk * chunk
        keys = [begin, (begin + query) // 2, query, query + 1, *([begin - 1] if begin else [])]
        want = [True, True, True, False, *([False] if begin else [])]
        try:
            if sees(mask_function, padding + query, [padding + key for key in keys]) != want:
                return False
        except (IndexError, RuntimeError):
            return False
    return True


def reach_of_block(mask_function: Any, rows: int) -> int | None:
    """How far a mask reaches back whose `rows` rows see each other both ways; None: to the beginning."""
    low, high = 0, _FAR  # the first key that the first row sees lies in [low, high]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if sees(mask_function, _FAR, [middle])[0] else (middle + 1, high)
    left = _FAR - low if low > 0 else None
    last = _FAR + rows - 1
    for query in (_FAR, last):
        keys = [_FAR, last] if left is None else [max(_FAR, query - left), last, query - left, query - left - 1]
        if sees(mask_function, query, keys) != [True] * min(3, len(keys)) + [False] * (left is not None):
            raise Refused(["its block's rows do not see each other, or its window is no sliding one"])
    return left
