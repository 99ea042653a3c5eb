#!/usr/bin/env python3
"""Decode attention on CPUs: Tributary's kernel beside PyTorch's and beside a plain read of memory.

One query row, head dim 128, 32 query heads over 8 kv heads; and once more with 8 over 8, which has a
quarter of the arithmetic for the same memory. Every round times, one after another, each after the
same pause, and on the same number of threads: a loop that only reads the bf16 cache from one end to
the other, the kernel in bf16, the kernel in FP8 (e4m3), and
torch.nn.functional.scaled_dot_product_attention in bf16 in each of the ways it can be given grouped
heads. All are given the same normally distributed tensors, and before anything is timed their
outputs are compared. Just before each is timed its own threads read other data, so that it finds
them awake and the processor's caches without what it is about to read.

Times are medians over the rounds, PyTorch's those of its fastest way. As memory may change its speed
from one second to the next, ratios are medians of the rounds' ratios.

"In cache" is the kernel with every page of the table the same one: what it takes when nothing comes
from memory. Where that is near the time itself, arithmetic bounds the kernel and not memory.

    python bench/kernels/bench_cpu.py --binary build/cpu/bin/attention_cpu_bench

Needs PyTorch (pip install torch).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

# A thread a core, as the kernel's are (read when PyTorch is loaded).
os.environ.setdefault("OMP_PROC_BIND", "true")
os.environ.setdefault("OMP_PLACES", "cores")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

OTHER_DATA_BYTES = 256 << 20  # several times what a processor's last cache holds
PAUSE_S = 0.02  # PyTorch's threads spin for a while after their work

# Error of an output as a share of PyTorch's, in root mean square. FP8 has a mantissa of 3 bits.
TOLERANCES = {"bf16": 0.01, "fp8_e4m3": 0.1}

TARGETS = {"vs_torch": 1.5, "of_read": 0.80, "fp8_over_bf16": 1.6}


class Kernel:
    """The benchmark binary, asked for one measurement at a time."""

    def __init__(self, args, q_heads, kv_heads):
        self.process = subprocess.Popen(
            [
                args.binary,
                "--serve",
                f"--threads={args.threads}",
                f"--q-heads={q_heads}",
                f"--kv-heads={kv_heads}",
                f"--head-dim={args.head_dim}",
                f"--page-size={args.page_size}",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, *words):
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"{' '.join(map(str, words))}: the benchmark binary gave up")
        return answer

    def load(self, tensors):
        """Gives it the tensors of a sequence."""
        with tempfile.NamedTemporaryFile() as file:
            for x in (tensors.q, tensors.k, tensors.v):  # k and v token by token
                rows = x[0].transpose(0, 1).contiguous()
                file.write(rows.view(torch.int16).numpy().data)
            file.flush()
            self.ask("tensors", tensors.k.shape[2], file.name)

    def output(self, dtype):
        with tempfile.NamedTemporaryFile() as file:
            self.ask("output", dtype, file.name)
            return torch.frombuffer(bytearray(file.read()), dtype=torch.float32)

    def seconds(self, what, where="scattered"):
        return float(self.ask("time", what, where))

    def close(self):
        self.process.stdin.close()
        self.process.wait(timeout=30)


class Tensors:
    """One query row and the keys and values of a sequence, as PyTorch takes them."""

    def __init__(self, args, q_heads, kv_heads, tokens):
        def normal(heads, rows):
            return torch.randn(1, heads, rows, args.head_dim, dtype=torch.bfloat16)

        self.q = normal(q_heads, 1)
        self.k = normal(kv_heads, tokens)
        self.v = normal(kv_heads, tokens)


def torch_ways(tensors):
    """The ways to ask PyTorch for the same result, by name."""
    q, k, v = tensors.q, tensors.k, tensors.v
    kv_heads = k.shape[1]
    group = q.shape[1] // kv_heads
    # The heads of a group as rows: one query row sees every key, so no mask tells them apart.
    rows = q.view(1, kv_heads, group, q.shape[3])
    expanded = [x.repeat_interleave(group, dim=1) for x in (k, v)]
    return {
        "gqa": lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        "rows": lambda: F.scaled_dot_product_attention(rows, k, v),
        "expanded": lambda: F.scaled_dot_product_attention(q, *expanded),
    }


def compare_outputs(kernel, ways):
    """Ends the program unless every way computes the same."""
    expected = ways["rows"]().float().flatten()
    outputs = {f"PyTorch's {name}": (way().float().flatten(), "bf16") for name, way in ways.items()}
    outputs |= {f"the kernel in {dtype}": (kernel.output(dtype), dtype) for dtype in TOLERANCES}
    for name, (output, dtype) in outputs.items():
        error = ((output - expected).norm() / expected.norm()).item()
        if not error <= TOLERANCES[dtype]:
            raise SystemExit(f"{name} is off by {error:.4f} of PyTorch's output")


def timed_cold(body, other):
    other.sum()
    start = time.perf_counter()
    body()
    return time.perf_counter() - start


def median_ratio(over, under):
    return statistics.median(x / y for x, y in zip(over, under))


def measure(args, kernel, q_heads, kv_heads, tokens):
    other = torch.ones(OTHER_DATA_BYTES // 4)
    tensors = Tensors(args, q_heads, kv_heads, tokens)
    kernel.load(tensors)
    with torch.inference_mode():
        torch_names = torch_ways(tensors)
        compare_outputs(kernel, torch_names)
    ways = {
        "read": lambda: kernel.seconds("read"),
        "bf16": lambda: kernel.seconds("bf16"),
        "fp8_e4m3": lambda: kernel.seconds("fp8_e4m3"),
        "bf16_resident": lambda: kernel.seconds("bf16", "resident"),
        "fp8_e4m3_resident": lambda: kernel.seconds("fp8_e4m3", "resident"),
    }
    for name, body in torch_names.items():
        ways[name] = lambda body=body: timed_cold(body, other)
    samples = {name: [] for name in ways}

    def round_of(record):
        for name, way in ways.items():
            time.sleep(PAUSE_S)
            seconds = way()
            if record:
                samples[name].append(seconds)

    with torch.inference_mode():
        for _ in range(2):
            round_of(record=False)
        start = time.perf_counter()
        while len(samples["read"]) < args.min_rounds or time.perf_counter() - start < args.seconds:
            round_of(record=True)

    median = {name: statistics.median(values) for name, values in samples.items()}
    fastest = min(torch_names, key=lambda name: median[name])
    cache_bytes = 2 * kv_heads * tokens * args.head_dim * 2
    return {
        "tokens": tokens,
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "threads": args.threads,
        "rounds": len(samples["read"]),
        "us": {name: seconds * 1e6 for name, seconds in median.items()},
        "torch_fastest": fastest,
        "read_gb_per_s": cache_bytes / median["read"] / 1e9,
        "bf16_gb_per_s": cache_bytes / median["bf16"] / 1e9,
        "vs_torch": median_ratio(samples[fastest], samples["bf16"]),
        "of_read": median_ratio(samples["read"], samples["bf16"]),
        "fp8_over_bf16": median_ratio(samples["bf16"], samples["fp8_e4m3"]),
    }


def print_table(results):
    print(
        "| tokens | bf16 us | FP8 us | read us | PyTorch us (way) | x PyTorch | of read bandwidth "
        "| FP8 x bf16 | in cache: bf16 us | FP8 us |"
    )
    print("|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for r in results:
        us = r["us"]
        print(
            f"| {r['tokens']} | {us['bf16']:.0f} | {us['fp8_e4m3']:.0f} | {us['read']:.0f} "
            f"| {us[r['torch_fastest']]:.0f} ({r['torch_fastest']}) | {r['vs_torch']:.2f} "
            f"| {100 * r['of_read']:.0f}% | {r['fp8_over_bf16']:.2f} "
            f"| {us['bf16_resident']:.0f} | {us['fp8_e4m3_resident']:.0f} |"
        )
    print(
        f"| target | | | | | >= {TARGETS['vs_torch']:.1f} | >= {100 * TARGETS['of_read']:.0f}% "
        f"| >= {TARGETS['fp8_over_bf16']:.1f} | | |"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", default="build/cpu/bin/attention_cpu_bench")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--tokens", default="4096,8192,16384,32768,65536,131072")
    parser.add_argument("--heads", default="32/8,8/8", help="query heads / kv heads, a list")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=3.0, help="per length")
    parser.add_argument("--min-rounds", type=int, default=7)
    parser.add_argument("--json", help="also write the results to this file")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    results = []
    for q_heads, kv_heads in (map(int, heads.split("/")) for heads in args.heads.split(",")):
        kernel = Kernel(args, q_heads, kv_heads)
        table = []
        for tokens in (int(t) for t in args.tokens.split(",")):
            table.append(measure(args, kernel, q_heads, kv_heads, tokens))
            print(f"{tokens} tokens: {table[-1]['rounds']} rounds", file=sys.stderr)
        kernel.close()
        print(
            f"\n{q_heads} query heads over {kv_heads} kv heads, head dim {args.head_dim}, "
            f"{args.threads} threads, PyTorch {torch.__version__}\n"
        )
        print_table(table)
        results += table
    if args.json:
        with open(args.json, "w", encoding="utf-8") as out:
            json.dump({"torch": torch.__version__, "results": results}, out, indent=2)


if __name__ == "__main__":
    main()
