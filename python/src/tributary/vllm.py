"""What an attention backend of vLLM is told of a step, as entries of a session's step.

vLLM tells its backends where tokens lie in a paged cache of its own: a block table for each request and a slot for each
new token. A service knows sequences and positions. `BlockMap` turns one into the other; it needs numpy and nothing of
vLLM. docs/vllm.md shows where it sits in a backend.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .client import Cache
from .session import StepEntry

PADDING = -1  # the slot of a row that only fills a batch up


@dataclass
class _Held:
    """A sequence, and the blocks that vLLM believes its tokens to lie in."""

    sequence: int
    blocks: list[int] = field(default_factory=list)
    length: int = 0  #: tokens that it holds
    alive: bool = True  #: whether its request may go on


@dataclass(frozen=True)
class Step:
    """A model step for a session, made by `BlockMap.step`."""

    entries: list[StepEntry]
    rows: np.ndarray[Any, np.dtype[np.int64]]  #: of vLLM's flattened tokens: those that go to the session, in order
    before: dict[str, int | None]  #: tokens that each request had; None: it is new


class BlockMap:
    """Which sequence of the service stands for which blocks of vLLM's.

    Requests that share a prefix share its blocks in vLLM (prefix caching). Here the later one becomes a fork of the
    earlier one, which shares its pages until they differ. Blocks outlive their request in vLLM until they are written
    anew, and so does the sequence here.

    Used by one thread.

    Parameters
    ----------
    cache : Cache
        The service's, with all layers of the model.
    block_size : int
        Tokens of a block of vLLM's; nothing to do with pages of the service.
    """

    def __init__(self, cache: Cache, block_size: int) -> None:
        self._cache, self._block_size = cache, block_size
        self._requests: dict[str, _Held] = {}
        self._owners: dict[int, _Held] = {}  # of blocks: who wrote them last

    def __len__(self) -> int:
        """Sequences that are open."""
        return len({id(held) for held in [*self._requests.values(), *self._owners.values()]})

    def sequence(self, request: str) -> int:
        """A request's sequence in the service."""
        return self._requests[request].sequence

    def step(
        self,
        requests: Sequence[str],
        block_table: Any,
        seq_lens: Any,
        query_start_loc: Any,
        slot_mapping: Any,
    ) -> Step:
        """The entries of a step. Nothing is submitted; `done` or `failed` tells what became of it.

        Parameters
        ----------
        requests : sequence of str, [n]
            vLLM's ids, in the order of the batch (the model runner's `InputBatch.req_ids`).
        block_table : [n or more, blocks] ints
            `CommonAttentionMetadata.block_table_tensor`.
        seq_lens : [n or more] ints
            Tokens of each request when the step is over.
        query_start_loc : [n + 1 or more] ints
            Where each request's rows begin among the flattened tokens.
        slot_mapping : [tokens] ints
            Where vLLM would write each token: block * block_size + offset; -1: padding.

        Raises
        ------
        ValueError
            Slots are not where the block table says, or tokens are missing that nobody has computed.
        """
        starts = np.asarray(query_start_loc)[: len(requests) + 1].astype(np.int64)
        lengths = np.asarray(seq_lens)[: len(requests)].astype(np.int64)
        tables, slots = np.asarray(block_table), np.asarray(slot_mapping)
        counts = np.diff(starts)
        active = [i for i, count in enumerate(counts) if count]
        for i in active:
            self._check_slots(requests[i], tables[i], int(lengths[i] - counts[i]), slots[starts[i] : starts[i + 1]])
        owners = {i: self._prefix(requests[i], tables[i], int(lengths[i] - counts[i])) for i in active}
        new = [requests[i] for i in active if requests[i] not in self._requests]
        before = {requests[i]: self._length(requests[i]) for i in active}
        if new:
            opened = self._cache.update([("open",)] * len(new))
            self._requests.update((request, _Held(sequence)) for request, sequence in zip(new, opened))
        entries = [self._entry(requests[i], int(lengths[i]), int(counts[i]), owners[i]) for i in active]
        self._write({requests[i]: (tables[i], int(lengths[i]), int(counts[i])) for i in active})
        rows = [np.arange(starts[i], starts[i + 1]) for i in active]
        return Step(entries, np.concatenate(rows) if rows else np.zeros(0, np.int64), before)

    def failed(self, step: Step) -> None:
        """A step that did not end well: no length has changed. It may be asked for again."""
        for request, length in step.before.items():
            held = self._requests.get(request)
            if held is None:
                continue
            if length is None:
                held.length = 0
                self.finish([request])
            else:
                held.length = length

    def finish(self, requests: Iterable[str]) -> None:
        """Requests that are over (`SchedulerOutput.finished_req_ids`), or preempted: those begin anew.

        Their sequences stay as long as others may be forked from their blocks.
        """
        for request in requests:
            held = self._requests.pop(request, None)
            if held is not None:
                held.alive = False
                self._give_back([held])

    def close(self) -> None:
        """Closes all sequences."""
        held = {id(each): each for each in [*self._requests.values(), *self._owners.values()]}
        self._requests.clear()
        self._owners.clear()
        if held:
            self._cache.update([("close", each.sequence) for each in held.values()])

    def _length(self, request: str) -> int | None:
        held = self._requests.get(request)
        return None if held is None else held.length

    def _check_slots(self, request: str, table: Any, position: int, slots: Any) -> None:
        at = np.arange(position, position + len(slots))
        want = np.asarray(table)[at // self._block_size] * self._block_size + at % self._block_size
        if not ((slots == want) | (slots == PADDING)).all():
            raise ValueError(f"slot_mapping: {request}: slots do not lie where its block table says")

    def _prefix(self, request: str, table: Any, length: int) -> _Held | None:
        """Who holds the first `length` tokens, where that is not the request itself."""
        held = self._requests.get(request)
        if held is not None:
            if held.length < length:
                raise ValueError(f"seq_lens: {request}: {held.length} tokens are held, and its rows begin at {length}")
            return None
        if length == 0:
            return None
        last = -(-length // self._block_size) - 1
        owner = self._owners.get(int(np.asarray(table)[last]))
        # Of the blocks before, others with the same tokens may stand here: vLLM finds each by its whole prefix.
        if owner is None or owner.length < length or owner.blocks[last] != table[last]:
            raise ValueError(f"block_table: {request}: nobody has written the blocks of its first {length} tokens")
        return owner

    def _entry(self, request: str, length: int, count: int, owner: _Held | None) -> StepEntry:
        held, position = self._requests[request], length - count
        rejected = owner is None and held.length > position  # guesses
        held.length = length
        return StepEntry(
            held.sequence,
            position,
            count,
            count,
            truncate_to=position if rejected else None,
            fork_from=None if owner is None else owner.sequence,
            fork_length=None if owner is None else position,
        )

    def _write(self, written: dict[str, tuple[Any, int, int]]) -> None:
        """The blocks that requests write to are their own now; who had other tokens there has lost the block."""
        robbed: dict[int, _Held] = {}
        for request, (table, length, count) in written.items():
            held = self._requests[request]
            first, end = (length - count) // self._block_size, -(-length // self._block_size)
            known = min(first, len(held.blocks))
            held.blocks[known:end] = np.asarray(table)[known:end].tolist()
            for block in held.blocks[first:end]:
                owner = self._owners.get(block)
                if owner is not None and owner is not held:
                    robbed[id(owner)] = owner
                self._owners[block] = held
        self._give_back(list(robbed.values()))

    def _give_back(self, candidates: list[_Held]) -> None:
        """Of sequences whose request is over: what nobody will be forked from any more. vLLM shares whole blocks."""
        updates: list[tuple[Any, ...]] = []
        for held in candidates:
            if held.alive:
                continue
            whole = held.blocks[: held.length // self._block_size]
            last = max((i for i, block in enumerate(whole) if self._owners.get(block) is held), default=-1)
            if last >= 0:
                if (last + 1) * self._block_size < held.length:
                    held.length = (last + 1) * self._block_size
                    updates.append(("truncate", held.sequence, held.length))
                continue
            updates.append(("close", held.sequence))
            for block in held.blocks:
                if self._owners.get(block) is held:
                    del self._owners[block]
        if updates:
            self._cache.update(updates)
