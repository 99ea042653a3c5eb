"""Forward passes of one token per row as CUDA graphs: captured once for each batch size, launched for every token.

A pass of a model of 32 layers is some thousand launches, which take Python longer than the GPU. A session's layers are
launches like any other, and what changes from pass to pass (lengths, pages, the number of the layer) lies in the
mailbox and on the device, so a graph stays right for every later pass.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from typing import Any

import torch
from transformers import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..session import Session, StepEntry
from .attention import Call, tagged
from .cache import ServiceCache
from .fused import fused
from .geometry import Layer, Refused
from .probe import Unheld
from .steps import TRANSIENT, Steps
from .tensors import fit, to_batch, to_rows, trim

# What a pass may be given; anything else goes the ordinary way.
_PLAIN = {"input_ids", "attention_mask", "position_ids", "cache"}
_IGNORED = {"use_cache", "return_dict", "logits_to_keep"}


class _Tag:
    def __init__(self, cache: _Captured, layer: int) -> None:
        self.cache, self.layer = cache, layer

    def attend(self, call: Call) -> torch.Tensor:
        return self.cache.attend(self.layer, call)


class _Captured(Cache):
    """Stands in for the cache while a graph is captured: layers are handed to one session."""

    def __init__(self, layers: dict[int, Layer], model_layers: int) -> None:
        super().__init__(layers=[Unheld() for _ in range(model_layers)])
        self._geometry = layers
        self.session: Session | None = None  #: None: a rehearsal, whose attention is zeros

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        return tagged(key_states, _Tag(self, layer_idx)), value_states

    def attend(self, index: int, call: Call) -> torch.Tensor:
        layer = self._geometry[index]
        if why := call.reasons():
            raise Refused(why)
        batch, heads, rows, _ = call.query.shape
        if self.session is None:
            return call.query.new_zeros(batch, rows, heads, layer.value_head_dim)
        query, key, value = fit(layer, *(to_rows(tensor) for tensor in (call.query, call.key, call.value)))
        output: torch.Tensor = self.session.attend(query, key, value)
        return to_batch(trim(output, layer.value_head_dim), batch)


class Graph:
    """One batch size's pass. The graph is bound to its session, and ends with it."""

    def __init__(self, forward: Any, layers: dict[int, Layer], model_layers: int, steps: Steps, batch: int) -> None:
        assert steps.gpu is not None
        device = steps.gpu
        self.session = steps.open(batch)
        if self.session.memory != "device":
            raise Refused(["the service has no mailbox on this GPU"])
        self._ids = torch.ones(batch, 1, dtype=torch.long, device=device)
        self._positions = torch.zeros(batch, 1, dtype=torch.long, device=device)
        cache = _Captured(layers, model_layers)
        inputs = {"input_ids": self._ids, "position_ids": self._positions, "cache": cache, "use_cache": True}
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(2):  # libraries set up their workspaces
                forward(**inputs)
        torch.cuda.current_stream(device).wait_stream(side)
        cache.session = self.session
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._logits = forward(**inputs).logits

    def launch(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Launches a pass whose step has been submitted; its logits, which the next launch overwrites."""
        self._ids.copy_(ids)
        self._positions.copy_(positions)
        self._graph.replay()
        return self._logits


class Graphs:
    """The graphs of one attachment, in place of the model's `forward` where a pass is of that kind."""

    def __init__(self, model: Any, layers: dict[int, Layer], model_layers: int, steps: Steps, fuse: bool) -> None:
        self._model, self._layers, self._model_layers, self._steps = model, layers, model_layers, steps
        self._fuse = fuse
        self._forward = model.forward
        self._graphs: dict[int, Graph | None] = {}  # by batch size; None: it cannot be captured

        @functools.wraps(model.forward)  # whose parameters `generate` looks at
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self.forward(*args, **kwargs)

        model.forward = forward

    def close(self) -> None:
        """The model's forward is its own again."""
        if "forward" in self._model.__dict__:
            del self._model.forward
        self._drop()

    def _drop(self) -> None:
        graphs = [graph for graph in self._graphs.values() if graph is not None]
        self._graphs = {}
        for graph in graphs:
            graph.session.abandon()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward pass, by a graph if it is of one token per row and nothing else is asked."""
        cache = kwargs.get("cache")
        if args or not isinstance(cache, ServiceCache) or not self._takes(kwargs, cache):
            return self._forward(*args, **kwargs)
        batch = kwargs["input_ids"].shape[0]
        graph = self._graph(batch)
        if graph is None:
            return self._forward(**kwargs)
        pieces = cache.one_more(kwargs.get("attention_mask"))
        if pieces is None:
            return self._forward(**kwargs)
        entries = [StepEntry(sequence, at, 1, 1, back) for sequence, at, back in pieces]
        try:
            number = graph.session.submit(entries, layers=self._steps.layers)
        except TRANSIENT:  # the session ended while it was idle
            self._drop()
            return self._forward(**kwargs)
        positions = kwargs.get("position_ids")
        if positions is None:
            positions = torch.full((batch, 1), cache.get_seq_length(), device=self._steps.gpu)
        try:
            logits = graph.launch(kwargs["input_ids"], positions).clone()
            graph.session.wait(number)
        except BaseException:
            self._drop()
            cache.none_more()
            raise
        cache.one_held()
        return CausalLMOutputWithPast(logits=logits, **{self._cache_field: cache})

    @property
    def _cache_field(self) -> str:
        fields = CausalLMOutputWithPast.__dataclass_fields__
        return "cache" if "cache" in fields else "past_key_values"

    def _takes(self, kwargs: dict[str, Any], cache: ServiceCache) -> bool:
        ids = kwargs.get("input_ids")
        if ids is None or ids.shape != (cache.batch_size, 1) or self._steps.gpu is None:
            return False
        if kwargs.get("position_ids") is not None and kwargs["position_ids"].shape != ids.shape:
            return False
        return all(name in _PLAIN or name in _IGNORED or not given for name, given in kwargs.items())

    def _graph(self, batch: int) -> Graph | None:
        if batch not in self._graphs:
            self._graphs[batch] = self._captured(batch)
        return self._graphs[batch]

    def _captured(self, batch: int) -> Graph | None:
        # Not in inference mode: tensors that were made there could not be written to outside of it.
        fusing = fused(self._model) if self._fuse else contextlib.nullcontext()
        try:
            with torch.inference_mode(False), torch.no_grad(), fusing:
                return Graph(self._forward, self._layers, self._model_layers, self._steps, batch)
        except (Refused, RuntimeError) as error:
            if not self._fuse:
                warnings.warn(f"tributary: a batch of {batch} is not captured in a CUDA graph: {error}", stacklevel=4)
                return None
            # torch.compile wants a compiler, and Triton, which not every machine has.
            warnings.warn(f"tributary: no part of the model is fused: {error}", stacklevel=4)
            self._fuse = False
        return self._captured(batch)
