"""Models of Transformers with their cache in a service, beside the same models with eager attention.

Models are small and random, with weights large enough that their text does not repeat itself. Four CPU workers hold
the cache in bfloat16; eager's cache rounds to bfloat16 too.
"""

import collections
import copy
import dataclasses
import gc
import multiprocessing
import pathlib
import random
import sys
import unittest
from unittest import mock

import served
import torch
import transformers
from transformers import DynamicCache
from transformers.models.minimax.modeling_minimax import MiniMaxCache

import tributary
from tributary.transformers import Refused, ServiceCache, attach, attach_drafter
from tributary.transformers.columns import Columns
from tributary.transformers.fused import fused, parts
from tributary.transformers.graphs import Graphs

TINYLM = pathlib.Path(__file__).parents[2] / "examples" / "tinylm"
TOKENS = 64
# Of logits, whose spread is about 10: a key or value that lies between two numbers of bfloat16 may be rounded to the
# other one after a difference of 1e-6, which the order of sums makes. Phi-3 shows most of it (0.065), gpt-oss 0.02; with
# float16 in both caches the differences are a fifth to an eighth of these.
ROUNDING = 0.1

SMALL = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512, "initializer_range": 0.25,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip


def llama(**more):
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SMALL, **more})).eval()


class Rounding(DynamicCache):
    """What a cache of bfloat16 holds."""

    def update(self, key_states, value_states, *args, **kwargs):
        rounded = (each.to(torch.bfloat16).to(each.dtype) for each in (key_states, value_states))
        return super().update(*rounded, *args, **kwargs)


class RoundingMiniMax(Rounding, MiniMaxCache):
    def __init__(self, config):
        MiniMaxCache.__init__(self)


def prompts(lengths, seed=0):
    """Random prompts, padded on the left: (ids, attention_mask)."""
    dice = torch.Generator().manual_seed(seed)
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, -length:] = torch.randint(3, SMALL["vocab_size"], (length,), generator=dice)
        mask[row, -length:] = 1
    return {"input_ids": ids, "attention_mask": mask}


def text(model, inputs, tokens=TOKENS, **more):
    options = {"do_sample": False, "max_new_tokens": tokens, "eos_token_id": None, **more}
    return model.generate(**inputs, return_dict_in_generate=True, output_logits=True, **options)


def eager(model, inputs, tokens=TOKENS, cache=Rounding, **more):
    model.set_attn_implementation("eager")
    return text(model, inputs, tokens, cache=cache(config=model.config), **more)


def with_more(inputs, seed):
    """The prompts and five tokens more for each."""
    more = prompts([5] * len(inputs["input_ids"]), seed)
    return {name: torch.cat([inputs[name], more[name]], 1) for name in inputs}


def go_on(target, shared, inputs):
    """Another process's part: text that goes on from a prompt that it has not computed."""
    torch.set_num_threads(1)
    model = llama()
    with attach(model, target, capacity_tokens=1 << 13) as attachment:
        said = text(model, inputs, 8, cache=attachment.cache(shared))
        return said.sequences, said.logits[0], attachment.held.id


class WithService(served.WithService):
    SERVICE = {"workers": 4, "program": ""}
    CLIENT = {"shared_memory_bytes": 16 << 20}

    @classmethod
    def setUpClass(cls):
        torch.set_num_threads(1)
        super().setUpClass()

    def attached(self, model, **more):
        attachment = attach(model, self.client, **{"capacity_tokens": 1 << 13, **more})
        self.addCleanup(attachment.detach, delete=True)
        return attachment

    def assert_nothing_left(self, attachment):
        """All pages are free: a sequence that takes them all fits."""
        tokens = attachment.held.capacity_tokens
        dims = (tokens, attachment.held.spec.kv_heads, attachment.held.spec.head_dim)
        keys = torch.zeros(dims, dtype=torch.bfloat16)
        sequence = attachment.held.open()
        attachment.held.append(0, [(sequence, 0, tokens)], keys, keys)
        attachment.held.close(sequence)

    def assert_same_text(self, want, model, inputs):
        """The attached model's greedy text is `want`; where its best logits lie too close, it goes on from there."""
        begin, length = 0, inputs["input_ids"].shape[1]
        total = len(want.logits)
        ties = 0
        while begin < total:
            ids = want.sequences[:, : length + begin]
            mask = torch.nn.functional.pad(inputs["attention_mask"], (0, begin), value=1)
            got = text(model, {"input_ids": ids, "attention_mask": mask}, total - begin)
            for step in range(begin, total):
                logits = want.logits[step]
                torch.testing.assert_close(got.logits[step - begin], logits, atol=ROUNDING, rtol=0)
                differ = got.sequences[:, length + step] != want.sequences[:, length + step]
                if differ.any():
                    best = logits[differ].topk(2).values
                    self.assertLess((best[:, 0] - best[:, 1]).max(), 2 * ROUNDING)
                    ties += 1
                    break
            begin = step + 1
        self.assertLess(ties, 6)


