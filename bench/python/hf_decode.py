"""What a token costs a model of Transformers: its own attention, and a service's, in one run.

  hf_decode.py OUT.json [--device cuda] [--cases 1x4096,8x4096,...]

A Llama of 8B shape with random bfloat16 weights decodes; the service has an FP8 cache on the same GPU, filled with
random keys and values. Milliseconds per token, all rows of the batch together, median of --steps in each of --rounds;
eager attention and the service take turns. Of passes in CUDA graphs it also says where a token's time goes.
"""

import argparse
import cProfile
import gc
import io
import json
import pstats
import statistics
import time

import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import tributary
from tributary import StepEntry
from tributary.transformers import attach
from tributary.transformers.columns import Columns
from tributary.transformers.fused import fused
from tributary.transformers.graphs import Graph

CHUNK = 8192  # tokens of an append, in messages
DEVICE_CHUNK = 512  # and in a session's step
KV_HEADS, HEAD_DIM = 8, 128


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cases", default="1x4096,8x4096,1x32768,8x32768,1x131072", help="BATCHxCONTEXT each")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--q_heads", type=int, default=32)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--eager_most", type=int, default=32768, help="the longest context of eager attention")
    parser.add_argument("--program", help="tributary-coordinator, in a process of its own; none: in this one")
    parser.add_argument("--profile", default="", help="a file for what Python does in a pass without a graph")
    return parser.parse_args()


def make_model(options):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=options.hidden, intermediate_size=options.hidden * 7 // 2, num_hidden_layers=options.layers,
        num_attention_heads=options.q_heads, num_key_value_heads=KV_HEADS, vocab_size=32000, head_dim=HEAD_DIM,
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
    """Milliseconds of each one(), which is one token, with the GPU's work in it."""
    for _ in range(3):
        one()
    times = []
    for _ in range(options.steps):
        synchronize(options)
        begin = time.perf_counter()
        one()
        synchronize(options)
        times.append(1000 * (time.perf_counter() - begin))
    return times


def local(options, model, implementation, batch, context):
    model.set_attn_implementation(implementation)
    cache = DynamicCache()
    like = {"device": options.device, "dtype": torch.bfloat16}
    ids = torch.zeros(batch, 1, dtype=torch.long, device=options.device)
    try:
        for layer in range(options.layers):
            keys = torch.randn(batch, KV_HEADS, context, HEAD_DIM, **like) * 0.1
            cache.update(keys, torch.randn_like(keys), layer)
            del keys
        return timed(options, lambda: model(input_ids=ids, cache=cache, use_cache=True))
    except torch.cuda.OutOfMemoryError as error:
        print(implementation, batch, context, str(error).splitlines()[0][:160], flush=True)
        return []
    finally:
        del cache
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()


def fill_by_session(options, held, sequences, context):
    """Each sequence gets `context` tokens in every layer, which never leave the GPU."""
    keys = torch.randn(DEVICE_CHUNK, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=options.device)
    values = torch.randn_like(keys)
    with held.session(max_rows=1, max_new_tokens=DEVICE_CHUNK, dtype="bf16", memory="device") as session:
        for sequence in sequences:
            for at in range(0, context, DEVICE_CHUNK):
                step = session.submit([StepEntry(sequence, at, 0, DEVICE_CHUNK)], layers=options.layers, append_only=True)
                for _ in range(options.layers):
                    session.append(keys, values)
                session.wait(step)


