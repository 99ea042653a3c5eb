#!/usr/bin/env bash
# Checks formatting, shell scripts, spelling and the C++ sources. Usage: cmake/lint.sh BUILD_DIR
set -euo pipefail
build=$1

sources=$(git ls-files '*.h' '*.cc' '*.cu' '*.cuh')
# shellcheck disable=SC2086
clang-format --dry-run --Werror $sources
git ls-files '*.sh' .ci/run | xargs shellcheck
git ls-files '*.yaml' '*.yml' ':!deploy/helm/**/templates/*' | xargs -r yamllint --strict
git ls-files '*.md' '*.h' '*.cc' '*.proto' '*.py' ':!examples/tinylm/*.txt' | xargs codespell --quiet-level=2

# Generated headers must exist before clang-tidy reads the sources that include them.
cmake --build "$build" --target tributary_proto
# Tests are left to the compiler's warnings: the same checks there find style, not bugs. So is what this
# build leaves out, for want of CUDA, say: its headers may not be there.
git ls-files 'kernels/*.cc' 'collective/*.cc' 'worker/*.cc' 'service/*.cc' 'examples/*.cc' |
  while read -r source; do
    if grep -qF "\"$PWD/$source\"" "$build/compile_commands.json"; then echo "$source"; fi
  done |
  xargs -P "$(nproc)" -n 4 clang-tidy -p "$build" --quiet