class Generating(WithService):
    def test_greedy(self):
        model, inputs = llama(), prompts([20])
        want = eager(model, inputs)
        self.assertGreater(len(set(want.sequences[0, 20:].tolist())), 20)
        self.attached(model)
        self.assert_same_text(want, model, inputs)

    def test_ragged_batch_padded_on_the_left(self):
        model, inputs = llama(), prompts([3, 29, 1, 16])
        want = eager(model, inputs)
        self.attached(model)
        self.assert_same_text(want, model, inputs)

    def test_half_precision(self):
        for dtype, kv_dtype in ((torch.bfloat16, "bf16"), (torch.float16, "f16")):
            with self.subTest(dtype):
                model, inputs = llama(initializer_range=0.1).to(dtype), prompts([9, 14])
                ids = inputs["input_ids"]
                model.set_attn_implementation("eager")
                with torch.no_grad():
                    want = model(**inputs).logits.float()
                attachment = self.attached(model)
                self.assertEqual(attachment.held.spec.kv_dtype, kv_dtype)
                with torch.no_grad():
                    got = model(**inputs).logits
                self.assertEqual(got.dtype, dtype)
                seen = inputs["attention_mask"].bool()
                torch.testing.assert_close(got.float()[seen], want[seen], atol=0.05 * want.abs().max(), rtol=0)
                self.assertEqual(text(model, inputs, 5).sequences.shape, (2, ids.shape[1] + 5))

    def test_sampling_draws_what_eager_draws(self):
        model, inputs = llama(), prompts([5, 12])
        options = {"do_sample": True, "temperature": 0.5, "top_k": 5}
        torch.manual_seed(7)
        want = eager(model, inputs, 24, **options)
        self.attached(model)
        torch.manual_seed(7)
        got = text(model, inputs, 24, **options)
        self.assertGreater((got.sequences == want.sequences).float().mean(), 0.6)  # until a draw falls between
        torch.testing.assert_close(got.logits[0], want.logits[0], atol=ROUNDING, rtol=0)

    def test_nothing_is_held_here(self):
        model, inputs = llama(), prompts([20, 7])
        self.attached(model)
        cache = text(model, inputs, 8).cache
        self.assertIsInstance(cache, ServiceCache)
        self.assertEqual(cache.get_seq_length(), 27)
        self.assertEqual([layer.keys for layer in cache.layers], [None] * 3)
        self.assertEqual(len(cache.sequences), 2)

    def test_sequences_end_with_the_cache(self):
        model, inputs = llama(), prompts([40])
        attachment = self.attached(model, capacity_tokens=256)
        for _ in range(12):  # of 48 tokens each
            sequences = text(model, inputs, 8).cache.sequences
            gc.collect()
            with self.assertRaises(tributary.errors.NotFound):
                attachment.held.truncate(sequences[0], 0)

    def test_a_prompt_larger_than_a_call(self):
        model, inputs = llama(), prompts([100, 33])
        want = eager(model, inputs, 8)
        self.attached(model, max_call_bytes=20_000, session_rows=0)
        self.assert_same_text(want, model, inputs)

    def test_a_pass_is_one_step_of_a_session(self):
        model, inputs = llama(), prompts([9, 4])
        attachment = self.attached(model, session_rows=16)
        self.assertEqual(attachment.cache()._steps.max_rows, 16)
        with mock.patch.object(attachment.held, "attend", side_effect=AssertionError("a call")):
            text(model, inputs, 6)  # the prompt's 13 tokens and each pass after it
        self.assertEqual(len(attachment._steps._idle), 1)  # the same session served them all

    def test_a_session_that_ends_costs_no_pass(self):
        model, inputs = llama(), prompts([9, 14])
        want = eager(model, inputs, 12)
        attachment = self.attached(model)
        attends = []
        whole = tributary.Session.attend

        def breaks_off(session, *tensors, **more):
            attends.append(session)
            if len(attends) in (5, 13):  # within a pass of three layers, after its first or second
                session.abandon()
            return whole(session, *tensors, **more)

        with mock.patch.object(tributary.Session, "attend", breaks_off):
            got = text(model, inputs, 12)
        self.assertEqual(len(set(map(id, attends))), 3)
        for step, (mine, theirs) in enumerate(zip(got.logits, want.logits)):
            if step and not torch.equal(got.sequences[:, 13 + step], want.sequences[:, 13 + step]):
                break
            torch.testing.assert_close(mine, theirs, atol=ROUNDING, rtol=0)
        attachment._steps._idle[0].abandon()  # while nothing uses it
        self.assertEqual(text(model, inputs, 4).sequences.shape, (2, 18))

    def test_without_generate(self):
        model, inputs = llama(), prompts([12, 12])
        model.set_attn_implementation("eager")
        with torch.no_grad():
            want = model(input_ids=inputs["input_ids"], cache=Rounding(config=model.config)).logits
        self.attached(model)
        with torch.no_grad():
            got = model(input_ids=inputs["input_ids"], use_cache=False)
        torch.testing.assert_close(got.logits, want, atol=ROUNDING, rtol=0)


