"""DFlash drafters of Transformers, whose context lies in a service: `generate(assistant_model=..., ...)` as ever.

Transformers' `DFlashTokenCandidateGenerator` projects the target's hidden states to keys and values of each draft
layer, and lets a block of masks attend over them and over itself, both ways. That is the service's DFLASH mode: what was
accepted is appended, and the block's keys and values come with its rows and are not kept.
"""

from __future__ import annotations

import contextlib
import weakref
from types import TracebackType
from typing import Any

import torch
from transformers.cache_utils import DFlashCache

from .. import client, errors
from ..client import Client, Entry
from ..service import Service
from .attention import NAME, Call, register, tagged
from .cache import close
from .geometry import Layer, Refused, cache_id, cache_spec, reach_of_block
from .probe import Unheld, sinks_of
from .tensors import fit, to_batch, to_rows

_KV_DTYPES = {torch.float32: "bf16", torch.bfloat16: "bf16", torch.float16: "f16"}
_PROBE_TOKENS = 3  # of context, when a drafter is attached


class _Tag:
    def __init__(self, draft: _Draft | _Probe, layer: int) -> None:
        self.draft, self.layer = draft, layer

    def attend(self, call: Call) -> torch.Tensor:
        return self.draft.attend(self.layer, call)


class _DraftLayer(Unheld):
    """A layer of a DFlashCache that was taken over. What it says of lengths is what a layer would say whose block was
    cropped already."""

    def __init__(self, draft: _Draft | _Probe, index: int) -> None:
        super().__init__()
        self._draft, self._index = draft, index

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        return tagged(key_states, _Tag(self._draft, self._index)), value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._draft.length + query_length, 0

    def get_seq_length(self) -> int:
        return self._draft.length

    def crop(self, tokens_to_remove: int) -> None:
        """The block was not kept."""


def _check(call: Call) -> None:
    why = call.reasons(masked=False)
    if call.mask is None:
        why.append("its mask was not made by Transformers' mask functions")
    elif call.mask.columns is not None and not call.mask.columns.all():
        why.append("a draft's context has padding")
    if call.query.shape[0] != 1:
        why.append(f"drafts are of one sequence, the batch has {call.query.shape[0]}")
    if why:
        raise Refused(why)


class _Probe:
    """Notes what each layer of a drafter asks for, in one pass."""

    length = 0

    def __init__(self) -> None:
        self.found: dict[int, Layer] = {}

    def attend(self, index: int, call: Call) -> torch.Tensor:
        _check(call)
        assert call.mask is not None
        batch, q_heads, rows, head_dim = call.query.shape
        self.found[index] = Layer(
            q_heads=q_heads,
            kv_heads=call.key.shape[1],
            head_dim=head_dim,
            value_head_dim=call.value.shape[-1],
            scale=call.scale,
            soft_cap=call.soft_cap,
            window_left=reach_of_block(call.mask.function, rows),
            sinks=sinks_of(call),
        )
        return call.query.new_zeros(batch, rows, q_heads, call.value.shape[-1])


class _Draft:
    """One text's drafts: a sequence of the service."""

    def __init__(self, held: client.Cache, layers: dict[int, Layer]) -> None:
        self._held, self._layers = held, layers
        self._number = {index: number for number, index in enumerate(layers)}
        self.sequences: list[int] = []  #: one, or none yet
        self.length = 0  #: tokens of context that all layers hold
        self._done = 0  # layers of the pass that runs

    def attend(self, index: int, call: Call) -> torch.Tensor:
        _check(call)
        layer, number = self._layers[index], self._number[index]
        if not self.sequences:
            self.sequences.append(self._held.open())
        elif self._done == 0:  # what a pass left that ended half way
            self._held.truncate(self.sequences[0], self.length)
        sequence, home = self.sequences[0], call.query.device
        rows_of_call = (to_rows(tensor) for tensor in (call.query, call.key, call.value))
        query, key, value = (tensor.to("cpu") for tensor in fit(layer, *rows_of_call))
        rows = query.shape[0]
        accepted = key.shape[0] - rows
        try:
            if accepted:
                self._held.append(number, [(sequence, self.length, accepted)], key[:accepted], value[:accepted])
            output = self._held.attend(
                number,
                [Entry(sequence, self.length + accepted, rows, rows)],
                query,
                key[accepted:],
                value[accepted:],
                mode="dflash",
            ).output
        except BaseException:
            self._done = 0
            raise
        self._done += 1
        if self._done == len(self._layers):
            self._done, self.length = 0, self.length + accepted
        return to_batch(output[..., : layer.value_head_dim].to(home), 1)


