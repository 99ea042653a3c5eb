"""Which of Transformers' causal language models the service can hold: all default configs, on torch's "meta" device.

census.txt beside this file says what is expected: a line for each model type, with "fits" or why not. What was found is
printed where it differs; TRIBUTARY_CENSUS=write writes the file anew.
"""

import collections
import contextlib
import copy
import gc
import os
import pathlib
import re
import sys
import time
import unittest
import warnings

import torch
import torch.fx.experimental._config
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tributary.transformers import Refused, examine

# Models that look at what they compute, which "meta" has not: smaller ones on the CPU.
LLAMA4 = {"hidden_size": 128, "intermediate_size": 64, "intermediate_size_mlp": 64, "vocab_size": 64,
          "num_hidden_layers": 4, "num_local_experts": 2, "pad_token_id": 0, "bos_token_id": 1,
          "eos_token_id": 2}  # fmt: skip
NEEDS_VALUES = {"dbrx": {"vocab_size": 64, "n_layers": 2,
                         "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 2, "moe_top_k": 1, "hidden_size": 2048}},
                "deepseek_v2": {"hidden_size": 128, "intermediate_size": 64, "moe_intermediate_size": 64, "vocab_size": 64,
                                "num_hidden_layers": 2, "n_routed_experts": 4},
                "llama4_text": LLAMA4, "llama4": {"text_config": LLAMA4},
                "jetmoe": {"hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 2, "num_local_experts": 2},
                "longcat_flash": {"hidden_size": 128, "num_layers": 1, "num_hidden_layers": 2, "ffn_hidden_size": 64,
                                  "q_lora_rank": 32, "kv_lora_rank": 32, "expert_ffn_hidden_size": 32,
                                  "n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2,
                                  "vocab_size": 64}}  # fmt: skip

# What default configs lack, without which there is no model.
LACKS = {"hunyuan_v1_dense": {"head_dim": 128}, "hunyuan_v1_moe": {"head_dim": 128}, "ministral": {"head_dim": 128},
         "nemotron": {"num_key_value_heads": 8},
         "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
         "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
         "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
         "deepseek_v2": {"num_experts_per_tok": 2}, "xmod": {"default_language": "en_XX"},
         "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
         }  # fmt: skip

EXPECTED = pathlib.Path(__file__).with_name("census.txt")


def said(reasons):
    """Reasons of all layers as one line, however many layers there are."""
    lines = (re.sub(r"layers? \[?[\d, ]+\]?", "layers", reason) for reason in reasons)
    return "; ".join(dict.fromkeys(lines))


def shorten(config):
    """Leaves the first layers, of which there are two and of each kind one. Not all configs allow it."""
    text = config.get_text_config(decoder=True)
    layers, types = getattr(text, "num_hidden_layers", 0), getattr(text, "layer_types", None)
    if not isinstance(layers, int) or hasattr(text, "n_recurrent_layers"):  # some of which are gone through again
        return
    kept = next(n for n in range(2, layers + 1) if not types or set(types[:n]) == set(types))
    with contextlib.suppress(AttributeError, NotImplementedError):
        if types is not None:
            text.layer_types = types[:kept]
        text.num_hidden_layers = kept


def config_of(model_type, name, **stated):
    """A model type's default config, as AutoModelForCausalLM takes it: of a text beside images or sounds, that of the text."""
    config = transformers.CONFIG_MAPPING[model_type](**NEEDS_VALUES.get(model_type, {}), **LACKS.get(model_type, {}))
    if getattr(transformers, name).config_class in type(config).sub_configs.values():
        config = config.get_text_config(decoder=True)
    for field, value in stated.items():
        setattr(config, field, value)
    return config


def build(model_type, name, **stated):
    config = config_of(model_type, name, **stated)
    with torch.device("cpu" if model_type in NEEDS_VALUES else "meta"):
        with contextlib.suppress(Exception):
            shorter = copy.deepcopy(config)
            shorten(shorter)
            return getattr(transformers, name)(shorter).eval()
        return getattr(transformers, name)(config).eval()


def outcome(model_type, name, **stated):
    """What `attach` would say of a model type's default config."""
    try:
        model = build(model_type, name, **stated)
    except Exception as error:  # pylint: disable=broad-except
        return f"does not build: {type(error).__name__}"
    try:
        layers = examine(model)
    except Refused as refused:
        # An encoder, which Transformers asks to be told when it is used as a causal model.
        if not stated and any("is_decoder" in reason for reason in refused.reasons):
            return outcome(model_type, name, is_decoder=True)
        return f"refused: {said(refused.reasons)}"
    shapes = {(layer.q_heads, layer.kv_heads, layer.head_dim, layer.value_head_dim) for layer in layers.values()}
    kinds = [f"{q}/{kv} heads of {dim}" + (f" and {value}" if value != dim else "")
             for q, kv, dim, value in sorted(shapes)]  # fmt: skip
    windows = ", windows" if any(layer.window_left is not None for layer in layers.values()) else ""
    windows += ", chunks" if any(layer.chunk is not None for layer in layers.values()) else ""
    sinks = ", sinks" if any(layer.sinks for layer in layers.values()) else ""
    fields = [*LACKS.get(model_type, ()), *(f"{field}={value}" for field, value in stated.items())]
    where = f", where {' and '.join(fields)} {'is' if len(fields) == 1 else 'are'} stated" if fields else ""
    return "fits: " + "; ".join(kinds) + windows + sinks + where


class Census(unittest.TestCase):
    def test_all_default_configs(self):
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity(transformers.logging.CRITICAL)
        torch.fx.experimental._config.meta_nonzero_assume_all_nonzero = True
        gc.disable()  # models are many small objects, and all of them are gone soon
        self.addCleanup(gc.enable)
        found = {}
        for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
            begin = time.process_time()
            found[model_type] = outcome(model_type, name)
            if os.environ.get("TRIBUTARY_CENSUS") == "time":
                print(f"{time.process_time() - begin:6.2f} {model_type} {found[model_type]}", flush=True)
        # Whether an optional package is there is not Transformers' affair.
        for line in EXPECTED.read_text(encoding="utf-8").splitlines() if EXPECTED.exists() else ():
            if line.endswith("does not build: ImportError"):
                found[line.split()[0]] = "does not build: ImportError"
        table = "".join(f"{model_type:24} {text}\n" for model_type, text in found.items())
        counts = collections.Counter(text.partition(":")[0] for text in found.values())
        print(dict(counts), file=sys.stderr)
        if os.environ.get("TRIBUTARY_CENSUS") == "write":
            EXPECTED.write_text(table, encoding="utf-8")
        self.maxDiff = None
        self.assertMultiLineEqual(table, EXPECTED.read_text(encoding="utf-8"))


if __name__ == "__main__":
    unittest.main(verbosity=2)