class Decoding(WithService):
    def test_beams(self):
        model, inputs = llama(), prompts([5, 18])
        options = {"num_beams": 4, "num_return_sequences": 2}
        want = eager(model, inputs, 32, **options)
        attachment = self.attached(model)
        got = text(model, inputs, 32, **options)
        torch.testing.assert_close(got.sequences_scores, want.sequences_scores, atol=ROUNDING, rtol=0)
        self.assertTrue(torch.equal(got.sequences[::2], want.sequences[::2]))  # the best beam of each prompt
        self.assertEqual(len(got.cache.sequences), 8)
        self.assertEqual(len(set(got.cache.sequences)), 8)
        del got
        gc.collect()
        self.assert_nothing_left(attachment)

    def test_prompt_lookup(self):
        model, inputs = llama(initializer_range=0.1), prompts([12])  # repeats itself now and then
        inputs = {name: tensor.repeat(1, 3) for name, tensor in inputs.items()}
        want = eager(model, inputs)
        self.attached(model)
        self.assert_accepted_text(want, model, inputs, prompt_lookup_num_tokens=5)

    def test_assisted_by_another_model_that_is_attached_too(self):
        model, inputs = llama(), prompts([12])
        want = eager(model, inputs)
        assistant = copy.deepcopy(model)
        with torch.no_grad():  # near enough to be accepted now and then
            for parameter in assistant.parameters():
                parameter += 0.02 * parameter.std() * torch.randn_like(parameter) if parameter.dim() > 1 else 0
        self.attached(model)
        self.attached(assistant)
        self.assert_accepted_text(want, model, inputs, assistant_model=assistant)

    def assert_accepted_text(self, want, model, inputs, **options):
        passes = []
        hook = model.register_forward_hook(lambda *_: passes.append(1))
        self.addCleanup(hook.remove)
        got = text(model, inputs, **options)
        self.assertLess(len(passes), TOKENS)  # candidates were accepted
        length = inputs["input_ids"].shape[1]
        differ = (got.sequences != want.sequences)[0].nonzero()
        if len(differ):
            best = want.logits[int(differ[0]) - length][0].topk(2).values
            self.assertLess(best[0] - best[1], 2 * ROUNDING)
            self.assertGreater(int(differ[0]) - length, TOKENS // 4)

    def test_chunked_prefill(self):
        model, inputs = llama(), prompts([50, 31])
        want = eager(model, inputs, 16)
        self.attached(model)
        got = text(model, inputs, 16, prefill_chunk_size=16)
        torch.testing.assert_close(got.logits[0], want.logits[0], atol=ROUNDING, rtol=0)
        self.assertTrue(torch.equal(got.sequences[:, 50:54], want.sequences[:, 50:54]))

    def test_several_turns(self):
        model = llama()
        attachment = self.attached(model)
        cache, said = attachment.cache(), prompts([9])["input_ids"]
        for turn in range(3):
            more = prompts([4], seed=10 + turn)["input_ids"]
            said = torch.cat([said, more], 1)
            said = model.generate(said, cache=cache, do_sample=False, max_new_tokens=12, eos_token_id=None)
        attachment.detach()
        inputs = {"input_ids": said[:, :-12], "attention_mask": torch.ones_like(said[:, :-12])}
        want = eager(model, inputs, 12)
        self.attached(model)
        self.assert_same_text(want, model, inputs)
        step = int((said[0, -12:] != want.sequences[0, -12:]).int().argmax())
        if said[0, -12 + step] != want.sequences[0, -12 + step]:
            best = want.logits[step][0].topk(2).values
            self.assertLess(best[0] - best[1], 2 * ROUNDING)

    def test_one_prompt_gone_on_from_many_times(self):
        model, inputs = llama(), prompts([40])
        attachment = self.attached(model)
        prefix = attachment.cache()
        with torch.no_grad():
            model(input_ids=inputs["input_ids"], cache=prefix)
        for seed in (1, 2):
            ids = torch.cat([inputs["input_ids"], prompts([5], seed)["input_ids"]], 1)
            alone = text(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, 8)
            forked = text(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, 8,
                          cache=copy.deepcopy(prefix))  # fmt: skip
            torch.testing.assert_close(forked.logits[0], alone.logits[0], atol=ROUNDING, rtol=0)
        self.assertEqual(prefix.get_seq_length(), 40)

    def test_rows_are_chosen_and_repeated(self):
        model, inputs = llama(), prompts([7, 3, 10])
        attachment = self.attached(model)
        cache = attachment.cache()
        with torch.no_grad():
            model(**inputs, cache=cache)
            cache.batch_select_indices(torch.tensor([2, 0]))
            cache.batch_repeat_interleave(2)
            cache.crop(0)
            cache.crop(-2)
            self.assertEqual((cache.get_seq_length(), cache.batch_size), (8, 4))
            next_ids = torch.tensor([[5], [6], [7], [8]])
            rows = torch.tensor([2, 2, 0, 0])
            mask = torch.nn.functional.pad(inputs["attention_mask"][rows, :8], (0, 1), value=1)
            got = model(input_ids=next_ids, attention_mask=mask, cache=cache).logits
            whole = torch.cat([inputs["input_ids"][rows, :8], next_ids], 1)
            want = model(input_ids=whole, attention_mask=mask).logits[:, -1:]
        torch.testing.assert_close(got, want, atol=ROUNDING, rtol=0)
        before = attachment.held.open()
        cache.reset()
        self.assertEqual((cache.get_seq_length(), cache.batch_size), (0, -1))
        attachment.held.close(before)
        del cache
        gc.collect()
        self.assert_nothing_left(attachment)

    def test_processes_share_a_service_and_a_prefix(self):
        """Each process has a model and a client of its own; the prompt's pages are there once."""
        model, inputs = llama(), prompts([40, 33])
        attachment = self.attached(model)
        prefix = attachment.cache()
        with torch.no_grad():
            places = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)  # as `generate` counts them
            model(**inputs, position_ids=places, cache=prefix)
        ids = [with_more(inputs, seed) for seed in (1, 2, 3)]
        alone = [text(model, one, 8) for one in ids]
        self.assertEqual(attachment.cache(prefix.shared()).get_seq_length(), 40)
        with multiprocessing.get_context("spawn").Pool(3) as pool:
            others = [pool.apply_async(go_on, (self.service.target, prefix.shared(), one)) for one in ids]
            for other, want, one in zip(others, alone, ids):
                sequences, logits, held = other.get(240)
                self.assertEqual(held, attachment.held.id)
                torch.testing.assert_close(logits, want.logits[0], atol=ROUNDING, rtol=0)
                self.assertTrue(torch.equal(sequences[:, : one["input_ids"].shape[1]], one["input_ids"]))
        self.assertEqual(prefix.get_seq_length(), 40)
        with self.assertRaisesRegex(Refused, "begin with an empty one"):
            prefix.go_on_from(prefix.shared())
        with self.assertRaisesRegex(Refused, "this model's is"):
            attachment.cache(dataclasses.replace(prefix.shared(), held="another"))
        gone = prefix.shared()
        prefix.reset()
        with self.assertRaises(tributary.errors.NotFound):
            attachment.cache(gone)
        del alone, want  # which hold their caches
        gc.collect()
        self.assert_nothing_left(attachment)

    def test_two_clients_share_a_cache(self):
        model, inputs = llama(), prompts([8, 13])
        here = self.attached(model)
        other = copy.deepcopy(llama())
        with attach(other, self.service, capacity_tokens=1 << 13) as there:
            self.assertEqual(here.held.id, there.held.id)
            self.assertTrue(torch.equal(text(model, inputs, 8).sequences, text(other, inputs, 8).sequences))


def windows(*lefts):
    """Layer types of which those that are True have a window."""
    return {"layer_types": ["sliding_attention" if left else "full_attention" for left in lefts], "sliding_window": 16}


