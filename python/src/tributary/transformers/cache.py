"""The cache of `generate`, held by the service."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from .. import client, errors
from .attention import Call, Mask, tagged
from .chunks import Chunks, close_rows
from .columns import Columns, Present
from .geometry import Layer, Refused, is_chunk, is_window
from .states import copy_states, with_states
from .steps import Pass, Steps
from .tensors import fit, to_rows, trim


def close(held: client.Cache, sequences: list[int]) -> None:
    """Closes sequences as well as can be, and empties the list."""
    for sequence in sequences:
        try:
            held.close(sequence)
        except errors.TributaryError:
            pass  # it is gone already, or the service is: nothing is left to be done
    sequences.clear()


def numbers(layers: dict[int, Layer]) -> dict[int, int]:
    """Of the model's layers, in the service's cache: those that see chunks alone have one of their own."""
    plain = [index for index, layer in layers.items() if layer.chunk is None]
    chunked = [index for index, layer in layers.items() if layer.chunk is not None]
    return {index: number for kind in (plain, chunked) for number, index in enumerate(kind)}


def reaches(mask: Mask, window_left: int | None, chunk: int | None) -> bool:
    """Whether a mask is that of a layer."""
    if chunk is None:
        return is_window(mask.function, window_left)
    padding = 0 if mask.columns is None else int(mask.columns[0].bool().to(torch.int8).argmax())
    return is_chunk(mask.function, chunk, padding)


class Step:
    """One forward pass: the same rows of the same sequences in every layer."""

    def __init__(
        self, present: Present | None, batch: int, columns: int, run: Pass, chunked: Pass | None = None
    ) -> None:
        self.present = present  #: None: all columns are tokens
        self.batch, self.columns = batch, columns
        self.run = run  #: of rows with tokens
        self.chunked = chunked  #: the same rows, of layers that see chunks alone
        self.done: set[int] = set()  #: layers that have them

    def tail(self, columns: int) -> tuple[Step, list[tuple[int, int, int]]]:
        """Its last columns, of which some models compute no more in layers that attend over the keys of others."""
        if columns == self.columns:
            return self, self.run.pieces
        present = None if self.present is None else self.present[:, -columns:]
        counts = [columns] * self.batch if present is None else present.sum(1).tolist()
        whole = [self.columns] * self.batch if self.present is None else self.present.sum(1).tolist()
        kept = [left for left, before in zip(counts, whole) if before]
        pieces = [(s, at + rows - left, left) for (s, at, rows), left in zip(self.run.pieces, kept) if left]
        return Step(present, self.batch, columns, self.run), pieces

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """[batch, heads, columns, dim] as [tokens, heads, dim]."""
        return to_rows(tensor) if self.present is None else tensor.transpose(1, 2)[self._chosen(tensor)]

    def scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, dim] as [batch, columns, heads, dim], zeros where padding is."""
        shape = (self.batch, self.columns, *tensor.shape[1:])
        if self.present is None:
            return tensor.reshape(shape)
        whole = tensor.new_zeros(shape)
        whole[self._chosen(tensor)] = tensor
        return whole

    def _chosen(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self.present).to(tensor.device)


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


@dataclasses.dataclass(frozen=True)
class SharedRows:
    """Rows of a cache for other processes to go on from: made by `ServiceCache.shared`, may be pickled.

    They are there for as long as the cache that made it holds them: whoever goes on from them forks them first.
    """

    held: str  #: id of the service's cache
    sequences: tuple[int, ...]
    lengths: tuple[int, ...]  #: tokens of each
    columns: Columns


