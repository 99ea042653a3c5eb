"""What a token costs a model of Transformers: its own attention, and a service's, in one run.

  hf_decode.py OUT.json [--device cuda] [--cases 1x4096,8x4096,...]

A Llama of 8B shape with random bfloat16 weights decodes; the service has an FP8 cache on the same GPU, filled with
random keys and values. Milliseconds per token, all rows of the batch together, median of --steps.
"""

import argparse
import gc
import json
import statistics
import time

import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import tributary
from tributary.transformers import attach
from tributary.transformers.columns import Columns
from tributary.transformers.graphs import Graph

CHUNK = 8192  # tokens of an append


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cases", default="1x4096,8x4096,1x32768,8x32768,1x131072", help="BATCHxCONTEXT each")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--q_heads", type=int, default=32)
    parser.add_argument("--kv_heads", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--eager_most", type=int, default=32768, help="the longest context of eager attention")
    return parser.parse_args()


def make_model(options):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=options.hidden, intermediate_size=options.hidden * 7 // 2, num_hidden_layers=options.layers,
        num_attention_heads=options.q_heads, num_key_value_heads=options.kv_heads, vocab_size=32000, head_dim=128,
        max_position_embeddings=262144)  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(options.device):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def synchronize(options):
    if options.device == "cuda":
        torch.cuda.synchronize()


def timed(options, one):
    """Median milliseconds of one(), which is one token, with the GPU's work in it."""
    for _ in range(3):
        one()
    times = []
    for _ in range(options.steps):
        synchronize(options)
        begin = time.perf_counter()
        one()
        synchronize(options)
        times.append(time.perf_counter() - begin)
    return 1000 * statistics.median(times)


def local(options, model, implementation, batch, context):
    model.set_attn_implementation(implementation)
    cache = DynamicCache()
    like = {"device": options.device, "dtype": torch.bfloat16}
    for layer in range(options.layers):
        keys = torch.randn(batch, options.kv_heads, context, 128, **like) * 0.1
        cache.update(keys, torch.randn_like(keys), layer)
    ids = torch.zeros(batch, 1, dtype=torch.long, device=options.device)
    return timed(options, lambda: model(input_ids=ids, cache=cache, use_cache=True))


def fill(options, held, sequences, context):
    """Each sequence gets `context` tokens in every layer."""
    keys = torch.randn(CHUNK, options.kv_heads, 128, dtype=torch.bfloat16)
    values = torch.randn_like(keys)
    for sequence in sequences:
        for layer in range(options.layers):
            for at in range(0, context, CHUNK):
                tokens = min(CHUNK, context - at)
                held.append(layer, [(sequence, at, tokens)], keys[:tokens], values[:tokens])


class Filled:
    """Sequences as after prompts; shorter contexts are what is left of longer ones."""

    def __init__(self, options, attachment):
        self.options, self.attachment = options, attachment
        self.sequences, self.length = [], 0

    def cache(self, batch, context):
        held = self.attachment.held
        if len(self.sequences) < batch or self.length < context:
            for sequence in self.sequences:
                held.close(sequence)
            self.sequences = held.update([("open",)] * batch)
            begin = time.perf_counter()
            fill(self.options, held, self.sequences, context)
            print(f"filled {batch} x {context} in {time.perf_counter() - begin:.1f} s", flush=True)
        for sequence in self.sequences[:batch]:
            held.truncate(sequence, context)
        self.length = context
        cache = self.attachment.cache()
        cache._finalizer.detach()
        cache._sequences.extend(self.sequences[:batch])
        cache._lengths = [context] * batch
        cache._columns = Columns(batch)
        cache._columns.add(context, None)
        return cache


def order(cases):
    """Such that few sequences are filled: large batches first, and long contexts first within them."""
    return sorted(cases, key=lambda case: (-case[0], -case[1]))


def in_service(options, model, client, cases, results):
    most = max(batch * (context + 4096) for batch, context in cases)
    graphs = options.device == "cuda"
    kinds = {"capacity_tokens": most, "kv_dtype": "fp8_e4m3", "session_rows": 8}
    with attach(model, client, **kinds, cuda_graphs=graphs) as attachment:
        filled = Filled(options, attachment)
        for batch, context in order(cases):
            ids = torch.zeros(batch, 1, dtype=torch.long, device=options.device)
            for name in ["service, CUDA graphs", "service"] if graphs else ["service"]:
                cache = filled.cache(batch, context)
                by_graph = model.__dict__.pop("forward", None) if name == "service" else None
                model(input_ids=ids, cache=cache, use_cache=True)  # a graph is captured, and has its workspaces
                before = allocated(options)
                took = timed(options, lambda: model(input_ids=ids, cache=cache, use_cache=True))
                grown = allocated(options) - before
                if by_graph is not None:
                    model.forward = by_graph
                note(results, name, batch, context, took, cache_bytes_on_models_gpu=grown)
        for batch in sorted({batch for batch, _ in cases}) if graphs else []:
            note(results, "CUDA graph, no attention", batch, 0, without_attention(options, attachment, batch))
        attachment.held.delete()


def allocated(options):
    return torch.cuda.memory_allocated() if options.device == "cuda" else 0


def without_attention(options, attachment, batch):
    """The model's pass as a graph whose attention is zeros: what is left is attention's share."""
    graphs = attachment._graphs
    attend = tributary.Session.attend
    tributary.Session.attend = lambda session, q, k, v: q.new_zeros(*q.shape[:2], v.shape[2])
    try:
        graph = Graph(graphs._forward, attachment.layers, options.layers, attachment._steps, batch)
    finally:
        tributary.Session.attend = attend
    ids = torch.zeros(batch, 1, dtype=torch.long, device=options.device)
    return timed(options, lambda: graph.launch(ids, ids))


def note(results, name, batch, context, took, **more):
    results.append({"attention": name, "batch": batch, "context": context, "ms_per_token": round(took, 3), **more})
    print(results[-1], flush=True)


def main():
    options = parse()
    cases = [tuple(int(n) for n in case.split("x")) for case in options.cases.split(",")]
    results = []
    with torch.inference_mode(), tributary.serve(device=options.device) as service:
        model = make_model(options)
        for implementation in ("sdpa", "eager"):
            for batch, context in cases:
                if implementation == "eager" and context > options.eager_most:
                    continue
                try:
                    note(results, implementation, batch, context, local(options, model, implementation, batch, context))
                except RuntimeError as error:
                    print(implementation, batch, context, str(error).splitlines()[0][:160], flush=True)
                gc.collect()
                if options.device == "cuda":
                    torch.cuda.empty_cache()
        with tributary.Client(service.target, shared_memory_bytes=256 << 20) as client:
            in_service(options, model, client, cases, results)
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
        with open(options.out, "w", encoding="utf-8") as out:
            json.dump({"device": device, **versions, "results": results}, out, indent=1)


if __name__ == "__main__":
    main()
