#!/usr/bin/env bash
# Runs the tests of tributary.transformers with the package that run.sh installed, and torch and Transformers from PyPI.
#   run_transformers.sh SOURCE BUILD
# Ends with 77, which CTest calls skipped, where these cannot be had.
set -euo pipefail
source=$1/python/tests build=$2
python=$build/python-test/venv/bin/python
packages=$build/transformers-packages
requirements=$source/transformers-requirements.txt

"$python" -c 'import tributary' || {
  echo "python_client_test did not install the package"
  exit 77
}
if ! cmp -s "$requirements" "$packages/requirements.txt"; then
  rm -rf "$packages"
  "$python" -m pip --disable-pip-version-check -q install --retries 1 --timeout 20 --no-deps --no-compile \
    --target "$packages" -r "$requirements" || {
    echo "torch and Transformers cannot be had"
    exit 77
  }
  "$python" "$source/cuda_stand_ins.py" "$packages"
  cp "$requirements" "$packages/requirements.txt"
fi
# Nothing of the tree may be needed, and nothing of the network.
cd "$build/python-test"
export HF_HUB_OFFLINE=1 TRIBUTARY_COORDINATOR=$build/bin/tributary-coordinator
# One process for all, which imports torch and Transformers once.
PYTHONPATH=$packages:$source "$python" -B -m unittest -v test_torch test_cuda test_transformers test_census