class ServiceCache(Cache):
    """A `transformers.Cache` whose rows are sequences of the service; made by `Attachment.cache`.

    Each row of the batch has a sequence with the tokens of its own: padding is not held. Sequences are closed when
    the cache is no longer used, or by `reset`. ``copy.deepcopy`` forks them, so a prompt that is computed once can be
    gone on from many times.
    """

    of_service = True

    def __init__(
        self, layers: dict[int, Layer], config: Any, steps: Steps, chunked: tuple[Steps, int] | None = None
    ) -> None:
        views, kept = with_states([_LayerView(self, index) for index in range(config.num_hidden_layers)], config)
        Cache.__init__(self, layers=views)
        self._kept = kept  # layers whose states stay here
        held = self._held = steps.held
        self._geometry = layers
        self._number = numbers(layers)
        self._chunks = None if chunked is None else Chunks(*chunked, close)
        self._config, self._steps = config, steps
        lefts = [layer.window_left for layer in layers.values() if layer.window_left is not None]
        self._narrowest = min(lefts, default=None)
        self._sequences: list[int] = []
        self._lengths: list[int] = []  # tokens of each
        self._columns = Columns()  # where those tokens stand
        self._step: Step | None = None  # that some layers have done
        self._stale = False  # the service may hold more than _lengths
        self._ahead = False  # states that stay here are those of a pass that the service does not hold
        self._finalizer = weakref.finalize(self, close, held, self._sequences)
        if self._chunks is not None:
            weakref.finalize(self, close_rows, self._chunks.steps.held, self._chunks.rows, close)

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
        return self._columns.width + ahead

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hands both on to attention, which sends them with the queries: a layer is one call."""
        if layer_idx not in self._geometry:
            raise Refused([f"layer {layer_idx} used no cache when the model was attached"])
        return tagged(key_states, _Tag(self, layer_idx)), value_states

    def crop(self, tokens_to_remove: int) -> None:
        """Takes the last columns away; a number that is negative, as Transformers' caches have it."""
        if tokens_to_remove > 0:
            raise ValueError("tokens_to_remove: state how many as a negative number")
        for layer in self._kept:
            if tokens_to_remove or layer.record_past:
                layer.crop(tokens_to_remove)
        if tokens_to_remove == 0:
            return
        self._whole()
        columns = self._columns.copy()
        gone = columns.crop(max(0, columns.width + tokens_to_remove))
        lengths = [length - count for length, count in zip(self._lengths, gone)]
        if self._chunks is not None:
            self._chunks.check(lengths)
        self._lengths, self._columns = lengths, columns
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
        if self._step is not None:
            self._take_back()
        close(self._held, self._sequences)
        if self._chunks is not None:
            self._chunks.close()
        self._lengths, self._columns = [], Columns()
        self._step, self._stale, self._ahead = None, False, False
        for layer in self._kept:
            layer.reset()

    def shared(self) -> SharedRows:
        """The rows as they are now, for another process to go on from by ``attachment.cache(shared)``.

        Raises
        ------
        Refused
            Some of what they hold is not in the service, or in chunks.
        """
        self._whole()
        self._check_shareable()
        return SharedRows(self._held.id, self.sequences, tuple(self._lengths), self._columns.on_host())

    def go_on_from(self, rows: SharedRows) -> None:
        """An empty cache begins with forks of these rows, which share their pages until they differ.

        Raises
        ------
        Refused
            The cache is not empty, or its model's cache in the service is another one.
        NotFound, OutOfRange
            The rows are no longer there, or no longer that long. The cache is still empty.
        """
        self._whole()
        self._check_shareable()
        if self._sequences:
            raise Refused(["the cache has rows of its own: begin with an empty one"])
        if rows.held != self._held.id:
            raise Refused([f"the rows are of the cache {rows.held}, this model's is {self._held.id}"])
        self._sequences += self._forks(zip(rows.sequences, rows.lengths))
        self._lengths, self._columns = list(rows.lengths), rows.columns.copy()

    def _check_shareable(self) -> None:
        if self._kept or self._chunks is not None:
            raise Refused(["rows of layers with states (linear attention, convolutions) or chunks are not shared"])

    def __deepcopy__(self, memo: dict[int, Any]) -> ServiceCache:
        self._whole()
        chunks = self._chunks
        copy: ServiceCache = type(self)(
            self._geometry, self._config, self._steps, None if chunks is None else (chunks.steps, chunks.size)
        )
        copy._sequences += self._forks(zip(self._sequences, self._lengths))
        copy._lengths, copy._columns = list(self._lengths), self._columns.copy()
        copy_states(copy._kept, self._kept)
        if chunks is not None and copy._chunks is not None:
            copy._chunks.rows[:] = chunks.forked(list(range(len(self._sequences))), self._lengths)
        return copy

    # Passes that a CUDA graph computes: one token for each row.

    def one_more(self, attention_mask: torch.Tensor | None) -> list[tuple[int, int, int | None]] | None:
        """(sequence, position, length to be truncated to before) of each row; None: not every row has a token."""
        self._whole()
        mask = None if attention_mask is None else attention_mask.detach()
        if self._columns.new(mask, self._columns.width + 1, 1, self._narrowest) is not None:
            return None
        return [(s, at, at if self._stale else None) for s, at in zip(self._sequences, self._lengths)]

    def one_held(self) -> None:
        """The tokens of `one_more` are held."""
        self._stale = False
        self._lengths = [length + 1 for length in self._lengths]
        self._columns.add(1, None)

    def none_more(self) -> None:
        """What became of them is not known: the pass may be repeated."""
        self._stale = True

    # Rows.

    def _whole(self) -> None:
        self.settle()
        if self._step is not None:
            raise RuntimeError("the last forward pass ended before its last layer: begin with a cache of its own")

    def _forks(self, rows: Iterable[tuple[int, int]]) -> list[int]:
        """A new sequence for each (sequence, length), which shares its tokens, or, when one fails, none."""
        made: list[int] = []
        try:
            for sequence, length in rows:
                made.append(self._held.fork(sequence, length) if length else self._held.open())
        except BaseException:
            close(self._held, made)
            raise
        return made

    def _select(self, rows: Sequence[int]) -> None:
        self._whole()
        again = [place for place, row in enumerate(rows) if row in rows[:place]]
        held = list(zip(self._sequences, self._lengths))
        forks = dict(zip(again, self._forks(held[rows[place]] for place in again)))
        unused = [sequence for row, sequence in enumerate(self._sequences) if row not in rows]
        chosen = [forks.get(place, self._sequences[row]) for place, row in enumerate(rows)]
        if self._chunks is not None:
            self._chunks.select(list(rows), self._lengths)
        self._lengths = [self._lengths[row] for row in rows]
        self._columns.select(list(rows))
        for layer in self._kept:
            layer.reorder_cache(torch.tensor(rows))
        self._sequences[:] = chosen
        close(self._held, unused)

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
            self._take_back()
            raise
        if tag.step is None:
            tag.step = step
            step.done.add(tag.layer)
            if not step.run.on_device:
                self.settle()
        return output

    def settle(self) -> None:
        """Ends a pass whose layers are all done, when its tokens are held; waits for a GPU that is still at it.

        The attachment calls this when a forward pass has been launched to its end, so the model's other layers overlap.
        """
        step = self._step
        if step is None or len(step.done) < len(self._geometry):
            return
        try:
            step.run.finish()
            if step.chunked is not None:
                step.chunked.finish()
        except BaseException:
            self._take_back()
            raise
        self._commit(step)

    def _take_back(self) -> None:
        """The pass may be repeated, whatever the service did of it."""
        if self._step is not None:
            self._step.run.abandon()
            if self._step.chunked is not None:
                self._step.chunked.abandon()
        self._step, self._stale, self._ahead = None, True, bool(self._kept)

    def _check(self, layer: Layer, call: Call) -> None:
        why = call.reasons()
        reach = (layer.window_left, layer.chunk)
        if call.mask is not None and reach not in call.mask.checked:
            if reaches(call.mask, *reach):
                call.mask.checked.add(reach)
            else:
                why.append("its mask is not what it was when the model was attached (chunks, blocks, packed texts)")
        if (call.scale, call.soft_cap, call.sinks is not None) != (layer.scale, layer.soft_cap, bool(layer.sinks)):
            why.append("its scale, soft cap or sinks are not what they were when the model was attached")
        if why:
            raise Refused(why)

    def _begin(self, tag: _Tag, call: Call) -> Step:
        self.settle()
        if self._ahead:
            raise RuntimeError("states of a pass that failed cannot be taken back: begin with a cache of its own")
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
        present = self._columns.new(call.mask.columns, call.mask.length, columns, self._narrowest)
        counts = [columns] * batch if present is None else present.sum(1).tolist()
        pieces = [piece for piece in zip(self._sequences, self._lengths, counts) if piece[2]]
        run = self._run(pieces)
        try:
            chunked = None if self._chunks is None else self._chunks.begin(self._lengths, counts, self._stale)
        except BaseException:
            run.abandon()
            raise
        self._step = Step(present, batch, columns, run, chunked)
        self._stale = False
        return self._step

    def _run(self, pieces: list[tuple[int, int, int]]) -> Pass:
        """The pass of these rows. What is stale is rolled back before."""
        growing = {piece[0] for piece in pieces}
        if self._stale:
            self._truncate(lambda sequence: sequence not in growing)
        run = self._steps.begin(pieces, truncate=self._stale)
        if run is None and self._stale:
            self._truncate(lambda sequence: sequence in growing)
        return run or Pass(self._steps, pieces)

    def _truncate(self, chosen: Callable[[int], bool]) -> None:
        for sequence, length in zip(self._sequences, self._lengths):
            if chosen(sequence):
                self._held.truncate(sequence, length)

    def _open(self, batch: int) -> None:
        made: list[int] = []
        try:
            for _ in range(batch):
                made.append(self._held.open())
        except BaseException:
            close(self._held, made)
            raise
        self._sequences += made
        self._lengths, self._columns = [0] * batch, Columns(batch)
        if self._chunks is not None:
            self._chunks.open(batch)

    def _send(self, tag: _Tag, step: Step, call: Call) -> torch.Tensor:
        layer = self._geometry[tag.layer]
        new = tag.step is None  # else another layer attends over the keys of this one
        key, value = step.gather(call.key), step.gather(call.value)
        step, pieces = step.tail(call.query.shape[2])
        query, key, value = fit(layer, step.gather(call.query), key, value)
        if layer.chunk is not None:
            assert step.chunked is not None
            output = step.chunked.attend(self._number[tag.layer], query, key, value)
        else:
            output = step.run.attend(self._number[tag.layer], query, key, value, pieces, new)
        return step.scatter(trim(output, layer.value_head_dim))

    def _commit(self, step: Step) -> None:
        counts = [step.columns] * step.batch if step.present is None else step.present.sum(1).tolist()
        self._lengths = [length + count for length, count in zip(self._lengths, counts)]
        self._columns.add(step.columns, step.present)
        self._step = None
        if self._chunks is not None:
            self._chunks.grown(self._lengths)
