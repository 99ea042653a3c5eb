"""What Python adds to a call and to a session's step: the same loop as call_cost_bench, which is C, in turns with it.

  call_cost.py --c build/cuda/bin/call_cost_bench [--rounds 5] [--json OUT]

One CPU worker, one layer, a sequence of 1K tokens that grows by one each time, tensors in shared memory. Costs are the
host's: CPU time of all its threads, and the clock. On a loaded machine only the former means much.
"""

import argparse
import json
import resource
import statistics
import subprocess
import time

import numpy as np

import tributary
from tributary import CacheSpec, Entry, StepEntry

HEADS, KV_HEADS, DIM, CONTEXT, TIMES = 8, 2, 128, 1024, 1000


def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measured(one):
    """Microseconds of CPU and of the clock for each of TIMES turns."""
    for at in range(50):
        one(at)
    begin, began = cpu(), time.perf_counter()
    for at in range(50, 50 + TIMES):
        one(at)
    return {"cpu_us": (cpu() - begin) / TIMES * 1e6, "wall_us": (time.perf_counter() - began) / TIMES * 1e6}


def python(target):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, heads, DIM), np.float32) for heads in (HEADS, KV_HEADS, KV_HEADS))
    out = np.empty_like(q)
    context = rng.standard_normal((CONTEXT, KV_HEADS, DIM), np.float32)
    with tributary.Client(target, shared_memory_bytes=16 << 20) as client:
        cache = client.create_cache("python", CacheSpec(1, HEADS, KV_HEADS, DIM, 1 << 14))
        results = {}
        sequence = cache.open()
        cache.append(0, [(sequence, 0, CONTEXT)], context, context)
        results["call"] = measured(lambda at: cache.attend(0, [Entry(sequence, CONTEXT + at, 1, 1)], q, k, v, out=out))
        sequence = cache.open()
        cache.append(0, [(sequence, 0, CONTEXT)], context, context)
        with cache.session(max_rows=1) as session:

            def step(at):
                number = session.submit([StepEntry(sequence, CONTEXT + at, 1, 1)], layers=1)
                session.attend(q, k, v, out=out)
                session.wait(number)

            results["step"] = measured(step)
        cache.delete()
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--c", required=True, help="path of call_cost_bench")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    rounds = []
    with tributary.serve(program="") as service:
        for _ in range(options.rounds):
            said = subprocess.run([options.c, service.target], check=True, capture_output=True, text=True).stdout
            rounds.append({"c": json.loads(said), "python": python(service.target)})
    table = []
    for kind in ("call", "step"):
        for what in ("cpu_us", "wall_us"):
            c, py = ([r[host][kind][what] for r in rounds] for host in ("c", "python"))
            more = statistics.median(b - a for a, b in zip(c, py))
            table.append({"of": kind, "what": what, "c": round(statistics.median(c), 1),
                          "python": round(statistics.median(py), 1), "more": round(more, 1)})  # fmt: skip
            print(table[-1])
    if options.json:
        with open(options.json, "w", encoding="utf-8") as out:
            json.dump(table, out, indent=1)


if __name__ == "__main__":
    main()
