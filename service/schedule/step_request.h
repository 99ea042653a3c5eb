// One Attend or Append call, checked as far as it can be without looking at any sequence.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "service/data/registered_region.h"
#include "service/data/resolve_spec.h"
#include "service/data/shared_memory.h"
#include "service/data/tensor.h"
#include "service/schedule/batcher.h"
#include "tributary/v1/attention.pb.h"
#include "worker/backends.h"
#include "worker/cache_spec.h"
#include "worker/command.h"

namespace tributary::service {

// A tensor of a request that lies in a registered region.
struct RegionTensor {
  RegisteredRegionPtr region;
  const char* field = "";  // the tensor's name in the request
};

struct StepRequest {
  BatchKey key;
  std::vector<worker::StepEntry> entries;
  int32_t query_rows = 0;  // sums over entries
  int32_t new_tokens = 0;
  uint64_t request_id = 0;  // an Attend's, for its reply
  std::optional<InputTensor> q;
  std::optional<InputTensor> k;
  std::optional<InputTensor> v;
  std::optional<OutputTensor> output;  // of an Attend
  std::optional<OutputTensor> lse;     // when wanted
  // By how much it counts as younger than it is, for Batcher.
  std::chrono::milliseconds yield{0};
  std::shared_ptr<const void> message;  // keeps inline bytes

  // The tensors that lie in memory of GPUs.
  absl::InlinedVector<RegionTensor, 5> RegionTensors() const;
  // Of the results that the reply's message is going to have.
  size_t reply_bytes() const {
    const auto inline_bytes = [](const std::optional<OutputTensor>& result) {
      const bool in_message =
          result.has_value() && result->region == nullptr && result->device == nullptr;
      return in_message ? result->bytes : size_t{0};
    };
    return inline_bytes(output) + inline_bytes(lse);
  }
  // INVALID_ARGUMENT naming the first input, or result, whose shared memory turned out to be cut
  // short while it was used: what was computed or written counts for nothing then.
  absl::Status CheckInputsWhole() const;
  absl::Status CheckResultsWhole() const;
  // The size that BatchLimits::max_rows limits.
  int32_t rows() const { return query_rows > new_tokens ? query_rows : new_tokens; }
};

// What the checks need to know.
struct StepContext {
  worker::CacheId cache = 0;
  const worker::CacheSpec* spec = nullptr;
  const CacheTerms* terms = nullptr;
  const worker::CacheBackends* backends = nullptr;
  const SharedMemoryRegistry* regions = nullptr;  // null: the caller may not name any
  size_t max_message_bytes = 0;
};

// INVALID_ARGUMENT naming the field, FAILED_PRECONDITION with reasons, NOT_FOUND (a region) or
// RESOURCE_EXHAUSTED (a reply larger than a message).
absl::StatusOr<StepRequest> CheckAttend(std::shared_ptr<const v1::AttendRequest> request,
                                        const StepContext& context);
absl::StatusOr<StepRequest> CheckAppend(std::shared_ptr<const v1::AppendRequest> request,
                                        const StepContext& context);

}  // namespace tributary::service