FAMILIES = {
    "Qwen2": {**windows(False, True, False), "use_sliding_window": True},
    "Qwen3": {},
    "Mistral": {"sliding_window": 16},
    "Gemma2": {**windows(True, False, True), "attn_logit_softcapping": 4.0, "query_pre_attn_scalar": 32},
    "Gemma3Text": windows(True, False, True),
    "GptOss": {**windows(True, False, True), "num_local_experts": 4, "num_experts_per_tok": 2,
               "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "Phi3": {"hidden_size": 384, "head_dim": 96},
    # A latent is kept of each token, and keys are made of it: the service holds those.
    "DeepseekV3": {"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 64,
                   "qk_rope_head_dim": 32, "v_head_dim": 64, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
                   "topk_group": 1, "first_k_dense_replace": 2, "moe_intermediate_size": 64, "head_dim": 32},
    # Layers that see a chunk alone.
    "Llama4Text": {"attention_chunk_size": 16, "no_rope_layers": [1, 0, 1], "num_local_experts": 2, "num_experts_per_tok": 1,
                   "intermediate_size_mlp": 192, "use_qk_norm": False, "interleave_moe_layer_step": 2},
    # Layers with states besides such with keys.
    "Lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 64},
    "Qwen3Next": {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_experts": 4,
                  "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
                  "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 32,
                  "linear_value_head_dim": 32},
    "Gemma4Text": {**windows(True, True, False), "head_dim": 64, "per_layer_config": {"2": {"head_dim": 128}},
                   "hidden_size_per_layer_input": 0},
    "MiniMax": {"layer_types": ["full_attention", "linear_attention", "full_attention"], "num_local_experts": 2,
                "num_experts_per_tok": 1, "block_size": 8},
    "DeepseekV2": {"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 64,
                   "qk_rope_head_dim": 32, "v_head_dim": 64, "n_routed_experts": 4, "num_experts_per_tok": 2,
                   "first_k_dense_replace": 2, "moe_intermediate_size": 64},
    "Dbrx": {"d_model": 128, "head_dim": 32, "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
             "ffn_config": {"hidden_size": 128, "ffn_hidden_size": 64, "moe_num_experts": 2, "moe_top_k": 1}},
    "Dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
              "first_k_dense_replace": 1, "max_window_layers": 2, "sliding_window": 16},
    "CohereCompassText": {**windows(True, False, True), "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("sliding_attention", "full_attention")}},
    "Emu3Text": {},
    "Qwen3_5Text": {"layer_types": ["linear_attention", "full_attention", "linear_attention"],
                    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 32,
                    "linear_value_head_dim": 32},
    "Qwen3_5MoeText": {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_experts": 4,
                       "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
                       "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 32,
                       "linear_value_head_dim": 32},
    "BigBirdPegasus": {"d_model": 128, "decoder_layers": 3, "decoder_attention_heads": 4, "decoder_ffn_dim": 192,
                       "init_std": 0.25},
    # Layers that are gone through again, with other keys each time.
    "Dory": {"n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1, "n_recurrent_loops": 3,
             **windows(True, False, True)},
}  # fmt: skip

# Encoders, which are causal where their configs say so.
ENCODERS = ("Bert", "BertGeneration", "Camembert", "Data2VecText", "Electra", "Ernie", "RoCBert", "Roberta",
            "RobertaPreLayerNorm", "XLMRoberta", "XLMRobertaXL", "Xmod")  # fmt: skip


def family(name, **more):
    torch.manual_seed(2)
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **FAMILIES.get(name, {}), **more})
    kind = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM", None)
    model = (kind or transformers.AutoModelForCausalLM.from_config)(config).eval()
    for module in model.modules():
        if hasattr(module, "sinks"):
            torch.nn.init.normal_(module.sinks, std=2.0)
    return model


