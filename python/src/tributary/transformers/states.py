"""States of layers that are no keys and values (linear attention, convolutions).

They have one size however long the text is, so they stay beside the model, in the layers that Transformers itself has
for them. Only keys and values go to the service.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin, LinearAttentionLayer

_OF_THE_VIEW = ("_cache", "_index")


def cache_class(kind: type, config: Any) -> Any:
    """The class `kind` of caches, as the model asks for it: MiniMax takes no cache that is not of a class of its own."""
    return _of_minimax(kind) if config.model_type == "minimax" else kind


@functools.cache
def _of_minimax(kind: type) -> type:
    from transformers.models.minimax.modeling_minimax import MiniMaxCache  # pylint: disable=import-outside-toplevel

    class OfMiniMax(kind, MiniMaxCache):  # type: ignore[misc, valid-type]
        """States of its linear layers are those of `LinearAttentionLayer`."""

        linear_cache = ()

        def get_linear_cache(self, layer_idx: int) -> Any:
            layer = self.layers[layer_idx]
            return layer.recurrent_states[0] if layer.has_previous_state[0] else None

        def set_linear_cache(self, layer_idx: int, linear_cache: Any) -> None:
            layer = self.layers[layer_idx]
            layer.recurrent_states[0], layer.device = linear_cache, linear_cache.device
            layer.is_recurrent_states_initialized[0] = layer.has_previous_state[0] = True

    return OfMiniMax


def with_states(views: list[Any], config: Any) -> tuple[list[Any], list[Any]]:
    """Layers of a cache: `views`, but where the model's layers have states.

    Parameters
    ----------
    views : list of CacheLayerMixin
        One for each layer of the model, as if all had keys and values.
    config : transformers.PreTrainedConfig
        The model's text config.

    Returns
    -------
    All layers, and those that have states.
    """
    try:
        own = DynamicCache(config=config).layers
    except (AttributeError, KeyError, TypeError, ValueError):  # the model has a cache of its own kind
        own = []
    kept = []
    for index, layer in enumerate(own[: len(views)]):
        if not isinstance(layer, LinearAttentionCacheLayerMixin):
            continue
        both = isinstance(layer, CacheLayerMixin)
        views[index] = _both(views[index], layer.number_of_states) if both else layer
        kept.append(views[index])
    return views, kept


def _both(view: Any, number_of_states: int) -> Any:
    """A layer with keys and values, which `view` sees to, and states."""
    kind = type(f"{type(view).__name__}WithStates", (LinearAttentionLayer, type(view)), {})
    layer: Any = object.__new__(kind)
    LinearAttentionLayer.__init__(layer, number_of_states=number_of_states)
    layer.__dict__.update(view.__dict__)
    return layer


def copy_states(to: list[Any], of: list[Any]) -> None:
    """Gives layers the states of others, as they are now."""
    for mine, theirs in zip(to, of):
        states = {name: value for name, value in theirs.__dict__.items() if name not in _OF_THE_VIEW}
        mine.__dict__.update(copy.deepcopy(states))
