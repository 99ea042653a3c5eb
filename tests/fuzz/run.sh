#!/usr/bin/env bash
# Builds the fuzzer in BUILD and runs it for SECONDS. A finding is an error, and stays in BUILD/findings.
#   tests/fuzz/run.sh build/fuzz 600
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
build=${1:?usage: run.sh BUILD SECONDS}
seconds=${2:?usage: run.sh BUILD SECONDS}
compiler=$(command -v clang++ || command -v clang++-14 || true)
if [[ -z "$compiler" ]]; then
  echo "skipped: clang++ is not installed: deploy/install-packages.sh fuzz"
  exit 77
fi

cmake -S "$here" -B "$build" -G Ninja -DCMAKE_CXX_COMPILER="$compiler" >/dev/null
cmake --build "$build" --target request_fuzzer -j "${FUZZ_JOBS:-2}"

# What was encoded last, behind some bytes, as the fuzzer's record of a stream: its length comes first.
record() {
  local before=${1:-} bytes
  bytes=$(($(stat -c %s "$build/encoded") + ${#before} / 4))
  printf '%b' "$(printf '\\x%02x\\x%02x' $((bytes % 256)) $((bytes / 256)))$before"
  cat "$build/encoded"
}

# Seeds: the kind's byte, then the message.
mkdir -p "$build/seeds" "$build/corpus" "$build/findings"
for file in "$here"/corpus/*.textproto; do
  name=$(basename "$file" .textproto)
  case "${name%%_*}" in
    attend) kind='\x00' message=AttendRequest ;;
    append) kind='\x01' message=AppendRequest ;;
    spec) kind='\x02' message=CacheSpec ;;
    command) kind='\x03' message=CoordinatorMessage ;;
    session) kind='\x05' message=SessionRequest ;;
    worker) kind='\x08\x80\x00' message=WorkerMessage ;; # the step of one row has its LSEs, and one nothing
    holdings) kind='\x09' message=Holdings ;;
    *)
      echo "$file: of no known kind" >&2
      exit 1
      ;;
  esac
  protoc --proto_path="$here/../../proto" --encode="tributary.v1.$message" \
    tributary/v1/attention.proto tributary/v1/session.proto tributary/v1/worker.proto <"$file" >"$build/encoded"
  if [[ "$message" == Holdings ]]; then # two ranks that hold the same
    { printf '%b' "$kind"; record; record; } >"$build/seeds/$name"
  else
    { printf '%b' "$kind"; cat "$build/encoded"; } >"$build/seeds/$name"
  fi
  case "$message" in # the same message twice over one stream
    AttendRequest) { printf '\x06'; record '\x01\x02'; record '\x01\x02'; } >"$build/seeds/stream_$name" ;;
    SessionRequest) { printf '\x07'; record '\x00'; record '\x01'; } >"$build/seeds/stream_$name" ;;
  esac
done
printf '\x0400-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01' >"$build/seeds/traceparent"

"$build/request_fuzzer" -max_total_time="$seconds" -max_len=16384 -timeout=20 -rss_limit_mb=2048 \
  -artifact_prefix="$build/findings/" -print_final_stats=1 "$build/corpus" "$build/seeds"
