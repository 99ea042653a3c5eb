"""Which columns of a batch are tokens, and which are padding. Transformers states all of them with every token, so what
is done here is done once per pass over the whole text: in numpy, whose threads nobody has to wake for it. What lies on a
GPU is compared there, and only new columns are fetched: a mask of 8 x 32K took 0.4 ms to come to the host (H100)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .geometry import Refused

Present = np.ndarray[Any, np.dtype[np.bool_]]  # [batch, columns], False: padding


class Columns:
    """The columns that a batch has so far."""

    def __init__(self, batch: int = 0) -> None:
        self.batch = batch
        self.width = 0  #: columns
        self._present: Present | None = None  # None: all are tokens
        # The same as a GPU has it, [batch, width] bool, of a pass that was given it there; None: it has to be fetched.
        self._shown: torch.Tensor | None = None
        self._stated: torch.Tensor | None = None  # with the columns of `new`, which are not held yet

    def new(self, mask: torch.Tensor | None, length: int, columns: int, narrowest: int | None) -> Present | None:
        """Which of the next columns are tokens; None: all.

        Parameters
        ----------
        mask : [batch, length], or None
            What the pass was given of all columns, before and new; 0: padding.
        length : int
            Columns of the pass's mask.
        columns : int
            New ones.
        narrowest : int
            The narrowest window of the layers; None: there is none.
        """
        self._stated = None
        if length != self.width + columns:
            raise Refused([f"the mask has {length} columns, the cache and the step {self.width + columns}"])
        if mask is None:
            if self._present is not None:
                raise Refused(["padding was given before and is not now: pass attention_mask"])
            return None
        if mask.shape != (self.batch, length):
            raise Refused([f"attention_mask is {list(mask.shape)}, not {[self.batch, length]}"])
        same, new = self._looked_at(mask)
        if not same:
            raise Refused(["columns that were computed before are masked, or no longer, by this attention_mask"])
        if new.all() and self._present is None:
            return None
        if narrowest is not None and length > narrowest and _has_holes(self._with(new)):
            raise Refused(["a window counts columns that are masked between tokens: pad on the left"])
        return None if new.all() else new

    def _looked_at(self, mask: torch.Tensor) -> tuple[bool, Present]:
        """Whether a mask is as it was where columns are held, and the new ones."""
        width, shown = self.width, self._shown
        far = _fetches(mask)
        mask = mask.to(torch.bool, copy=far)  # kept, while the caller may write to the mask
        self._stated = mask if far else None
        if far and shown is not None and shown.device == mask.device:
            same = (mask[:, :width] == shown).all(1, keepdim=True)
            fetched = torch.cat([same, mask[:, width:]], 1).to("cpu").numpy()
            return bool(fetched[:, 0].all()), fetched[:, 1:]
        whole = mask.to("cpu").numpy()
        before = whole[:, :width]
        same_here = before.all() if self._present is None else np.array_equal(before, self._present)
        return bool(same_here), whole[:, width:]

    def _with(self, new: Present) -> Present:
        """What is held, and these."""
        before = np.ones((self.batch, self.width), np.bool_) if self._present is None else self._present
        return np.concatenate([before, new], 1)

    def add(self, columns: int, present: Present | None) -> None:
        """These are held now; `present` as `new` returned it."""
        if present is not None or self._present is not None:
            self._present = self._with(np.ones((self.batch, columns), np.bool_) if present is None else present)
        self.width += columns
        stated, self._stated = self._stated, None
        self._shown = stated if stated is not None and stated.shape == (self.batch, self.width) else None

    def crop(self, keep: int) -> list[int]:
        """Only the first `keep` stay; how many tokens of each row go."""
        gone = [self.width - keep] * self.batch
        if self._present is not None:
            gone = self._present[:, keep:].sum(1).tolist()
            kept = self._present[:, :keep]
            self._present = None if kept.all() else kept
        self.width = keep
        self._shown = None if self._shown is None else self._shown[:, :keep]
        return gone

    def select(self, rows: list[int]) -> None:
        """These rows, in this order, take the places of all."""
        self.batch, self._shown = len(rows), None
        if self._present is not None:
            chosen = self._present[rows]
            self._present = None if chosen.all() else chosen

    def copy(self) -> Columns:
        """The same, on its own from now on; what they share is never written to."""
        twin = Columns(self.batch)
        twin.width, twin._present, twin._shown = self.width, self._present, self._shown
        return twin

    def on_host(self) -> Columns:
        """A copy without what lies on a GPU, for another process."""
        twin = self.copy()
        twin._shown = None
        return twin


def _fetches(mask: torch.Tensor) -> bool:
    """Whether it costs time to have a mask here."""
    return mask.device.type != "cpu"


def _has_holes(mask: Present) -> bool:
    """Whether some row has padding between tokens."""
    first, last = mask.argmax(1), mask.shape[1] - 1 - mask[:, ::-1].argmax(1)
    counts = mask.sum(1)
    return bool(((counts > 0) & (counts != last - first + 1)).any())
