"""Gives a model's attention and its cache to a service."""

from __future__ import annotations

import contextlib
import functools
import weakref
from types import TracebackType
from typing import Any

import torch

from .. import errors
from ..client import Client
from ..service import Service
from .attention import NAME, register
from .cache import ServiceCache, SharedRows
from .geometry import Layer, Refused, cache_id, cache_spec
from .graphs import Graphs
from .probe import ask
from .states import cache_class
from .steps import Steps

_KV_DTYPES = {torch.float32: "bf16", torch.bfloat16: "bf16", torch.float16: "f16"}
_SESSION_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


def switch(model: Any, implementation: Any) -> None:
    """Lets another implementation compute a model's attention. Refuses models that do not ask for it by name."""
    try:
        model.set_attn_implementation(implementation)
    except ValueError as error:
        raise Refused([f"its attention cannot be replaced: {error}"]) from error
    if model.config.get_text_config(decoder=True)._attn_implementation != implementation:
        raise Refused(["its attention cannot be replaced: it is not computed through AttentionInterface"])


def examine(model: Any) -> dict[int, Layer]:
    """What `attach` would find in a model: its layers that have keys and values. Needs no service.

    The model may be on torch's "meta" device, where it has no weights.

    Raises
    ------
    Refused
        As `attach` does.
    """
    before = model.config._attn_implementation
    register()
    try:
        switch(model, NAME)
        return ask(model).layers
    finally:
        model.set_attn_implementation(before)


