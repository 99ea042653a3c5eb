// Memory of this process, and the request by which a service maps it.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "service/client/shared_region.h"
#include "tributary/v1/attention.pb.h"

namespace tributary::client {

struct OfferedMemory {
  std::unique_ptr<SharedRegion> memory;
  v1::RegisterSharedMemoryRequest request;  // within seconds
};

// `bytes` (> 0) of memory: a sealed memfd, handed over at the service's Unix socket `service_path`.
// Where that is empty, or nobody takes memory beside it, a POSIX object, which the service opens by
// name if it does so for anybody. RESOURCE_EXHAUSTED: the machine has not so much memory.
absl::StatusOr<OfferedMemory> OfferMemory(absl::string_view service_path, uint64_t bytes,
                                          std::chrono::steady_clock::time_point deadline);

}  // namespace tributary::client
