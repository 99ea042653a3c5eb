// A model host of one sequence: the client side of rpc_overhead_bench, a process of its own.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/service/stages.h"

namespace tributary::service::bench {

struct ClientOptions {
  std::string target;
  std::string cache;
  std::string tensors;    // "inline", "shm" or "cuda_ipc"
  std::string way;        // "unary", "stream", or "session": one over shared memory
  int gpu = 0;            // where memory of "cuda_ipc" lies
  uint64_t sequence = 0;  // forked, with all it holds
  int32_t q_heads = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  int32_t layers = 1;  // that a step of a session has
  int calls = 0;
};

// When each call began and ended; of a session, each layer but the first of each step. First checks
// that the results are those of tensors in messages.
absl::StatusOr<std::vector<std::pair<TimePoint, TimePoint>>> RunClient(
    const ClientOptions& options);

}  // namespace tributary::service::bench
