"""The cache of `generate`, held by the service."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from .. import client, errors
from .attention import Call, Mask
from ..session import StepEntry
from .geometry import Layer, Refused, is_window
from .steps import TRANSIENT, Ride, Steps


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


def _pad(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    missing = dim - tensor.shape[-1]
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _close(held: client.Cache, sequences: list[int]) -> None:
    for sequence in sequences:
        try:
            held.close(sequence)
        except errors.TributaryError:
            pass  # it is gone already, or the service is: nothing is left to be done
    sequences.clear()


class Step:
    """One forward pass: the same rows of the same sequences in every layer."""

    def __init__(self, present: torch.Tensor | None, batch: int, columns: int, pieces: list[tuple[int, int, int]]):
        self.present = present  #: [batch, columns] bool, None: all of them
        self.batch, self.columns = batch, columns
        self.pieces = pieces  #: (sequence, first position, rows) of rows with tokens
        self.done: set[int] = set()  #: layers that have them
        self.ride: Ride | None = None  #: the session that it goes by; None: calls

    def tail(self, columns: int) -> Step:
        """Its last columns, of which some models compute no more in layers that attend over the keys of others."""
        if columns == self.columns:
            return self
        present = None if self.present is None else self.present[:, -columns:]
        counts = [columns] * self.batch if present is None else present.sum(1).tolist()
        whole = [self.columns] * self.batch if self.present is None else self.present.sum(1).tolist()
        kept = [left for left, before in zip(counts, whole) if before]
        pieces = [(sequence, at + rows - left, left) for (sequence, at, rows), left in zip(self.pieces, kept) if left]
        return Step(present, self.batch, columns, pieces)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """[batch, heads, columns, dim] as [tokens, heads, dim]."""
        tensor = tensor.transpose(1, 2)
        return tensor.flatten(0, 1) if self.present is None else tensor[self.present.to(tensor.device)]

    def scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, dim] as [batch, columns, heads, dim], zeros where padding is."""
        shape = (self.batch, self.columns, *tensor.shape[1:])
        if self.present is None:
            return tensor.reshape(shape)
        whole = tensor.new_zeros(shape)
        whole[self.present.to(tensor.device)] = tensor
        return whole


class _Tag:
    """What `update` hands to attention, on the key tensor."""

    def __init__(self, cache: ServiceCache, layer: int) -> None:
        self.cache, self.layer = cache, layer
        self.step: Step | None = None  #: in which these keys were sent

    def attend(self, call: Call) -> torch.Tensor:
        return self.cache.attend(self, call)


