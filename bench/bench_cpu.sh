#!/usr/bin/env bash
# `make bench-cpu`: every CPU figure of docs/benchmarks.md in one run. Usage: bench/bench_cpu.sh BUILD_DIR
# PyTorch is what the kernel is compared with; it is installed into .venv, for this benchmark only.
set -euo pipefail
build=$1

python=${PYTHON:-}
if [[ -z "$python" ]]; then
  python=.venv/bin/python
  [[ -x "$python" ]] || python3 -m venv .venv
  "$python" -c 'import torch' 2>/dev/null || .venv/bin/pip install --quiet torch numpy
fi

section() { printf '\n== %s\n' "$1"; }

section "Machine"
lscpu | grep -E '^(Model name|CPU\(s\)|L2 cache|L3 cache)'

section "Attention kernel, PyTorch and plain reads (one query row, 32/8 heads, D 128)"
"$python" bench/kernels/bench_cpu.py --binary "$build/bin/attention_cpu_bench"

section "RPC overhead: where the time of an Attend over a Unix socket goes, against the same call in process"
"$build/bin/service_rpc_overhead_bench"

section "The coordinator's work for a step, at 1K and 1M tokens"
"$build/bin/service_step_cost_bench"

section "A worker's host work for a step, at 1K and 1M tokens"
"$build/bin/worker_plan_bench"

section "Exchange and merge between CPU workers, strategy beside strategy"
"$build/bin/collective_exchange_bench"