def fill_by_messages(options, held, sequences, context):
    keys = torch.randn(CHUNK, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    values = torch.randn_like(keys)
    for sequence in sequences:
        held.truncate(sequence, 0)
        for layer in range(options.layers):
            for at in range(0, context, CHUNK):
                tokens = min(CHUNK, context - at)
                held.append(layer, [(sequence, at, tokens)], keys[:tokens], values[:tokens])


class Filled:
    """Sequences as after prompts; shorter contexts are what is left of longer ones."""

    def __init__(self, options):
        self.options = options
        self.sequences, self.length = [], 0

    def fill(self, held, batch, context):
        for sequence in self.sequences:
            held.close(sequence)
        self.sequences = held.update([("open",)] * batch)
        begin = time.perf_counter()
        try:
            if self.options.device != "cuda" or context % DEVICE_CHUNK:
                raise tributary.errors.Unimplemented("no GPU")
            fill_by_session(self.options, held, self.sequences, context)
        except tributary.TributaryError as error:
            print("filled by messages, for", error, flush=True)
            fill_by_messages(self.options, held, self.sequences, context)
        print(f"filled {batch} x {context} in {time.perf_counter() - begin:.1f} s", flush=True)

    def cache(self, attachment, batch, context):
        held = attachment.held
        if len(self.sequences) < batch or self.length < context:
            self.fill(held, batch, context)
        for sequence in self.sequences[:batch]:
            held.truncate(sequence, context)
        self.length = context
        cache = attachment.cache()
        cache._finalizer.detach()
        cache._sequences.extend(self.sequences[:batch])
        cache._lengths = [context] * batch
        cache._columns = Columns(batch)
        cache._columns.add(context, None)
        return cache


def order(cases):
    """Such that few sequences are filled: large batches first, and long contexts first within them."""
    return sorted(cases, key=lambda case: (-case[0], -case[1]))


class Results:
    """Times by what was measured: several rounds of one thing are one row."""

    def __init__(self):
        self._times, self._more = {}, {}

    def note(self, name, batch, context, times, **more):
        if not times:
            return
        print(f"{name:28} {batch} x {context:6}: {statistics.median(times):8.3f} ms", more or "", flush=True)
        self._times.setdefault((name, batch, context), []).extend(times)
        self._more.setdefault((name, batch, context), {}).update(more)

    def rows(self):
        return [
            {"attention": name, "batch": batch, "context": context, "ms_per_token": round(statistics.median(times), 3),
             "best_ms": round(min(times), 3), **self._more[name, batch, context]}
            for (name, batch, context), times in self._times.items()]  # fmt: skip


def allocated(options):
    return torch.cuda.memory_allocated() if options.device == "cuda" else 0


def graph_without_attention(options, attachment, batch, fuse):
    """The model's pass as a graph whose attention is zeros."""
    graphs = attachment._graphs
    attend = tributary.Session.attend
    tributary.Session.attend = lambda session, q, k, v: q.new_zeros(*q.shape[:2], v.shape[2])
    try:
        with torch.inference_mode(False), torch.no_grad(), fused(graphs._model) if fuse else torch.no_grad():
            graph = Graph(graphs._forward, attachment.layers, options.layers, attachment._steps, batch)
    finally:
        tributary.Session.attend = attend
    return graph


class AttentionAlone:
    """A step's layers as a graph, with nothing of a model between them."""

    def __init__(self, options, attachment, batch):
        like = {"dtype": torch.bfloat16, "device": options.device}
        self.session = attachment._steps.open(batch)
        q = torch.randn(batch, options.q_heads, HEAD_DIM, **like)
        k, v = (torch.randn(batch, KV_HEADS, HEAD_DIM, **like) for _ in range(2))
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self.outputs = [self.session.attend(q, k, v) for _ in range(options.layers)]

    def launch(self, *_):
        self._graph.replay()


def where_it_goes(options, cache, graph):
    """Medians of a token's parts, milliseconds. gpu: from the graph's first kernel to its last."""
    batch = cache.batch_size
    ids = torch.zeros(batch, 1, dtype=torch.long, device=options.device)
    parts = {"submit": [], "launch": [], "gpu": [], "until over": []}
    for _ in range(options.steps):
        torch.cuda.synchronize()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin = time.perf_counter()
        entries = [StepEntry(sequence, at, 1, 1, back) for sequence, at, back in cache.one_more(None)]
        number = graph.session.submit(entries, layers=options.layers)
        submitted = time.perf_counter()
        first.record()
        graph.launch(ids, ids)
        last.record()
        launched = time.perf_counter()
        graph.session.wait(number)
        over = time.perf_counter()
        cache.one_held()
        torch.cuda.synchronize()
        times = (submitted - begin, launched - submitted, first.elapsed_time(last) / 1000, over - begin)
        for part, taken in zip(parts.values(), times):
            part.append(1000 * taken)
    return {name: round(statistics.median(part), 3) for name, part in parts.items()}


def gpu_time(options, graph, batch):
    ids = torch.zeros(batch, 1, dtype=torch.long, device=options.device)
    times = []
    for _ in range(options.steps):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        first.record()
        graph.launch(ids, ids)
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last))
    return times


