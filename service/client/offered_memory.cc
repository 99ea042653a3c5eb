#include "service/client/offered_memory.h"

#include <string>
#include <utility>

#include "base/status/status_macros.h"
#include "service/client/hand_over.h"

namespace tributary::client {

absl::StatusOr<OfferedMemory> OfferMemory(absl::string_view service_path, uint64_t bytes,
                                          std::chrono::steady_clock::time_point deadline) {
  OfferedMemory offered;
  absl::StatusOr<std::string> secret = absl::UnavailableError("no Unix socket");
  if (!service_path.empty()) {
    TRIBUTARY_ASSIGN_OR_RETURN(offered.memory, SharedRegion::CreateSealed(bytes));
    secret = HandOver(service_path, offered.memory->descriptor(), deadline);
  }
  if (secret.ok()) {
    offered.request.mutable_memfd()->set_secret(*std::move(secret));
  } else {
    // This process does not see the companion socket.
    TRIBUTARY_ASSIGN_OR_RETURN(offered.memory, SharedRegion::Create(bytes));
    offered.request.mutable_system()->set_key(offered.memory->key());
  }
  offered.request.set_name(offered.memory->name());
  offered.request.set_byte_size(offered.memory->size());
  return offered;
}

}  // namespace tributary::client
