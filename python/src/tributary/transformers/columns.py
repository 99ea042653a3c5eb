"""Which columns of a batch are tokens, and which are padding. Transformers states all of them with every token, so what
is done here is done once per pass over the whole text: in numpy, whose threads nobody has to wake for it."""

from __future__ import annotations

from typing import Any

import numpy as np

from .geometry import Refused

Present = np.ndarray[Any, np.dtype[np.bool_]]  # [batch, columns], False: padding


class Columns:
    """The columns that a batch has so far."""

    def __init__(self, batch: int = 0) -> None:
        self.batch = batch
        self.width = 0  #: columns
        self._present: Present | None = None  # None: all are tokens

    def new(self, mask: Present | None, length: int, columns: int, narrowest: int | None) -> Present | None:
        """Which of the next columns are tokens; None: all.

        Parameters
        ----------
        mask : [batch, length], or None
            What the pass was given of all columns, before and new.
        length : int
            Columns of the pass's mask.
        columns : int
            New ones.
        narrowest : int
            The narrowest window of the layers; None: there is none.
        """
        if length != self.width + columns:
            raise Refused([f"the mask has {length} columns, the cache and the step {self.width + columns}"])
        if mask is None:
            if self._present is not None:
                raise Refused(["padding was given before and is not now: pass attention_mask"])
            return None
        if mask.shape != (self.batch, length):
            raise Refused([f"attention_mask is {list(mask.shape)}, not {[self.batch, length]}"])
        before, new = mask[:, : self.width], mask[:, self.width :]
        same = before.all() if self._present is None else np.array_equal(before, self._present)
        if not same:
            raise Refused(["columns that were computed before are masked, or no longer, by this attention_mask"])
        if new.all() and self._present is None:
            return None
        if narrowest is not None and length > narrowest and _has_holes(mask):
            raise Refused(["a window counts columns that are masked between tokens: pad on the left"])
        return None if new.all() else new

    def add(self, columns: int, present: Present | None) -> None:
        """These are held now; `present` as `new` returned it."""
        if present is not None or self._present is not None:
            before = np.ones((self.batch, self.width), np.bool_) if self._present is None else self._present
            new = np.ones((self.batch, columns), np.bool_) if present is None else present
            self._present = np.concatenate([before, new], 1)
        self.width += columns

    def crop(self, keep: int) -> list[int]:
        """Only the first `keep` stay; how many tokens of each row go."""
        gone = [self.width - keep] * self.batch
        if self._present is not None:
            gone = self._present[:, keep:].sum(1).tolist()
            kept = self._present[:, :keep]
            self._present = None if kept.all() else kept
        self.width = keep
        return gone

    def select(self, rows: list[int]) -> None:
        """These rows, in this order, take the places of all."""
        self.batch = len(rows)
        if self._present is not None:
            chosen = self._present[rows]
            self._present = None if chosen.all() else chosen

    def copy(self) -> Columns:
        """The same, on its own from now on; what they share is never written to."""
        twin = Columns(self.batch)
        twin.width, twin._present = self.width, self._present
        return twin


def _has_holes(mask: Present) -> bool:
    """Whether some row has padding between tokens."""
    first, last = mask.argmax(1), mask.shape[1] - 1 - mask[:, ::-1].argmax(1)
    counts = mask.sum(1)
    return bool(((counts > 0) & (counts != last - first + 1)).any())