def by_graphs(options, attachment, filled, case, fuse, results):
    batch, context = case
    model, name = attachment.model, "service, CUDA graphs" + (", fused" if fuse else "")
    ids = torch.zeros(batch, 1, dtype=torch.long, device=options.device)
    cache = filled.cache(attachment, batch, context)
    begin = time.perf_counter()
    model(input_ids=ids, cache=cache, use_cache=True)  # a graph is captured, and has its workspaces
    print(f"captured in {time.perf_counter() - begin:.1f} s", flush=True)
    before = allocated(options)
    times = timed(options, lambda: model(input_ids=ids, cache=cache, use_cache=True))
    grown = allocated(options) - before
    graph = attachment._graphs._graphs[batch]
    if graph is None:
        return
    bare = graph_without_attention(options, attachment, batch, fuse)
    rest = gpu_time(options, bare, batch)
    bare.session.abandon()
    parts = where_it_goes(options, cache, graph)
    parts["gpu, no attention"] = round(statistics.median(rest), 3)
    parts["attention's share"] = round(parts["gpu"] - parts["gpu, no attention"], 3)
    if not fuse:
        alone = AttentionAlone(options, attachment, batch)
        parts["attention alone"] = where_it_goes(options, cache, alone)
        alone.session.abandon()
    results.note(name, batch, context, times, cache_bytes_on_models_gpu=grown, parts=parts)


def without_graphs(options, attachment, filled, case, results):
    batch, context = case
    ids = torch.zeros(batch, 1, dtype=torch.long, device=options.device)
    cache = filled.cache(attachment, batch, context)

    def one():
        return attachment.model(input_ids=ids, cache=cache, use_cache=True)

    one()
    before = allocated(options)
    times = timed(options, one)
    results.note("service", batch, context, times, cache_bytes_on_models_gpu=allocated(options) - before)
    if options.profile:
        profile = cProfile.Profile()
        profile.runcall(lambda: [one() for _ in range(10)])
        said = io.StringIO()
        pstats.Stats(profile, stream=said).sort_stats("tottime").print_stats(30)
        with open(options.profile, "a", encoding="utf-8") as out:
            print(case, said.getvalue(), file=out)


def measure(options, model, client, results):
    cases = [tuple(int(n) for n in case.split("x")) for case in options.cases.split(",")]
    most = max(batch * (context + 4096) for batch, context in cases)
    kinds = {"capacity_tokens": most, "kv_dtype": "fp8_e4m3", "session_rows": max(batch for batch, _ in cases)}
    filled, held = Filled(options), None
    for batch, context in order(cases):
        results.note("sdpa", batch, context, local(options, model, "sdpa", batch, context))
        for _ in range(options.rounds):
            # The largest local cache has no room beside the service's, which is created after it.
            if context <= options.eager_most and not (held and batch * context > 1 << 17):
                results.note("eager", batch, context, local(options, model, "eager", batch, context))
            with attach(model, client, **kinds) as attachment:
                held = attachment.held
                without_graphs(options, attachment, filled, (batch, context), results)
        for fuse in (False, True) if options.device == "cuda" else ():
            with attach(model, client, **kinds, cuda_graphs=True, fuse=fuse) as attachment:
                by_graphs(options, attachment, filled, (batch, context), fuse, results)
    if held is not None:
        held.delete()


def main():
    options = parse()
    results = Results()
    # The service first: an embedded one says how the driver is to be set up.
    with torch.inference_mode(), tributary.serve(device=options.device, program=options.program) as service:
        model = make_model(options)
        with tributary.Client(service.target, shared_memory_bytes=256 << 20) as client:
            try:
                measure(options, model, client, results)
            finally:
                versions = {"torch": torch.__version__, "transformers": transformers.__version__}
                device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
                with open(options.out, "w", encoding="utf-8") as out:
                    json.dump({"device": device, **versions, "results": results.rows()}, out, indent=1)


if __name__ == "__main__":
    main()
