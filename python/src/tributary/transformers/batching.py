"""Continuous batching of Transformers: its scheduler decides, the service holds the cache.

Transformers' manager admits requests, packs the rows of many into one pass without padding, and keeps account of blocks
of a paged cache. Here each request is a sequence of the service. The account goes on, over memory that does not exist
(torch's "meta" device), with blocks as large as the service's: so the scheduler admits what the service has room for.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from transformers.generation import ContinuousBatchingConfig
from transformers.generation.continuous_batching import (
    ContinuousBatchingManager,
    PagedAttentionCache,
    continuous_api,
)

from .. import client, errors
from .attention import Call, tagged
from .cache import close
from .geometry import Layer, Refused
from .steps import Pass, Steps
from .tensors import fit, to_batch, to_rows, trim

# Tensors that Transformers tells attention of a batch, and that the service knows by itself.
_TOLD = {"logits_indices", "logits_processor_args", "block_table", "cu_seq_lens_q", "cu_seq_lens_k"}


class _Tag:
    def __init__(self, cache: BatchingCache, layer: int) -> None:
        self.cache, self.layer = cache, layer

    def attend(self, call: Call) -> torch.Tensor:
        return self.cache.attend(self.layer, call)


# A pass of the manager's thread looks its cache's class up in this module; held while another stands there.
_making = threading.Lock()


def _account(config: Any) -> Any:
    """What the account is kept by: windows, heads and masks are the service's affair, its pages serve all layers."""
    return SimpleNamespace(
        layer_types=None,
        sliding_window=None,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        _attn_implementation="flash_attention_2",  # which needs no masks either
    )


class BatchingCache(PagedAttentionCache):
    """The cache of one manager: requests by their ids, each a sequence of the service."""

    of_service = True

    def __init__(
        self,
        layers: dict[int, Layer],
        steps: Steps,
        config: Any,
        continuous_batching_config: Any,
        **more: Any,
    ) -> None:
        self._held, self._geometry, self._steps = steps.held, layers, steps
        self._number = {index: number for number, index in enumerate(layers)}
        self._requests: dict[str, int] = {}
        self._noted: list[tuple[str, int, int]] = []  # (request, tokens held, rows) of the pass that comes
        self._run: Pass | None = None  # the pass that runs
        self._done = 0  # layers of it
        more["device"] = "meta"
        super().__init__(_account(config), continuous_batching_config, **more)

    # What the scheduler and the batch processor ask.

    def extend_read_and_write_indices(
        self, request_id: str, past_length: int, query_length: int, read_index: Any, write_index: Any
    ) -> None:
        """Notes one request's rows in the pass that comes; there is nothing to be indexed."""
        self._noted.append((request_id, past_length, query_length))

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """Prompts are computed whole: blocks of one request are no blocks of another."""
        return 0

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """The request is over, or begins again: its sequence is closed."""
        super().free_blocks(request_id, no_cache)
        sequence = self._requests.pop(request_id, None)
        if sequence is not None:
            close(self._held, [sequence])

    def free_all_requests(self, clear_ledgers: bool = False) -> None:
        """All are over."""
        super().free_all_requests(clear_ledgers)
        close(self._held, list(self._requests.values()))
        self._requests.clear()

    def prepare_fork_request(self, src_state: Any, dst_req_ids: list[str], copy_src_and_dst: Any) -> list[str]:
        """Children go on from what their parent holds: forks, which share pages until they differ."""
        forked: list[str] = super().prepare_fork_request(src_state, dst_req_ids, copy_src_and_dst)
        parent = self._requests[src_state.request_id]
        made = self._held.update([("fork", parent, src_state.current_len())] * len(forked)) if forked else []
        self._requests.update(zip(forked, made))
        return forked

    def perform_cache_copy(self, copy_src_and_dst: Any) -> None:
        """The service has copied what needs to be."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, kwargs: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hands both on to attention."""
        return tagged(key_states, _Tag(self, layer_idx)), value_states

    # Attention.

    def attend(self, index: int, call: Call) -> torch.Tensor:
        """One layer of the pass: rows of many sequences, one after the other."""
        layer = self._geometry[index]
        if why := call.reasons(masked=False, known=_TOLD):
            raise Refused(why)
        try:
            if self._run is None:
                self._run = self._begin()
            query, key, value = fit(layer, *(to_rows(tensor) for tensor in (call.query, call.key, call.value)))
            output = self._run.attend(self._number[index], query, key, value)
            self._done += 1
            if self._done == len(self._geometry):
                self._run.finish()
                self._run, self._done = None, 0
        except BaseException:
            self._give_up()
            raise
        return to_batch(trim(output, layer.value_head_dim), 1)

    def _begin(self) -> Pass:
        """Opens sequences for requests that are new; the pass is a step of a session where it is small enough."""
        noted, self._noted = self._noted, []
        fresh = [request for request, _, _ in noted if request not in self._requests]
        if fresh:
            self._requests.update(zip(fresh, self._held.update([("open",)] * len(fresh))))
        pieces = [(self._requests[request], at, rows) for request, at, rows in noted]
        return self._steps.begin(pieces) or Pass(self._steps, pieces)

    def _give_up(self) -> None:
        """What was done of the pass is taken back: a request that is begun again finds what it left."""
        run, self._run, self._done, self._noted = self._run, None, 0, []
        if run is None:
            return
        run.abandon()
        for sequence, at, _ in run.pieces:
            with contextlib.suppress(errors.TributaryError):
                self._held.truncate(sequence, at)


class ServiceBatching(ContinuousBatchingManager):
    """A manager whose requests are sequences of the service."""

    def __init__(
        self,
        model: Any,
        generation_config: Any,
        continuous_batching_config: Any,
        workload_hints: Any,
        held: client.Cache,
        cache: Callable[..., BatchingCache],
    ) -> None:
        config = copy.copy(continuous_batching_config or ContinuousBatchingConfig())
        self._make_cache = cache
        # The service's own pages, so that what the account says fits does fit.
        config.page_size = held.page_size * held.ranks
        config.num_blocks = held.capacity_tokens // config.page_size
        config.max_blocks_per_request = 0  # block tables are flash attention's
        config.allow_block_sharing = False
        config.use_cuda_graph = False
        config.use_async_batching = False
        super().__init__(model, generation_config, config, workload_hints)

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Attention is the service's already."""

    def _create_batch_processor(self) -> Any:
        with _making:
            continuous_api.PagedAttentionCache = self._make_cache
            try:
                return super()._create_batch_processor()
            finally:
                continuous_api.PagedAttentionCache = PagedAttentionCache