class Families(WithService):
    """Each family's text beside eager's: one prompt alone, and four of different lengths."""

    def writes_the_text(self, name, config=(), cache=Rounding, kv_dtype=None, tokens=TOKENS, words=10, **found):
        model = family(name, **dict(config))
        batches = (prompts([40]), prompts([21, 3, 30, 1]))
        wanted = [(inputs, eager(model, inputs, tokens, cache=cache)) for inputs in batches]
        layers = self.attached(model, kv_dtype=kv_dtype).layers
        for index, values in enumerate(zip(*found.values())):
            self.assertEqual([getattr(layers[index], field) for field in found], list(values))
        for inputs, want in wanted:
            self.assertGreater(len(set(want.sequences[0, -tokens:].tolist())), words)
            self.assert_same_text(want, model, inputs)

    def test_qwen2(self):
        self.writes_the_text("Qwen2", window_left=[None, 15, None])

    def test_qwen3(self):
        self.writes_the_text("Qwen3", head_dim=[64, 64, 64])

    def test_mistral(self):
        self.writes_the_text("Mistral", window_left=[15, 15, 15])

    def test_gemma2(self):
        self.writes_the_text("Gemma2", window_left=[15, None, 15], soft_cap=[4.0] * 3, scale=[32**-0.5] * 3)

    def test_gemma3(self):
        self.writes_the_text("Gemma3Text", window_left=[15, None, 15])

    def test_gpt_oss(self):
        self.writes_the_text("GptOss", window_left=[15, None, 15])

    def test_phi3(self):
        self.writes_the_text("Phi3", head_dim=[96, 96, 96])

    def test_deepseek_v3(self):
        # Eager's cache holds the latent, the service what is made of it: rounded at different places, and so both finely.
        self.writes_the_text("DeepseekV3", cache=DynamicCache, kv_dtype="f16", head_dim=[96] * 3,
                             value_head_dim=[64] * 3, kv_heads=[4] * 3)  # fmt: skip

    def test_llama4(self):
        self.writes_the_text("Llama4Text", chunk=[16, None, 16])

    def test_lfm2(self):
        self.writes_the_text("Lfm2")

    def test_qwen3_next(self):
        self.writes_the_text("Qwen3Next")

    def test_gemma4(self):
        self.writes_the_text("Gemma4Text", window_left=[15, 15, None], head_dim=[64, 64, 128])

    def test_gemma4_with_layers_that_attend_over_the_keys_of_others(self):
        shared = {**windows(True, False, True, False), "num_hidden_layers": 4, "num_kv_shared_layers": 2,
                  "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": SMALL["vocab_size"]}  # fmt: skip
        self.writes_the_text("Gemma4Text", {**shared, "per_layer_config": {}}, head_dim=[64, 64])

    def test_minimax(self):
        self.writes_the_text("MiniMax", cache=RoundingMiniMax)

    def test_deepseek_v2(self):
        self.writes_the_text("DeepseekV2", cache=DynamicCache, kv_dtype="f16", head_dim=[96] * 3, value_head_dim=[64] * 3)

    def test_dbrx(self):
        self.writes_the_text("Dbrx", kv_heads=[2] * 3)

    def test_dots1(self):
        self.writes_the_text("Dots1", window_left=[None, None, 15])

    def test_cohere_compass(self):
        self.writes_the_text("CohereCompassText", window_left=[15, None, 15])

    def test_emu3(self):
        self.writes_the_text("Emu3Text", head_dim=[64] * 3)

    def test_qwen3_5(self):
        self.writes_the_text("Qwen3_5Text")
        self.writes_the_text("Qwen3_5MoeText")

    def test_bigbird_pegasus(self):
        self.writes_the_text("BigBirdPegasus", head_dim=[32] * 3)

    def test_dory(self):
        self.writes_the_text("Dory", window_left=[15, None, 15, None, None])

    def test_musicgen(self):
        """A text of four code books, each of them a row of what goes in and out."""
        for name in ("Musicgen", "MusicgenMelody"):
            with self.subTest(name):
                torch.manual_seed(2)
                config = getattr(transformers, f"{name}DecoderConfig")(**{**SMALL, "ffn_dim": 192, "num_codebooks": 4})
                model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
                ids = torch.randint(3, 250, (8, 12), generator=torch.Generator().manual_seed(1))
                model.set_attn_implementation("eager")
                want, cache = [], Rounding(config=config)
                with torch.no_grad():
                    for _ in range(24):
                        new = ids[:, cache.get_seq_length() :]
                        want.append(model(input_ids=new, cache=cache, use_cache=True).logits[:, -1])
                        ids = torch.cat([ids, want[-1].argmax(-1, keepdim=True)], 1)
                    attachment = self.attached(model)
                    cache = attachment.cache()
                    for step, logits in enumerate(want):
                        new = ids[:, cache.get_seq_length() : 12 + step]
                        got = model(input_ids=new, cache=cache, use_cache=True).logits[:, -1]
                        torch.testing.assert_close(got, logits, atol=ROUNDING, rtol=0)
                self.assertEqual(len(cache.sequences), 2)
                self.assertGreater(len(set(ids[0, 12:].tolist())), 5)

    def test_encoders_that_are_decoders(self):
        for name in ENCODERS:
            with self.subTest(name):
                more = {"default_language": "en_XX", "initializer_range": 0.5} if name == "Xmod" else {}
                with self.assertRaises(Refused) as caught:
                    attach(family(name, **more), self.client)
                self.assertIn("is_decoder", str(caught.exception))
                # They repeat themselves soon, but their logits go on changing.
                self.writes_the_text(name, {**more, "is_decoder": True}, tokens=24, words=1, q_heads=[4] * 3)


class States(WithService):
    """Layers whose states stay beside the model."""

    def test_beams_forks_and_resets(self):
        model, inputs = family("Lfm2"), prompts([9, 9])
        options = {"num_beams": 3}
        want = eager(model, inputs, 16, **options)
        attachment = self.attached(model)
        got = text(model, inputs, 16, **options)
        torch.testing.assert_close(got.sequences_scores, want.sequences_scores, atol=ROUNDING, rtol=0)
        cache, ids = attachment.cache(), inputs["input_ids"]
        with torch.no_grad():
            model(input_ids=ids, cache=cache)
            twin = copy.deepcopy(cache)
            one, other = (model(input_ids=ids[:, :1], cache=each).logits for each in (cache, twin))
            self.assertTrue(torch.equal(one, other))
            whole = model(input_ids=torch.cat([ids, ids[:, :1]], 1)).logits[:, -1:]
            torch.testing.assert_close(one, whole, atol=ROUNDING, rtol=0)
            cache.reset()
            torch.testing.assert_close(model(input_ids=ids, cache=cache).logits[:, -1:], whole * 0 +
                                       model(input_ids=ids).logits[:, -1:], atol=ROUNDING, rtol=0)

    def test_a_pass_that_failed_cannot_be_repeated(self):
        model, inputs = family("Lfm2"), prompts([5])
        attachment = self.attached(model)
        cache = attachment.cache()
        with torch.no_grad(), mock.patch.object(tributary.Session, "submit", side_effect=tributary.errors.Internal("no")):
            with self.assertRaises(tributary.errors.Internal):
                model(**inputs, cache=cache)
        with torch.no_grad(), self.assertRaises(RuntimeError):
            model(**inputs, cache=cache)
        cache.reset()
        with torch.no_grad():
            model(**inputs, cache=cache)
        with self.assertRaises(Refused):
            model.generate_batch([[3, 4, 5]])


class ChunkedLayers(WithService):
    def test_beams_forks_and_tokens_taken_back(self):
        model, inputs = family("Llama4Text"), prompts([9, 20])
        options = {"num_beams": 3}
        want = eager(model, inputs, 24, **options)
        attachment = self.attached(model)
        got = text(model, inputs, 24, **options)
        torch.testing.assert_close(got.sequences_scores, want.sequences_scores, atol=ROUNDING, rtol=0)
        del got
        ids = prompts([45])["input_ids"]
        cache = attachment.cache()
        with torch.no_grad():
            whole = model(input_ids=ids).logits
            model(input_ids=ids[:, :40], cache=cache)
            twin = copy.deepcopy(cache)
            cache.crop(-12)  # into the chunk before
            for each, begin in ((cache, 28), (twin, 40)):
                again = model(input_ids=ids[:, begin:], cache=each).logits
                torch.testing.assert_close(again, whole[:, begin:], atol=ROUNDING, rtol=0)
            with self.assertRaises(Refused):
                cache.crop(-40)
            self.assertEqual(cache.get_seq_length(), 45)
        with self.assertRaises(Refused):
            model.generate_batch([[3, 4, 5]])
        del cache, twin, each
        gc.collect()
        self.assert_nothing_left(attachment)


