#!/usr/bin/env bash
# Checks the package's types, strictly, as it is installed by run.sh.
#   run_types.sh SOURCE BUILD
# Ends with 77, which CTest calls skipped, where mypy cannot be had.
set -euo pipefail
source=$1/python build=$2
venv=$build/python-test/venv

"$venv/bin/python" -m mypy --version 2>/dev/null ||
  "$venv/bin/pip" --disable-pip-version-check -q install --retries 1 --timeout 10 mypy || {
  echo "mypy cannot be had"
  exit 77
}
cd "$build/python-test"
"$venv/bin/python" -m mypy --config-file "$source/pyproject.toml" --cache-dir mypy-cache \
  --package tributary
