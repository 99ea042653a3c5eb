"""Layers whose rows see their own chunk of the text alone: each chunk is a sequence of the service.

Within a chunk such a layer is causal, and a chunk's first token is its position 0, so the service computes it as any
other. These layers have a cache of their own there: their sequences are not those of the others.
"""

from __future__ import annotations

from collections.abc import Callable

from .. import client
from .geometry import Refused
from .steps import Pass, Steps


class Chunks:
    """The chunks of a batch's rows. The current one and the one before are kept, so that tokens may be taken back."""

    def __init__(self, steps: Steps, size: int, close: Callable[[client.Cache, list[int]], None]) -> None:
        self.steps, self.size, self._close_all = steps, size, close
        self.rows: list[dict[int, int]] = []  #: of each row: sequences by the chunk's number

    def open(self, batch: int) -> None:
        """A batch begins."""
        self.rows[:] = [{} for _ in range(batch)]

    def _pieces(self, lengths: list[int], counts: list[int]) -> list[tuple[int, int, int]]:
        """(sequence, first position there, rows) of the next `counts` tokens; chunks that begin are opened."""
        parts = []  # (row, chunk, position in it, tokens)
        for row, (at, end) in enumerate(zip(lengths, (length + count for length, count in zip(lengths, counts)))):
            while at < end:
                chunk, position = divmod(at, self.size)
                tokens = min(end - at, self.size - position)
                parts.append((row, chunk, position, tokens))
                at += tokens
        new = [(row, chunk) for row, chunk, _, _ in parts if chunk not in self.rows[row]]
        if new:
            opened = self.steps.held.update([("open",)] * len(new))
            for (row, chunk), sequence in zip(new, opened):
                self.rows[row][chunk] = sequence
        return [(self.rows[row][chunk], position, tokens) for row, chunk, position, tokens in parts]

    def begin(self, lengths: list[int], counts: list[int], stale: bool) -> Pass:
        """The pass of the next `counts` tokens; what is stale is rolled back before."""
        if stale:
            self._truncate(lengths)
        pieces = self._pieces(lengths, counts)
        return self.steps.begin(pieces) or Pass(self.steps, pieces)

    def _truncate(self, lengths: list[int]) -> None:
        updates = [
            ("truncate", sequence, self._held(length, chunk))
            for held, length in zip(self.rows, lengths)
            for chunk, sequence in held.items()
        ]
        if updates:
            self.steps.held.update(updates)

    def check(self, lengths: list[int]) -> None:
        """Refuses lengths that lie before what is kept."""
        for held, length in zip(self.rows, lengths):
            chunk, position = divmod(length, self.size)
            if position and chunk not in held:
                raise Refused([f"chunks of {self.size} tokens: the chunk of token {length} is not held any more"])

    def grown(self, lengths: list[int]) -> None:
        """Rows have these lengths: what lies more than a chunk behind is given up."""
        for held, length in zip(self.rows, lengths):
            old = [held.pop(chunk) for chunk in [*held] if chunk < (length - 1) // self.size - 1]
            if old:
                self._close_all(self.steps.held, old)

    def forked(self, rows: list[int], lengths: list[int]) -> list[dict[int, int]]:
        """What rows hold, once more."""
        wanted = [(row, chunk) for row in rows for chunk in self.rows[row]]
        updates = [("fork", self.rows[row][chunk], self._held(lengths[row], chunk)) for row, chunk in wanted]
        made = self.steps.held.update(updates) if updates else []
        forks: list[dict[int, int]] = []
        for row in rows:
            forks.append({chunk: made.pop(0) for chunk in self.rows[row]})
        return forks

    def select(self, rows: list[int], lengths: list[int]) -> None:
        """These rows take the places of all; one that is wanted again is forked."""
        again = [place for place, row in enumerate(rows) if row in rows[:place]]
        forks = dict(zip(again, self.forked([rows[place] for place in again], lengths)))
        unused = [held for row, held in enumerate(self.rows) if row not in rows]
        self.rows[:] = [forks.get(place, self.rows[row]) for place, row in enumerate(rows)]
        for held in unused:
            self._close_all(self.steps.held, list(held.values()))

    def close(self) -> None:
        """Closes all."""
        close_rows(self.steps.held, self.rows, self._close_all)

    def _held(self, length: int, chunk: int) -> int:
        return min(max(0, length - chunk * self.size), self.size)


def close_rows(
    held: client.Cache, rows: list[dict[int, int]], close: Callable[[client.Cache, list[int]], None]
) -> None:
    """Closes all chunks of all rows."""
    for row in rows:
        close(held, list(row.values()))
    rows.clear()
