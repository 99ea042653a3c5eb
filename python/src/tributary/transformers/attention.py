"""The attention and mask functions that Transformers calls, under the name "tributary"."""

from __future__ import annotations

import threading
from collections.abc import Set
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from .geometry import Refused

NAME = "tributary"

# Tensors that attention functions are handed and that change nothing in what is computed, or are seen to here.
_HARMLESS = {
    "s_aux",
    "position_ids",
    "cache_position",
    "position_embeddings",
    "input_ids",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
}


class Mask:
    """What the mask function was asked: rides on the tensor that models hand from it to attention."""

    def __init__(self, function: Any, columns: torch.Tensor | None, length: int) -> None:
        self.function = function
        self.columns = columns  #: [batch, length], where the model has it; 0: padding; None: there is none
        self.length = length  #: columns before this step, and its own
        self.checked: set[tuple[int | None, int | None]] = set()  #: (window, chunk) that the function was found to be


class _Noted(torch.Tensor):
    """Stands for a mask. A part of it, which models take for their last rows alone, is it."""

    def __getitem__(self, _: Any) -> _Noted:  # type: ignore[override]
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("to", "contiguous", "clone", "detach"):
            return args[0]
        if name in ("__get__", "__set__", "as_subclass", "dim", "size", "is_floating_point"):
            return super().__torch_function__(func, types, args, kwargs or {})
        raise Refused([f"it computes with its mask ({name})"])


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Notes which columns are padding, and what else the mask is; nothing of [rows, columns] is made."""
    if kv_offset != 0:
        raise Refused(["the cache is not the service's: pass none, or one of Attachment.cache()"])
    columns = None if attention_mask is None or attention_mask.is_meta else attention_mask.detach()
    noted = torch.empty(batch_size, 0, dtype=torch.bool).as_subclass(_Noted)
    noted.tributary = Mask(mask_function, columns, kv_length)  # type: ignore[attr-defined]
    return noted


class Call:
    """One layer's call of attention, as the model made it."""

    def __init__(self, module: Any, query: Any, key: Any, value: Any, mask: Any, options: dict[str, Any]) -> None:
        self.module = module
        self.query, self.key, self.value = query, key, value  #: [batch, heads, rows, dim]
        self.mask: Mask | None = getattr(mask, "tributary", None)
        scale = options.get("scaling")
        if scale is None:
            scale = getattr(module, "scaling", None)
        self.scale = float(query.shape[-1] ** -0.5 if scale is None else scale)
        self.soft_cap = float(options.get("softcap") or 0.0)
        self.sinks: torch.Tensor | None = options.get("s_aux")
        self.options = options

    def reasons(self, masked: bool = True, known: Set[str] = frozenset()) -> list[str]:
        """What of it the service cannot do, whatever the layer is.

        Parameters
        ----------
        masked : bool
            Whether a mask tells what rows see; else whoever asks knows it.
        known : set of str
            Names of tensors that whoever asks has made use of.
        """
        why = []
        if masked and self.mask is None:
            # Where there is a mask it alone says what a row sees, whatever a module states of itself.
            causal = self.options.get("is_causal") is not False and getattr(self.module, "is_causal", True) is not False
            why.append("its mask was not made by Transformers' mask functions" if causal else "its attention is not causal")
        if self.options.get("dropout"):
            why.append("it drops attention weights: model.eval()")
        if self.options.get("output_attentions"):
            why.append("attention weights are not to be had (output_attentions)")
        why += [
            f"its attention is given {name}, which the service does not know"
            for name, value in self.options.items()
            if name not in _HARMLESS and name not in known and isinstance(value, torch.Tensor)
        ]
        if torch.is_grad_enabled() and self.query.requires_grad:
            why.append("attention in the service has no gradient: use torch.no_grad()")
        return why


_latest = threading.local()  # .tag: of the keys that a cache was given last in this thread, .columns of them


def tagged(key: torch.Tensor, tag: Any) -> torch.Tensor:
    """Keys as a cache returns them, with what attention is to do with them: ``tag.attend(call)``, for ``tag.layer``."""
    # A view of its own: views of the key itself, which a pass may keep, would keep the tag alive, and that the pass.
    key = key.view_as(key)
    key.tributary = tag  # type: ignore[attr-defined]
    _latest.tag, _latest.columns = tag, key.shape[2]
    return key


def _tag_of(module: Any, key: torch.Tensor) -> Any:
    """What rides on keys. Layers that make keys of what their cache returned (MLA expands a latent, others repeat
    heads) hand over other tensors: those are the keys of the tokens that were cached just before, of the same layer."""
    tag = getattr(key, "tributary", None)
    latest = getattr(_latest, "tag", None)
    if tag is None and latest is not None and getattr(module, "layer_idx", None) == latest.layer:
        tag = latest if key.shape[2] == _latest.columns else None
    _latest.tag = None  # the next layer, or cross attention, has other keys
    return tag


def attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **options: Any
) -> tuple[torch.Tensor, None]:
    """One layer's attention, where its cache lies. Which cache that is rides on `key`: `Cache.update` put it there."""
    tag = _tag_of(module, key)
    if tag is None:
        raise Refused(["a layer attends over keys other than those it gave to the cache (cross attention, say)"])
    output: torch.Tensor = tag.attend(Call(module, query, key, value, attention_mask, options))
    return output, None


def register() -> None:
    """Makes both known to Transformers; may be repeated."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
