#!/usr/bin/env python3
"""Decode attention on CPUs: Tributary's kernel beside PyTorch's and beside a plain read of memory.

One query row, head dim 128, 32 query heads over 8 kv heads; and once more with 8 over 8, which has a
quarter of the arithmetic for the same memory. Every round times, one after another, each after the
same pause, and on the same number of threads: the kernel in bf16, the kernel in FP8 (e4m3), a loop
that only reads the bf16 cache from one end to the other, and
torch.nn.functional.scaled_dot_product_attention in bf16 in each of the ways it can be given grouped
heads. All data is normally distributed. Medians over the rounds are compared; PyTorch counts with
its fastest way.

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
import time

import torch
import torch.nn.functional as F

PAUSE_S = 0.02  # PyTorch's threads spin for a while after their work

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

    def seconds(self, tokens, what, where="scattered"):
        self.process.stdin.write(f"{tokens} {what} {where}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait(timeout=30)


def torch_ways(args, q_heads, kv_heads, tokens):
    """The ways to ask PyTorch for the same result, by name."""
    group = q_heads // kv_heads
    q = torch.randn(1, q_heads, 1, args.head_dim, dtype=torch.bfloat16)
    k = torch.randn(1, kv_heads, tokens, args.head_dim, dtype=torch.bfloat16)
    v = torch.randn(1, kv_heads, tokens, args.head_dim, dtype=torch.bfloat16)
    # The heads of a group as rows: one query row sees every key, so no mask tells them apart.
    rows = q.view(1, kv_heads, group, args.head_dim)
    expanded = [x.repeat_interleave(group, dim=1) for x in (k, v)]
    return {
        "gqa": lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        "rows": lambda: F.scaled_dot_product_attention(rows, k, v),
        "expanded": lambda: F.scaled_dot_product_attention(q, *expanded),
    }


def timed(body):
    start = time.perf_counter()
    body()
    return time.perf_counter() - start


def measure(args, kernel, q_heads, kv_heads, tokens):
    ways = {
        "bf16": lambda: kernel.seconds(tokens, "bf16"),
        "read": lambda: kernel.seconds(tokens, "read"),
        "fp8_e4m3": lambda: kernel.seconds(tokens, "fp8_e4m3"),
        "bf16_resident": lambda: kernel.seconds(tokens, "bf16", "resident"),
        "fp8_e4m3_resident": lambda: kernel.seconds(tokens, "fp8_e4m3", "resident"),
    }
    torch_names = []
    for name, body in torch_ways(args, q_heads, kv_heads, tokens).items():
        torch_names.append(name)
        ways[name] = lambda body=body: timed(body)
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
        "vs_torch": median[fastest] / median["bf16"],
        "of_read": median["read"] / median["bf16"],
        "fp8_over_bf16": median["bf16"] / median["fp8_e4m3"],
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
