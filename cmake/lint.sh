#!/usr/bin/env bash
# Checks formatting, who includes whom, shell scripts, spelling and the C++ sources, locks included.
# Usage: cmake/lint.sh
# clang-tidy reads the tree that the preset `lint` configures (build/lint).
set -euo pipefail
cd "$(dirname "$0")/.."

# An exported tree has no history, and holds no files but ours and what was built.
files=$(git -c safe.directory="$PWD" ls-files 2>/dev/null ||
  find . -type d \( -name .git -o -path ./build \) -prune -o -type f -printf '%P\n')
listed() { grep -E "$1" <<<"$files"; }

listed '\.(h|cc|cu|cuh)$' | xargs clang-format --dry-run --Werror
cmake/check_includes.py
listed '\.sh$|^\.ci/run$' | xargs shellcheck
listed '\.ya?ml$' | grep -vE '^deploy/helm/.*/templates/' | xargs yamllint --strict
listed '\.(md|h|cc|proto|py)$' | xargs codespell --quiet-level=2

# What is generated must exist before clang-tidy reads it.
cmake --preset lint
cmake --build --preset lint
# Tests are left to the compiler's warnings: the same checks there find style, not bugs. So is what this
# build leaves out, for want of CUDA, say: its headers may not be there. Most of the time goes into the
# system's headers, so a library's sources are read several at a time (TRIBUTARY_UNITY).
sed -n 's/^ *"file": "\(.*\.\(cc\|cxx\)\)",\?$/\1/p' build/lint/compile_commands.json |
  grep -v '/proto/' |
  xargs -P "$(nproc)" -n 1 clang-tidy -p build/lint --quiet