class Batching(WithService):
    """Transformers' continuous batching: many requests, packed, each a sequence."""

    REQUESTS = ([5, 9, 200], list(range(3, 40)), [7], [11, 12, 13, 14, 15, 16, 17], [100, 3], list(range(90, 140)))

    def batch(self, model, requests, tokens=12, config=None, **options):
        generation = transformers.GenerationConfig(
            max_new_tokens=tokens, eos_token_id=-1, **{"do_sample": False, **options})  # fmt: skip
        config = config or transformers.ContinuousBatchingConfig(max_batch_tokens=32, max_requests_per_batch=4)
        return model.generate_batch([list(r) for r in requests], generation_config=generation, progress_bar=False,
                                    continuous_batching_config=config)  # fmt: skip

    def assert_texts(self, model, results, tokens=12):
        for prompt, result in zip(self.REQUESTS, results.values(), strict=True):
            self.assertIsNone(result.error)
            self.assertEqual(result.prompt_ids, list(prompt))
            inputs = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt), dtype=torch.long)}
            want = eager(model, inputs, tokens)
            for step, (mine, theirs) in enumerate(zip(result.generated_tokens, want.sequences[0, len(prompt):].tolist())):
                if mine != theirs:
                    best = want.logits[step][0].topk(2).values
                    self.assertLess(best[0] - best[1], 2 * ROUNDING)
                    break
            self.assertEqual(len(result.generated_tokens), tokens)

    def test_each_request_gets_the_text_that_it_gets_alone(self):
        for name in ("Qwen3", "Gemma2"):
            with self.subTest(name):
                model = family(name)
                attachment = self.attached(model)
                held = attachment.held
                with mock.patch.object(held, "open", side_effect=AssertionError("sequences are opened together")):
                    results = self.batch(model, self.REQUESTS)
                attachment.detach()
                self.assert_texts(model, results)
                again = self.attached(model)
                self.assert_nothing_left(again)

    def test_several_texts_of_one_prompt_are_forks(self):
        model = llama()
        self.attached(model)
        forks = []
        whole = tributary.Cache.update

        def counts(cache, updates, **more):
            forks.extend(update for update in updates if update[0] == "fork")
            return whole(cache, updates, **more)

        with mock.patch.object(tributary.Cache, "update", counts):
            results = self.batch(model, self.REQUESTS[:2], do_sample=True, num_return_sequences=3)
        self.assertEqual(len(results), 6)
        self.assertEqual(len(forks), 4)
        self.assertEqual({len(result.generated_tokens) for result in results.values()}, {12})

    def test_more_requests_than_the_cache_has_room_for(self):
        model = llama()
        self.attached(model, capacity_tokens=256)  # two or three at a time
        results = self.batch(model, [range(3 + i, 60 + i) for i in range(6)], 24)
        self.assertEqual([result.error for result in results.values()], [None] * 6)
        self.assertEqual({len(result.generated_tokens) for result in results.values()}, {24})

    def test_a_manager_that_stays(self):
        model = llama()
        attachment = self.attached(model)
        config = transformers.ContinuousBatchingConfig(max_batch_tokens=64)
        generation = transformers.GenerationConfig(max_new_tokens=4, eos_token_id=-1, do_sample=False)
        options = {"generation_config": generation, "continuous_batching_config": config, "progress_bar": False}
        one = model.generate_batch([[5, 6, 7]], persistent_manager=True, **options)
        two = model.generate_batch([[5, 6, 7]], persistent_manager=True, **options)
        self.assertEqual([r.generated_tokens for r in one.values()], [r.generated_tokens for r in two.values()])
        attachment.detach()
        self.assertFalse(hasattr(model, "_cached_continuous_batching_manager"))


class Drafts(WithService):
    """Transformers' own DFlash: its drafts over the service's DFLASH mode."""

    BLOCK = 8

    def drafter(self):
        torch.manual_seed(4)
        config = transformers.MuseGlimmerAssistantConfig(
            hidden_size=SMALL["hidden_size"], intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=64, sliding_window=24, layer_types=["sliding_attention", "full_attention"],
            block_size=self.BLOCK, mask_token_id=4, target_layer_ids=[0, 1, 2], initializer_range=0.25,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0})  # fmt: skip
        return transformers.MuseGlimmerAssistantModel(config).eval()

    def guesses(self, model, drafter, inputs):
        """The text, and the last hidden states of every draft."""
        states = []
        hook = drafter.register_forward_hook(lambda module, args, output: states.append(output.last_hidden_state))
        got = model.generate(**inputs, assistant_model=drafter, speculation_type="dflash", do_sample=False,
                             max_new_tokens=40, eos_token_id=None)  # fmt: skip
        hook.remove()
        return got, states

    def test_drafts_are_those_of_eager_attention(self):
        model, drafter, inputs = llama(), self.drafter(), prompts([20])
        model.set_attn_implementation("eager")
        drafter.set_attn_implementation("eager")
        want, wanted = self.guesses(model, drafter, inputs)
        attachment = attach_drafter(drafter, self.client, capacity_tokens=1 << 12)
        self.addCleanup(attachment.detach, delete=True)
        self.assertEqual([layer.window_left for layer in attachment.layers.values()], [24, None])
        with mock.patch.object(attachment.held, "attend", wraps=attachment.held.attend) as attend:
            got, states = self.guesses(model, drafter, inputs)
        self.assertEqual({call.kwargs["mode"] for call in attend.call_args_list}, {"dflash"})
        self.assertTrue(torch.equal(got, want))
        self.assertEqual(len(states), len(wanted))
        for mine, theirs in zip(states, wanted):
            torch.testing.assert_close(mine, theirs, atol=ROUNDING, rtol=0)
        gc.collect()
        self.assert_nothing_left(attachment)

    def test_target_and_drafter_attached(self):
        model, drafter, inputs = llama(), self.drafter(), prompts([20])
        want = eager(model, inputs, 40)
        self.attached(model)
        with attach_drafter(drafter, self.service) as attachment:
            got, states = self.guesses(model, drafter, inputs)
            with self.assertRaises(Refused), torch.no_grad():
                drafter(noise_embeds=torch.zeros(1, self.BLOCK, 128), context_hidden_states=torch.zeros(1, 2, 384),
                        cache=DynamicCache())
            attachment.held.delete()
        self.assertGreater(len(states), 1)
        differ = (got != want.sequences)[0].nonzero()
        if len(differ):
            best = want.logits[int(differ[0]) - 20][0].topk(2).values
            self.assertLess(best[0] - best[1], 2 * ROUNDING)