class DraftAttachment:
    """A drafter whose context a service holds; made by `attach_drafter`. It ends with `detach` or its ``with``."""

    def __init__(self, drafter: Any, client: Client, owned: Client | None, options: dict[str, Any]) -> None:
        self.drafter = drafter
        self._owned = owned
        self._implementation = drafter.config._attn_implementation
        self._hook: Any = None
        register()
        drafter.set_attn_implementation(NAME)
        try:
            self.layers = self._ask()
            why = [reason for index, layer in self.layers.items() for reason in layer.reasons(index)]
            if why:
                raise Refused(why)
            spec = cache_spec(list(self.layers.values()), **options)
            self.held = client.create_cache(cache_id(spec), spec)
        except BaseException:
            drafter.set_attn_implementation(self._implementation)
            raise
        self._hook = drafter.register_forward_pre_hook(self._take_over, with_kwargs=True)

    def detach(self, delete: bool = False) -> None:
        """Makes the drafter what it was; may be repeated. `delete`: the service's cache is deleted."""
        if self._hook is None:
            return
        self._hook.remove()
        self._hook = None
        self.drafter.set_attn_implementation(self._implementation)
        if delete:
            with contextlib.suppress(errors.NotFound):  # someone who shares it did
                self.held.delete()
        if self._owned is not None:
            self._owned.close()

    def __enter__(self) -> DraftAttachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def _ask(self) -> dict[int, Layer]:
        """What the drafter's layers are, by a pass whose results are thrown away."""
        config, probe = self.drafter.config, _Probe()
        cache = DFlashCache(config=config)
        cache.layers = [_DraftLayer(probe, index) for index in range(config.num_hidden_layers)]
        cache.set_previous_accepted_tokens(_PROBE_TOKENS)
        like = {"dtype": self.drafter.dtype, "device": self.drafter.device}
        with torch.no_grad():
            self.drafter(
                noise_embeds=torch.zeros(1, config.block_size, config.hidden_size, **like),
                context_hidden_states=torch.zeros(
                    1, _PROBE_TOKENS, len(config.target_layer_ids) * config.hidden_size, **like
                ),
                cache=cache,
            )
        return dict(sorted(probe.found.items()))

    def _take_over(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A generator makes its DFlashCache itself: its layers are exchanged for such as hold nothing."""
        cache = kwargs.get("cache")
        if not isinstance(cache, DFlashCache):
            raise Refused([f"the drafter is attached to a service, and its cache is {type(cache).__name__}"])
        if getattr(cache, "tributary", None) is self:
            return
        if cache.get_seq_length() > 0:
            raise Refused(["the cache has tokens from before the drafter was attached"])
        draft = _Draft(self.held, self.layers)
        cache.layers = [_DraftLayer(draft, index) for index in range(self.drafter.config.num_hidden_layers)]
        cache.tributary = self  # type: ignore[attr-defined]
        weakref.finalize(cache, close, self.held, draft.sequences)


def attach_drafter(
    drafter: Any,
    service: Client | Service | str,
    *,
    capacity_tokens: int = 1 << 16,
    kv_dtype: str | None = None,
    page_size: int = 0,
) -> DraftAttachment:
    """Lets a service hold the context of a DFlash drafter and compute its attention.

    Then ``target.generate(..., assistant_model=drafter, speculation_type="dflash")`` works as ever; the target may be
    attached too, or not.

    Parameters
    ----------
    drafter : transformers.PreTrainedModel
        One that Transformers' `DFlashTokenCandidateGenerator` takes, in eval mode.
    service : Client, Service or str
        The service; a str is the target of a `Client` of its own.
    capacity_tokens, kv_dtype, page_size
        As of `attach`.

    Raises
    ------
    Refused
        The drafter asks for what the service cannot do; it is as it was.
    """
    dtype = getattr(drafter, "dtype", torch.float32)
    if dtype not in _KV_DTYPES:
        raise Refused([f"dtype {dtype}: must be float32, float16 or bfloat16"])
    owned = None
    if not isinstance(service, Client):
        service = owned = Client(service if isinstance(service, str) else service.target)
    options = {"capacity_tokens": capacity_tokens, "kv_dtype": kv_dtype or _KV_DTYPES[dtype], "page_size": page_size}
    try:
        return DraftAttachment(drafter, service, owned, options)
    except BaseException:
        if owned is not None:
            owned.close()
        raise
