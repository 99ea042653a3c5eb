// The seam between what all devices share and what each does its own way.
//
// Commands, page tables, checks, plans and epochs are the executor's, and the order of a step's
// operations is the wrappers'. A backend brings the memory of the pages and the operations
// (step_operations.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/backends.h"
#include "worker/cache_spec.h"
#include "worker/command.h"
#include "worker/step_operations.h"
#include "worker/step_run.h"

namespace tributary::worker {

enum class PageFill : uint8_t {
  kZero,
  // Every byte 0xff, which is a NaN in each KV dtype: a read of a slot that was never written
  // shows.
  kPoison,
};

// One rank's share of one cache.
class Shard {
 public:
  virtual ~Shard() = default;

  // Of the pages.
  virtual size_t bytes() const = 0;

  // Copies pages in order, each in all layers. The ids must exist.
  virtual absl::Status CopyPages(const std::vector<PageCopy>& copies) = 0;

  // Runs a step (RunStep) and waits for its results. An error leaves the group in need of a new
  // epoch; kDataLoss: what the shard held is gone.
  virtual absl::Status Run(const PlannedStep& step, StepResults* results) = 0;
};

// Of one rank; outlives its shards. Used from one thread at a time.
class Backend {
 public:
  virtual ~Backend() = default;

  virtual const BackendCapabilities& capabilities() const = 0;

  // Bytes that the device would still give.
  virtual size_t AvailableMemory() const = 0;

  // Takes the memory at once. kResourceExhausted, with the sizes, when it needs more than
  // `available` bytes or the device refuses. The spec is valid.
  virtual absl::StatusOr<std::unique_ptr<Shard>> CreateShard(const CacheSpec& spec,
                                                             size_t available, PageFill fill) = 0;
};

}  // namespace tributary::worker