class Perplexity(WithService):
    """Of text that a small model was not trained on, with weights that it was trained to (examples/tinylm)."""

    ROWS, LENGTH = 8, 160

    def test_fp8_is_within_one_percent(self):
        text_bytes = (TINYLM / "heldout.txt").read_bytes()[: self.ROWS * self.LENGTH]
        ids = torch.tensor(list(text_bytes)).view(self.ROWS, self.LENGTH)
        model = transformers.LlamaForCausalLM.from_pretrained(TINYLM / "weights", dtype=torch.float32).eval()

        def perplexity(cache):
            """Token by token, so that all but a row's own comes from the cache."""
            with torch.no_grad():
                logits = [model(input_ids=ids[:, at : at + 1], cache=cache).logits for at in range(self.LENGTH - 1)]
            return torch.nn.functional.cross_entropy(torch.cat(logits, 1).flatten(0, 1), ids[:, 1:].flatten()).exp().item()

        model.set_attn_implementation("eager")
        want = perplexity(DynamicCache(config=model.config))
        self.assertLess(want, 8)  # of 256 bytes
        for kv_dtype, most in (("fp8_e4m3", 0.01), ("fp8_e5m2", 0.03), ("bf16", 0.002)):
            with self.subTest(kv_dtype):
                with attach(model, self.client, kv_dtype=kv_dtype, capacity_tokens=1 << 12) as attachment:
                    got = perplexity(attachment.cache())
                    attachment.held.delete()
                self.assertLess(abs(got / want - 1), most)
                self.assertNotEqual(got, want)


class Masks(unittest.TestCase):
    def test_those_of_a_gpu_are_compared_there(self):
        """The same is found as of a mask in host memory, whatever is held, taken back, chosen or refused."""
        dice = random.Random(3)
        for trial in range(60):
            near, far = Columns(3), Columns(3)
            mask = torch.ones(3, 0, dtype=torch.long)
            for _ in range(12):
                columns = dice.choice([1, 1, 4])
                new = torch.tensor([[int(dice.random() < 0.9) for _ in range(columns)] for _ in range(3)])
                whole = torch.cat([mask, new], 1).to(torch.bool if trial % 2 else torch.long)
                wrong = whole.clone()
                if mask.shape[1] and dice.random() < 0.2:
                    place = dice.randrange(3), dice.randrange(mask.shape[1])
                    wrong[place] = not wrong[place]
                found = []
                for columns, fetches in ((near, False), (far, True)):
                    with mock.patch("tributary.transformers.columns._fetches", return_value=fetches):
                        try:
                            found.append(columns.new(wrong.clone(), whole.shape[1], new.shape[1], None))
                        except Refused as refused:
                            found.append(refused.reasons)
                if isinstance(found[0], list):
                    self.assertFalse(torch.equal(wrong, whole))
                    self.assertEqual(found[0], found[1])
                    continue
                self.assertEqual(*(None if each is None else each.tolist() for each in found))
                for columns in (near, far):
                    columns.add(new.shape[1], found[0])
                mask = whole.long()
                self.assertIsNotNone(far._shown)
                match dice.randrange(6):
                    case 0:
                        keep = dice.randrange(mask.shape[1] + 1)
                        self.assertEqual(near.crop(keep), far.crop(keep))
                        mask = mask[:, :keep]
                    case 1:
                        rows = [dice.randrange(3) for _ in range(3)]
                        near.select(rows), far.select(rows)
                        mask = mask[rows]
                    case 2:
                        near, far = near.copy(), far.copy()

    def test_a_mask_that_is_written_to_later(self):
        columns, mask = Columns(1), torch.ones(1, 3, dtype=torch.bool)
        with mock.patch("tributary.transformers.columns._fetches", return_value=True):
            self.assertIsNone(columns.new(mask, 3, 3, None))
            columns.add(3, None)
            mask[0, 1] = False
            with self.assertRaises(Refused):
                columns.new(torch.cat([mask, mask[:, :1]], 1), 4, 1, None)


class Fused(unittest.TestCase):
    def test_parts_without_attention_are_compiled_for_a_while(self):
        model, inputs = family("Qwen3"), prompts([9, 4])
        seen = []

        def compiled(function, **_):
            def called(*args):
                seen.append(function)
                return function(*args)

            return called

        self.assertEqual(
            collections.Counter(type(part).__name__ for part in parts(model)), {"Qwen3RMSNorm": 13, "Qwen3MLP": 3})
        module = sys.modules[type(model).__module__]
        turning = module.apply_rotary_pos_emb
        with torch.no_grad(), mock.patch.object(torch, "compile", compiled):
            want = model(**inputs).logits
            self.assertEqual(seen, [])
            with self.assertRaises(KeyError), fused(model):
                self.assertTrue(torch.equal(model(**inputs).logits, want))
                raise KeyError
            self.assertEqual(collections.Counter(each.__qualname__ for each in seen), {
                "Qwen3RMSNorm.forward": 13, "Qwen3MLP.forward": 3, "apply_rotary_pos_emb": 3})
            seen.clear()
            model(**inputs)
            self.assertEqual(seen, [])
        self.assertIs(module.apply_rotary_pos_emb, turning)

    def test_where_nothing_can_be_compiled_graphs_go_without(self):
        model = family("Qwen3")
        held = Graphs(model, {}, 3, mock.Mock(), True)
        self.addCleanup(held.close)
        graph = mock.Mock()
        with mock.patch("tributary.transformers.graphs.Graph", side_effect=[RuntimeError("no compiler"), graph]) as made:
            with self.assertWarnsRegex(UserWarning, "no part of the model is fused: no compiler"):
                self.assertIs(held._graph(2), graph)
            self.assertIs(held._graph(2), graph)
        self.assertEqual(made.call_count, 2)
        with mock.patch("tributary.transformers.graphs.Graph", side_effect=RuntimeError("no")) as made:
            with self.assertWarnsRegex(UserWarning, "a batch of 3 is not captured"):
                self.assertIsNone(held._graph(3))
        self.assertEqual(made.call_count, 1)


