// A coordinator that has restarted takes the sequences of a cache over from its workers.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "service/coordinator/cache.h"
#include "worker/holdings.h"

namespace tributary::service {

struct AdoptedSequences {
  int64_t whole = 0;
  std::vector<std::pair<worker::SequenceId, std::string>> lost;  // and why
  std::vector<worker::SequenceId> absent;  // workers must be told to forget them
};

// Fills the table of a cache that has just been made. `held`: [ranks], nothing for ranks that are
// fresh; sequences that had tokens there are not marked as lost yet. When a rank has another cache
// under the same id than it should, nothing is adopted.
AdoptedSequences AdoptSequences(
    Cache& cache, const std::vector<std::optional<worker::Holdings>>& held) TRIBUTARY_LOCKED;

}  // namespace tributary::service
