// Which backend executes a cache's attention, or why none can.
//
// A backend states what it can do; selection compares and either names a backend or lists what each
// one lacks. Nothing falls back silently: a request that no backend covers is refused.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/dtype.h"
#include "worker/cache_spec.h"

namespace tributary::worker {

enum class AttentionMode : uint8_t { kCausal, kDflash };

struct BackendCapabilities {
  std::string name;  // "cpu"
  std::vector<AttentionMode> modes;
  std::vector<int32_t> head_dims;
  std::vector<int32_t> page_sizes;
  std::vector<DType> kv_dtypes;
  int32_t max_group = 0;  // q_heads / kv_heads
  bool left_window = false;
  bool soft_cap = false;
  bool sinks = false;
};

const BackendCapabilities& CpuBackend();

// What `backend` lacks for attention of this mode over caches of this spec; empty when it lacks
// nothing. One sentence a reason.
std::vector<std::string> WhyNot(const BackendCapabilities& backend, const CacheSpec& spec,
                                AttentionMode mode);

// The first of `backends`, which come in order of preference, that lacks nothing.
// kFailedPrecondition with every backend's reasons otherwise.
absl::StatusOr<const BackendCapabilities*> SelectBackend(
    std::span<const BackendCapabilities* const> backends, const CacheSpec& spec,
    AttentionMode mode);

// Among the backends of this build.
absl::StatusOr<const BackendCapabilities*> SelectBackend(const CacheSpec& spec, AttentionMode mode);

}  // namespace tributary::worker