class Attaching(WithService):
    def test_reads_the_model(self):
        with attach(llama(num_key_value_heads=1), self.client, capacity_tokens=1 << 10) as attachment:
            self.assertEqual(list(attachment.layers), [0, 1, 2])
            layer = attachment.layers[0]
            self.assertEqual((layer.q_heads, layer.kv_heads, layer.head_dim), (4, 1, 64))
            self.assertEqual((layer.scale, layer.soft_cap, layer.window_left, layer.sinks), (0.125, 0.0, None, ()))

    def test_detached_is_as_before(self):
        model, inputs = llama(), prompts([6])
        model.set_attn_implementation("eager")
        want = model.generate(**inputs, max_new_tokens=10, do_sample=False)
        with attach(model, self.service) as attachment:
            with self.assertRaises(Refused):
                attach(model, self.client)
        attachment.detach()
        self.assertEqual(model.config._attn_implementation, "eager")
        self.assertTrue(torch.equal(model.generate(**inputs, max_new_tokens=10, do_sample=False), want))

    def test_small_heads_are_filled_up(self):
        model, inputs = llama(head_dim=24), prompts([9, 4])
        want = eager(model, inputs, 24)
        self.assertEqual(self.attached(model).held.spec.head_dim, 64)
        self.assert_same_text(want, model, inputs)

    def test_many_query_heads_share_copies(self):
        model, inputs = llama(num_attention_heads=32, num_key_value_heads=1, head_dim=16), prompts([9, 4])
        want = eager(model, inputs, 24)
        self.assertEqual(self.attached(model).held.spec.kv_heads, 2)
        self.assert_same_text(want, model, inputs)

    def test_what_is_refused_tells_why(self):
        model = llama(head_dim=512)
        model.set_attn_implementation("sdpa")
        with self.assertRaises(Refused) as caught:
            attach(model, self.client)
        self.assertEqual(len(caught.exception.reasons), 3)
        self.assertIn("layer 0: heads of 512", caught.exception.reasons[0])
        self.assertEqual(model.config._attn_implementation, "sdpa")
        model.generate(**prompts([5]), max_new_tokens=2)
        with self.assertRaises(Refused):
            attach(llama().to(torch.float64), self.client)


class Refusing(WithService):
    def setUp(self):
        self.model = llama()
        self.attachment = self.attached(self.model)

    def refuses(self, why, **call):
        with torch.no_grad(), self.assertRaises(Refused) as caught:
            self.model(**call)
        self.assertIn(why, str(caught.exception))

    def test_other_caches(self):
        self.refuses("its cache is DynamicCache", **prompts([5]), cache=DynamicCache())
        with self.assertRaises(Refused):
            self.model.generate(**prompts([5]), cache_implementation="static")

    def test_masks_of_one_s_own(self):
        self.refuses("not made by", input_ids=torch.ones(1, 4, dtype=torch.long), attention_mask=torch.ones(1, 1, 4, 4))

    def test_columns_that_are_masked_later(self):
        cache, inputs = self.attachment.cache(), prompts([6, 3])
        with torch.no_grad():
            self.model(**inputs, cache=cache)
        again = {"input_ids": torch.full((2, 1), 9), "cache": cache}
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1)
        changed = mask.clone()
        changed[0, 0] = 0
        self.refuses("masked, or no longer", **again, attention_mask=changed)
        self.refuses("padding was given before", **again)
        with torch.no_grad():
            self.model(**again, attention_mask=mask)

    def test_gradients(self):
        with self.assertRaises(Refused) as caught:
            self.model(**prompts([5]))
        self.assertIn("no gradient", str(caught.exception))

    def test_a_step_that_was_refused_can_be_repeated(self):
        model, inputs = llama(), prompts([24])
        self.attachment.detach()
        attachment = self.attached(model, capacity_tokens=256)
        ids = inputs["input_ids"]
        with torch.no_grad():
            cache = attachment.cache()
            first = model(input_ids=ids, cache=cache).logits
            other = attachment.cache()
            while True:  # other sequences take what is free
                try:
                    model(input_ids=ids[:, :16], cache=other)
                except tributary.errors.ResourceExhausted:
                    break
            length = cache.get_seq_length()
            with self.assertRaises(tributary.errors.ResourceExhausted):
                model(input_ids=ids.repeat(1, 3), cache=cache)
            self.assertEqual(cache.get_seq_length(), length)
            other.reset()
            more = model(input_ids=ids[:, :8], cache=cache).logits
            fresh = attachment.cache()
            both = model(input_ids=torch.cat([ids, ids[:, :8]], 1), cache=fresh).logits
        torch.testing.assert_close(torch.cat([first, more], 1), both, atol=ROUNDING, rtol=0)

    def test_a_pass_that_ended_half_way(self):
        class Enough(Exception):
            pass

        def stop(*_):
            raise Enough

        cache, inputs = self.attachment.cache(), prompts([6])
        hook = self.model.model.layers[1].register_forward_pre_hook(stop)
        with torch.no_grad(), self.assertRaises(Enough):
            self.model(**inputs, cache=cache)
        hook.remove()
        with torch.no_grad(), self.assertRaises(RuntimeError):
            self.model(**inputs, cache=cache)


if __name__ == "__main__":
    unittest.main(verbosity=2)