class Attachment:
    """A model whose attention is computed by a service; made by `attach`. It ends with `detach` or its ``with``.

    Attributes
    ----------
    model
        The model.
    held : tributary.Cache
        The cache of the service, which every process with the same model and the same options shares.
    layers : dict of int to Layer
        What was found in the model: its layers with keys and values.
    """

    def __init__(self, model: Any, client: Client, owned: Client | None, options: dict[str, Any]) -> None:
        self.model = model
        self._owned = owned
        self._caches: weakref.WeakSet[ServiceCache] = weakref.WeakSet()
        most_bytes = options.pop("max_call_bytes")
        session_rows, cuda_graphs, fuse = (options.pop(name) for name in ("session_rows", "cuda_graphs", "fuse"))
        self._implementation = model.config._attn_implementation
        if isinstance(self._implementation, str) and self._implementation == NAME:
            raise Refused(["the model is attached already"])
        self._hooks: list[Any] = []
        self._graphs: Graphs | None = None
        register()
        try:
            switch(model, NAME)
            found = ask(model)
            self.layers: dict[int, Layer] = found.layers
            self._has_states = found.has_states
            plain = [layer for layer in self.layers.values() if layer.chunk is None]
            chunked = [layer for layer in self.layers.values() if layer.chunk is not None]
            if not plain or len({layer.chunk for layer in chunked}) > 1:
                raise Refused(["its chunks are not alike, or no layer sees more than a chunk"])
            spec = cache_spec(plain, **options)
            self.held = client.create_cache(cache_id(spec), spec)
            dtype = _SESSION_DTYPES[getattr(model, "dtype", torch.float32)]
            gpu = model.device if model.device.type == "cuda" else None
            rows = session_rows if found.in_order else 0
            self._steps = Steps(self.held, len(plain), dtype, rows, most_bytes, gpu)
            self._chunked: tuple[Steps, int] | None = None
            if chunked:
                spec = cache_spec(chunked, **options)
                held = client.create_cache(cache_id(spec) + f"-chunks-{chunked[0].chunk}", spec)
                assert chunked[0].chunk is not None
                self._chunked = (Steps(held, len(chunked), dtype, rows, most_bytes, gpu), chunked[0].chunk)
        except BaseException:
            switch(model, self._implementation)
            raise
        whole = not found.has_states and self._chunked is None
        if cuda_graphs and found.in_order and whole and gpu is not None:
            self._graphs = Graphs(model, self.layers, self._config.num_hidden_layers, self._steps, fuse)
        self._hooks = [
            model.register_forward_pre_hook(self._with_cache, with_kwargs=True),
            model.register_forward_hook(self._settle, with_kwargs=True),
        ]
        model._prepare_cache_for_generation = self._prepare
        model.init_continuous_batching = self._batching

    def cache(self, shared: SharedRows | None = None) -> ServiceCache:
        """A cache for `generate` or a call of the model: ``model(ids, cache=attachment.cache())``.

        Parameters
        ----------
        shared : SharedRows, or None
            None: it is empty. Else it goes on from these rows, which another cache of the same model holds
            (`ServiceCache.shared`), in this process or in another: a prompt is computed once for all of them.
        """
        cache: ServiceCache = cache_class(ServiceCache, self._config)(
            self.layers, self._config, self._steps, self._chunked
        )
        self._caches.add(cache)
        if shared is not None:
            cache.go_on_from(shared)
        return cache

    @property
    def _config(self) -> Any:
        return self.model.config.get_text_config(decoder=True)

    def detach(self, delete: bool = False) -> None:
        """Makes the model what it was; may be repeated. When the client is the attachment's own, its caches end.

        Parameters
        ----------
        delete : bool
            Whether the service's cache is deleted, with the sequences of all who share it.
        """
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if hasattr(self.model, "_cached_continuous_batching_manager"):
            self.model.destroy_cached_continuous_batching_manager()
        if self._graphs is not None:
            self._graphs.close()
        if self._owned is not None:  # caches that live on could not close their sequences without it
            for cache in list(self._caches):
                cache.reset()
        del self.model._prepare_cache_for_generation
        del self.model.init_continuous_batching
        switch(self.model, self._implementation)
        for steps in [self._steps, *([] if self._chunked is None else [self._chunked[0]])]:
            steps.close()
            if delete:
                with contextlib.suppress(errors.NotFound):  # someone who shares it did
                    steps.held.delete()
        if self._owned is not None:
            self._owned.close()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def _with_cache(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = kwargs.get("cache")
        if given is None:
            kwargs = {**kwargs, "cache": self.cache()}
        elif not getattr(given, "of_service", False):
            raise Refused([f"the model is attached to a service, and its cache is {type(given).__name__}"])
        return args, kwargs

    def _settle(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        cache = kwargs.get("cache")
        if isinstance(cache, ServiceCache):
            cache.settle()

    def _batching(
        self, generation_config: Any = None, continuous_batching_config: Any = None, workload_hints: Any = None
    ) -> Any:
        """Takes the place of ContinuousMixin.init_continuous_batching: `generate_batch` and managers go through it."""
        from .batching import BatchingCache, ServiceBatching  # pylint: disable=import-outside-toplevel

        if self._has_states or self._chunked is not None:
            raise Refused(["continuous batching of layers with states (linear attention, convolutions) or chunks"])
        kept = getattr(self.model, "_cached_continuous_batching_manager", None)
        if isinstance(kept, ServiceBatching):
            return kept
        return ServiceBatching(
            self.model,
            generation_config or self.model.generation_config,
            continuous_batching_config,
            workload_hints,
            self.held,
            functools.partial(BatchingCache, self.layers, self._steps),
        )

    def _prepare(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Takes the place of GenerationMixin._prepare_cache_for_generation."""
        if generation_config.cache_implementation not in (None, "dynamic"):
            asked = generation_config.cache_implementation
            raise Refused([f"cache_implementation={asked!r}: the cache is a service's"])
        given = model_kwargs.get("cache")
        if given is not None:
            given._is_user_defined = True
        elif generation_config.use_cache is not False:
            model_kwargs["cache"] = self.cache()


def attach(
    model: Any,
    service: Client | Service | str,
    *,
    capacity_tokens: int = 1 << 16,
    kv_dtype: str | None = None,
    page_size: int = 0,
    window_capacity_tokens: int = 0,
    rollback_tokens: int = 0,
    max_call_bytes: int = 32 << 20,
    session_rows: int = 256,
    cuda_graphs: bool = False,
    fuse: bool = False,
) -> Attachment:
    """Lets a service hold the KV cache of a model and compute its attention; `model.generate` works as ever.

    The model is run once over three tokens, to see what its layers are: sinks are read then, so its weights must be
    in place.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model, in eval mode.
    service : Client, Service or str
        The service; a str is the target of a `Client` of its own.
    capacity_tokens : int
        What the cache holds, over all sequences. Processes that state the same options share a cache.
    kv_dtype : "bf16", "f16", "fp8_e4m3", "fp8_e5m2" or "nvfp4"; on CPU workers "f32", too
        None: f16 for a model in float16, else bf16.
    page_size, window_capacity_tokens, rollback_tokens : int
        As in `CacheSpec`.
    max_call_bytes : int
        Tensors of more bytes travel in several calls: not more than what the service takes in a message.
    session_rows : int
        A forward pass of at most so many tokens, over all rows of the batch, is one step of a session; one of more
        is a call for each layer. 0: all are.
    cuda_graphs : bool
        Of a model on a GPU: passes of one token for each row are captured in a CUDA graph for each batch size, where
        the model allows it, and launched from there. Modules' hooks and changes of weights' addresses are not noticed.
    fuse : bool
        Of passes in CUDA graphs: norms, MLPs and other parts without attention are made by torch.compile first, which
        takes some seconds once.

    Raises
    ------
    Refused
        The model asks for what the service cannot do; ``.reasons`` lists all that was found. The model is as it was.
    """
    dtype = getattr(model, "dtype", torch.float32)
    if dtype not in _KV_DTYPES:
        raise Refused([f"dtype {dtype}: must be float32, float16 or bfloat16"])
    owned = None
    if isinstance(service, Client):
        client = service
    else:
        client = owned = Client(service if isinstance(service, str) else service.target)
    options = {
        "capacity_tokens": capacity_tokens,
        "kv_dtype": kv_dtype or _KV_DTYPES[dtype],
        "page_size": page_size,
        "window_capacity_tokens": window_capacity_tokens,
        "rollback_tokens": rollback_tokens,
        "max_call_bytes": max_call_bytes,
        "session_rows": session_rows,
        "cuda_graphs": cuda_graphs,
        "fuse": fuse,
    }
    try:
        return Attachment(model, client, owned, options)
    except BaseException:
        if owned is not None:
            owned.close()
        raise