class _LayerView(CacheLayerMixin):
    """What Transformers asks of a layer. It holds nothing."""

    is_croppable = True

    def __init__(self, cache: ServiceCache, index: int) -> None:
        super().__init__()
        self._cache = weakref.ref(cache)
        self._index = index

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        cache = self._cache()
        assert cache is not None
        return cache.update(key_states, value_states, self._index)

    def get_seq_length(self) -> int:
        cache = self._cache()
        return 0 if cache is None else cache.get_seq_length(self._index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class ServiceCache(Cache):
    """A `transformers.Cache` whose rows are sequences of the service; made by `Attachment.cache`.

    Each row of the batch has a sequence with the tokens of its own: padding is not held. Sequences are closed when
    the cache is no longer used, or by `reset`. ``copy.deepcopy`` forks them, so a prompt that is computed once can be
    gone on from many times.
    """

    def __init__(
        self, held: client.Cache, layers: dict[int, Layer], model_layers: int, most_bytes: int, steps: Steps
    ) -> None:
        super().__init__(layers=[_LayerView(self, index) for index in range(model_layers)])
        self._held = held
        self._geometry = layers
        self._number = {index: number for number, index in enumerate(layers)}  # of a layer, in the service
        self._model_layers, self._most_bytes, self._steps = model_layers, most_bytes, steps
        lefts = [layer.window_left for layer in layers.values() if layer.window_left is not None]
        self._narrowest = min(lefts, default=None)
        self._sequences: list[int] = []
        self._lengths: list[int] = []  # tokens of each
        self._present = torch.zeros(0, 0, dtype=torch.bool)  # [batch, columns]: where those tokens stand
        self._step: Step | None = None  # that some layers have done
        self._stale = False  # the service may hold more than _lengths
        self._finalizer = weakref.finalize(self, _close, held, self._sequences)

    # What Transformers asks.

    @property
    def sequences(self) -> tuple[int, ...]:
        """Ids of the rows' sequences in the service."""
        return tuple(self._sequences)

    @property
    def batch_size(self) -> int:
        return len(self._sequences) or -1

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of the batch, padding included."""
        ahead = self._step.columns if self._step is not None and layer_idx in self._step.done else 0
        return self._present.shape[1] + ahead

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hands both on to attention, which sends them with the queries: a layer is one call."""
        if layer_idx not in self._geometry:
            raise Refused([f"layer {layer_idx} used no cache when the model was attached"])
        key = key_states.view_as(key_states)
        key.tributary = _Tag(self, layer_idx)  # type: ignore[attr-defined]
        return key, value_states

    def crop(self, tokens_to_remove: int) -> None:
        """Takes the last columns away; a number that is negative, as Transformers' caches have it."""
        if tokens_to_remove > 0:
            raise ValueError("tokens_to_remove: state how many as a negative number")
        if tokens_to_remove == 0:
            return
        self._whole()
        keep = max(0, self._present.shape[1] + tokens_to_remove)
        gone = self._present[:, keep:].sum(1).tolist()
        self._lengths = [length - count for length, count in zip(self._lengths, gone)]
        self._present = self._present[:, :keep]
        self._stale = True  # truncated before the next step, so that a failure there leaves nothing half done

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i goes on from what row beam_idx[i] holds: the first that does takes it over, the others fork it."""
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row becomes `repeats` rows."""
        self._select([row for row in range(len(self._sequences)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps these rows."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        self._select(indices.tolist())

    def reset(self) -> None:
        """Empties the cache and closes its sequences."""
        _close(self._held, self._sequences)
        self._lengths = []
        self._present = torch.zeros(0, 0, dtype=torch.bool)
        self._step, self._stale = None, False

    def __deepcopy__(self, memo: dict[int, Any]) -> ServiceCache:
        self._whole()
        copy = ServiceCache(self._held, self._geometry, self._model_layers, self._most_bytes, self._steps)
        copy._sequences += self._forks(list(range(len(self._sequences))))
        copy._lengths, copy._present = list(self._lengths), self._present
        return copy

    # Rows.

    def _whole(self) -> None:
        if self._step is not None:
            raise RuntimeError("the last forward pass ended before its last layer: begin with a cache of its own")

    def _forks(self, rows: Sequence[int]) -> list[int]:
        """A new sequence for each row, or, when one fails, none."""
        made: list[int] = []
        try:
            for row in rows:
                length = self._lengths[row]
                made.append(self._held.fork(self._sequences[row], length) if length else self._held.open())
        except BaseException:
            _close(self._held, made)
            raise
        return made

    def _select(self, rows: Sequence[int]) -> None:
        self._whole()
        again = [place for place, row in enumerate(rows) if row in rows[:place]]
        forks = dict(zip(again, self._forks([rows[place] for place in again])))
        unused = [sequence for row, sequence in enumerate(self._sequences) if row not in rows]
        chosen = [forks.get(place, self._sequences[row]) for place, row in enumerate(rows)]
        self._lengths = [self._lengths[row] for row in rows]
        self._present = self._present[list(rows)]
        self._sequences[:] = chosen
        _close(self._held, unused)

    # Attention.

    def attend(self, tag: _Tag, call: Call) -> torch.Tensor:
        """One layer's attention: its new keys and values are appended, once."""
        self._check(self._geometry[tag.layer], call)
        step = tag.step
        try:
            if step is None:
                step = self._begin(tag, call)
            output = self._send(tag, step, call)
        except BaseException:
            # The whole step is taken back, whatever the service did of it: it may be repeated.
            if self._step is not None and self._step.ride is not None:
                self._step.ride.abandon()
            self._step, self._stale = None, True
            raise
        if tag.step is None:
            tag.step = step
            step.done.add(tag.layer)
            if len(step.done) == len(self._geometry):
                self._commit(step)
        return output

    def _check(self, layer: Layer, call: Call) -> None:
        why = call.reasons()
        if call.mask is not None and layer.window_left not in call.mask.checked:
            if is_window(call.mask.function, layer.window_left):
                call.mask.checked.add(layer.window_left)
            else:
                why.append("its mask is not what it was when the model was attached (chunks, blocks, packed texts)")
        if (call.scale, call.soft_cap, call.sinks is not None) != (layer.scale, layer.soft_cap, bool(layer.sinks)):
            why.append("its scale, soft cap or sinks are not what they were when the model was attached")
        if why:
            raise Refused(why)

    def _begin(self, tag: _Tag, call: Call) -> Step:
        batch, _, columns, _ = call.query.shape
        assert call.mask is not None
        if self._step is not None:
            if tag.layer in self._step.done:
                self._whole()
            if (batch, columns) != (self._step.batch, self._step.columns):
                raise Refused(["layers of one forward pass have different rows"])
            return self._step
        if not self._sequences:
            self._open(batch)
        if batch != len(self._sequences):
            raise Refused([f"the batch has {batch} rows, the cache {len(self._sequences)}"])
        present = self._columns(call.mask, columns)
        counts = [columns] * batch if present is None else present.sum(1).tolist()
        pieces = [piece for piece in zip(self._sequences, self._lengths, counts) if piece[2]]
        step = Step(present, batch, columns, pieces)
        if 0 < sum(counts) <= self._steps.max_rows:
            step.ride = self._ride(pieces)
        if step.ride is None and self._stale:
            for sequence, length in zip(self._sequences, self._lengths):
                self._held.truncate(sequence, length)
        self._stale = False
        self._step = step
        return step

    def _ride(self, pieces: list[tuple[int, int, int]]) -> Ride | None:
        """The pass as a step of a session, which first rolls back what is stale."""
        if self._stale:
            growing = {piece[0] for piece in pieces}
            for sequence, length in zip(self._sequences, self._lengths):
                if sequence not in growing:
                    self._held.truncate(sequence, length)
        return self._steps.begin(
            [StepEntry(sequence, at, rows, rows, at if self._stale else None) for sequence, at, rows in pieces]
        )

    def _open(self, batch: int) -> None:
        made: list[int] = []
        try:
            for _ in range(batch):
                made.append(self._held.open())
        except BaseException:
            _close(self._held, made)
            raise
        self._sequences += made
        self._lengths = [0] * batch
        self._present = torch.zeros(batch, 0, dtype=torch.bool)

    def _columns(self, mask: Mask, columns: int) -> torch.Tensor | None:
        """Which of the step's columns are tokens; None: all."""
        before = self._present.shape[1]
        if mask.length != before + columns:
            raise Refused([f"the mask has {mask.length} columns, the cache and the step {before + columns}"])
        if mask.columns is None:
            if not self._present.all():
                raise Refused(["padding was given before and is not now: pass attention_mask"])
            return None
        whole = mask.columns
        if whole.shape != (len(self._sequences), mask.length):
            raise Refused([f"attention_mask is {list(whole.shape)}, not {[len(self._sequences), mask.length]}"])
        if not torch.equal(whole[:, :before], self._present):
            raise Refused(["columns that were computed before are masked, or no longer, by this attention_mask"])
        holes = ~whole & (whole.cumsum(1) > 0) & (whole.flip(1).cumsum(1).flip(1) > 0)
        if self._narrowest is not None and mask.length > self._narrowest and holes.any():
            raise Refused(["a window counts columns that are masked between tokens: pad on the left"])
        present = whole[:, before:]
        return None if present.all() else present

    def _send(self, tag: _Tag, step: Step, call: Call) -> torch.Tensor:
        layer = self._geometry[tag.layer]
        new = tag.step is None  # else another layer attends over the keys of this one
        device, dims = call.query.device, layer.held_dims
        key, value = step.gather(call.key), step.gather(call.value)
        if layer.copies > 1:
            key, value = key.repeat_interleave(layer.copies, 1), value.repeat_interleave(layer.copies, 1)
        step = step.tail(call.query.shape[2])
        query = step.gather(call.query)
        query, key, value = (_pad(t, dim).to("cpu") for t, dim in ((query, dims[0]), (key, dims[0]), (value, dims[1])))
        output = query.new_empty(*query.shape[:2], dims[1])
        if step.ride is None or not self._by_session(step, self._number[tag.layer], query, key, value, output):
            self._by_calls(step, self._number[tag.layer], query, key, value, output, new)
        return step.scatter(output[..., : layer.value_head_dim].to(device))

    def _by_session(self, step: Step, number: int, query: Any, key: Any, value: Any, output: Any) -> bool:
        """Whether the layer was computed. If not, what the session had been given is written by calls."""
        assert step.ride is not None
        try:
            step.ride.attend(number, query, key, value, output)
            if len(step.ride.sent) == len(self._geometry):
                step.ride.finish()
            return True
        except TRANSIENT:
            # The group of workers has formed anew, say. Calls wait for it.
            ride, step.ride = step.ride, None
            ride.abandon()
        for sequence, at, _ in step.pieces:
            self._held.truncate(sequence, at)
        for sent, k, v in ride.sent:
            if sent != number:
                self._held.append(sent, step.pieces, k, v)
        return False

    def _by_calls(
        self, step: Step, number: int, query: Any, key: Any, value: Any, output: Any, new: bool
    ) -> None:
        row_bytes = sum(t[0].numel() * t.element_size() for t in (query, key, value, output) if len(t))
        begin = 0
        for pieces in split(step.pieces, max(1, self._most_bytes // max(1, row_bytes))):
            end = begin + sum(rows for _, _, rows in pieces)
            if begin == end:
                continue
            self._held.attend(
                number,
                [client.Entry(sequence, at, rows, rows if new else 0) for sequence, at, rows in pieces],
                query[begin:end],
                key[begin:end] if new else None,
                value[begin:end] if new else None,
                out=output[begin:end],
            )
            begin = end

    def _commit(self, step: Step) -> None:
        present = step.present
        if present is None:
            present = torch.ones(step.batch, step.columns, dtype=torch.bool)
        self._lengths = [length + count for length, count in zip(self._lengths, present.sum(1).tolist())]
        self._present = torch.cat([self._present, present], 1)
        self._step = None
