#include "worker/agreement.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status/status_macros.h"
#include "worker/status_conversion.h"

namespace tributary::worker {

absl::Status AgreeOnMemory(collective::Communicator& comm, const absl::Status& own,
                           collective::Deadline deadline, bool* refused) {
  const uint8_t mine = own.ok() ? 1 : 0;
  std::vector<uint8_t> all(static_cast<size_t>(comm.size()));
  TRIBUTARY_RETURN_IF_ERROR(
      CollectiveStatus(comm.AllGather(&mine, all.data(), sizeof(mine), deadline)));
  const auto without = std::find(all.begin(), all.end(), 0);
  if (without == all.end()) return absl::OkStatus();
  *refused = true;
  return absl::ResourceExhaustedError(
      absl::StrCat("rank ", without - all.begin(), " has not the memory that the step takes"));
}

}  // namespace tributary::worker
