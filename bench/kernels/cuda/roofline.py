#!/usr/bin/env python3
"""Draws how close attention over a paged cache comes to the speed of memory.

Takes what `attention_grid --json` wrote, one file or several (each with the read bandwidth measured
in its run), and draws, for every case, the bytes of keys and values it had to read against the rate
at which it read them. The roof is the smaller of two rates: the memory's, and that of a call that
takes no less time than --latency-us.

    bench/kernels/cuda/roofline.py grid.json field.json --out roofline.png
"""

import argparse
import json
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402 (the backend is chosen first)

TYPES = ("fp8_e4m3", "fp8_e5m2", "bf16", "f16")
MARKERS = {"decode": "o", "verify": "^", "block": "s"}


def kind_of(name):
    """What a case does, from its name: decode, verify or block."""
    for kind in ("verify", "block"):
        if kind in name:
            return kind
    return "decode"


def load(paths):
    """The cases of all files by (type, kind) as lists of (bytes, bytes per second), and the
    largest read bandwidth."""
    series = {}
    bandwidth = 0.0
    for path in paths:
        with open(path, encoding="utf-8") as file:
            run = json.load(file)
        bandwidth = max(bandwidth, run["read_bytes_per_second"])
        for case in run["cases"]:
            element = case["case"].split()[0]
            if element not in TYPES:
                continue
            point = (case["bytes"], case["bytes"] / (case["us"] * 1e-6))
            series.setdefault((element, kind_of(case["case"])), []).append(point)
    return series, bandwidth


def draw(series, bandwidth, latency_us, out):
    """Writes the plot."""
    figure, axes = plt.subplots(figsize=(8, 5), dpi=110)
    every = [x for points in series.values() for x, _ in points]
    colors = dict(zip(TYPES, plt.rcParams["axes.prop_cycle"].by_key()["color"]))
    for (element, kind), points in sorted(series.items()):
        axes.scatter(
            [x / 1e6 for x, _ in points],
            [y / 1e12 for _, y in points],
            s=18,
            marker=MARKERS[kind],
            color=colors[element],
            alpha=0.75,
            label=f"{element}, {kind}",
        )
    knee = bandwidth * latency_us * 1e-6
    roof = sorted({min(every), knee, max(every)})
    axes.plot(
        [x / 1e6 for x in roof],
        [min(bandwidth, x / (latency_us * 1e-6)) / 1e12 for x in roof],
        color="black",
        linewidth=1,
        label=f"{bandwidth / 1e12:.2f} TB/s, or {latency_us:g} us a call",
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks([10**power for power in range(-1, 6)])
    axes.set_yticks([0.1, 0.2, 0.5, 1, 2, 3, 4, 5])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    axes.set_xlim(min(every) / 1.5e6, max(every) * 1.5e-6)
    axes.set_ylim(bottom=0.1)
    axes.set_xlabel("keys and values of a call, MB")
    axes.set_ylabel("read at, TB/s")
    axes.grid(True, which="both", linewidth=0.3)
    axes.legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    figure.savefig(out)


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("json", nargs="+", help="what attention_grid --json wrote")
    parser.add_argument("--out", default="roofline.png")
    parser.add_argument("--latency-us", type=float, default=5.0, help="the least a call takes")
    arguments = parser.parse_args()
    series, bandwidth = load(arguments.json)
    if not series:
        sys.exit("no case of a known type")
    draw(series, bandwidth, arguments.latency_us, arguments.out)


if __name__ == "__main__":
    main()
