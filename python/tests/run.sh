#!/usr/bin/env bash
# Installs the package into an environment of its own, against what this build installs, and runs its tests there.
#   run.sh SOURCE BUILD
# Ends with 77, which CTest calls skipped, where numpy or what builds the wheel cannot be had.
set -euo pipefail
source=$1 build=$2
python=/usr/bin/python3
work=$build/python-test

"$python" -c 'import numpy, venv' || {
  echo "numpy or venv is missing: deploy/install-packages.sh python"
  exit 77
}
rm -rf "$work"
cmake --install "$build" --prefix "$work/prefix" --component development >/dev/null
"$python" -m venv --system-site-packages "$work/venv"
pip=("$work/venv/bin/pip" --disable-pip-version-check -q install --retries 1 --timeout 10)
mapfile -t requires < <("$python" -c '
import sys, tomllib
print(*tomllib.load(open(sys.argv[1], "rb"))["build-system"]["requires"], sep="\n")' "$source/python/pyproject.toml")
"${pip[@]}" "${requires[@]}" || {
  echo "what builds the wheel cannot be had: ${requires[*]}"
  exit 77
}
PATH=$work/venv/bin:$PATH CMAKE_PREFIX_PATH=$work/prefix "${pip[@]}" --no-build-isolation --no-index "$source/python"
# For bfloat16 in numpy; its tests are skipped without.
"${pip[@]}" --no-deps ml_dtypes==0.5.4 || echo "ml_dtypes cannot be had"
# Nothing of the tree may be needed.
cd "$work"
TRIBUTARY_COORDINATOR=$build/bin/tributary-coordinator "$work/venv/bin/python" -B "$source/python/tests/test_client.py"
