"""A cache that holds nothing and notes what each layer asks of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from .attention import Call, Mask, tagged
from .geometry import Layer, Refused, chunk_of, window_of
from .states import cache_class, with_states

_TOKENS = 3


class Unheld(CacheLayerMixin):
    """A layer of a cache that holds nothing."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class _Tag:
    def __init__(self, probe: Probe, layer: int) -> None:
        self.probe, self.layer = probe, layer

    def attend(self, call: Call) -> torch.Tensor:
        return self.probe.note(self.layer, call)


class Probe(Cache):
    """Stands in for the cache in one forward pass."""

    def __init__(self, config: Any) -> None:
        layers, self.kept = with_states([Unheld() for _ in range(config.num_hidden_layers)], config)
        Cache.__init__(self, layers=layers)
        self.updated: set[int] = set()
        self.found: dict[int, Layer] = {}
        self.order: list[int] = []  # of the layers' attention
        self.why: list[str] = []
        self._reaches: dict[int, tuple[Mask, int | None, int | None]] = {}  # by the id of what they are of

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx in self.updated:
            self.why.append(f"layer {layer_idx}: keeps more than one set of keys and values")
        self.updated.add(layer_idx)
        return tagged(key_states, _Tag(self, layer_idx)), value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def update_indexer(self, *args: Any, **kwargs: Any) -> Any:
        raise Refused(["an indexer chooses which keys are attended over (sparse attention)"])

    def note(self, index: int, call: Call) -> torch.Tensor:
        """Notes one call; the answer has the right shape and says nothing."""
        self.order.append(index)
        batch, q_heads, rows, head_dim = call.query.shape
        value_head_dim = call.value.shape[-1]
        try:
            if reasons := call.reasons():
                raise Refused(reasons)
            assert call.mask is not None
            window_left, chunk = self._reach(call.mask)
            layer = Layer(
                q_heads=q_heads,
                kv_heads=call.key.shape[1],
                head_dim=head_dim,
                value_head_dim=value_head_dim,
                scale=call.scale,
                soft_cap=call.soft_cap,
                window_left=window_left,
                sinks=sinks_of(call),
                chunk=chunk,
            )
            if self.found.setdefault(index, layer) != layer:
                raise Refused(["another layer attends over its keys in another way"])
        except Refused as refused:
            self.why += [f"layer {index}: {reason}" for reason in refused.reasons]
        return call.query.new_zeros(batch, rows, q_heads, value_head_dim)

    def _reach(self, mask: Mask) -> tuple[int | None, int | None]:
        """A mask's window and its chunks; layers share masks, and looking takes a while."""
        if id(mask) not in self._reaches:
            chunk = chunk_of(mask.function)
            self._reaches[id(mask)] = (mask, window_of(mask.function) if chunk is None else None, chunk)
        return self._reaches[id(mask)][1:]

    def layers_found(self) -> dict[int, Layer]:
        """Layers with keys and values, by the model's number, as they come in a pass. Raises with every reason when some cannot be held."""
        why = list(dict.fromkeys(self.why))
        for index, layer in self.found.items():
            why += layer.reasons(index)
        if silent := sorted(self.updated - self.found.keys()):
            why.append(f"layers {silent}: do not attend through Transformers' AttentionInterface")
        if not self.updated and not why:
            why.append("no layer has keys and values")
        if why:
            raise Refused(why)
        return self.found


def sinks_of(call: Call) -> tuple[float, ...]:
    """The sinks of a call, () for none."""
    if call.sinks is None:
        return ()
    if call.sinks.is_meta:
        return (0.0,) * call.sinks.numel()
    return tuple(call.sinks.detach().float().cpu().reshape(-1).tolist())


@dataclass(frozen=True)
class Found:
    """What a model's attention is."""

    layers: dict[int, Layer]  #: that have keys and values, by the model's number
    in_order: bool  #: whether each of them attends once, in their order
    has_states: bool  #: whether some layers have states besides, or instead


def ask(model: Any) -> Found:
    """Runs a model, whose attention is set to "tributary", over a few tokens. What it computes is thrown away.

    Raises `Refused` with every reason that was found, whatever the model does.
    """
    config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        raise Refused(["it is an encoder with a decoder"])
    if not isinstance(getattr(config, "num_hidden_layers", None), int):
        raise Refused(["its config does not say how many layers it has"])
    probe = cache_class(Probe, config)(config)
    # A row for each code book, of which some models make one text.
    rows = getattr(config, "num_codebooks", None) or 1
    tokens = torch.arange(1, 1 + _TOKENS, device=model.device).expand(rows, -1)
    with torch.no_grad():
        try:
            model(input_ids=tokens, cache=probe, use_cache=True)
        except Refused as refused:
            raise Refused([*probe.why, *refused.reasons]) from None
        except Exception as error:  # models that want a cache or inputs of their own kind
            said = " ".join(str(error).split())[:200]
            why = f"a pass over {_TOKENS} tokens failed: {type(error).__name__}: {said}"
            if isinstance(error, AttributeError) and type(getattr(error, "obj", None)).__module__ == __name__:
                why = f"its layers want a cache of a kind of their own, with {error.name}"
            raise Refused([*probe.why, why]) from error
    try:
        layers = probe.layers_found()
    except Refused as refused:
        if getattr(config, "is_decoder", True) is False:
            raise Refused([*refused.reasons, "its config says is_decoder=False: an encoder is causal with True"]) from None
        raise
    return Found(layers, probe.order == list(layers), bool(probe.kept))
