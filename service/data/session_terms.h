// What a host asked of a session, checked and with every default filled in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "service/data/endpoints.h"
#include "tributary/v1/session.pb.h"
#include "worker/cache_spec.h"
#include "worker/command.h"

namespace tributary::service {

struct SessionTerms {
  v1::OpenSession public_terms;        // as the API shows them
  worker::OpenSessionCommand command;  // what workers are told; the session's number is missing
  Endpoints endpoints;

  // Whether all endpoints have one mailbox, with command.layout, in which each has control words of
  // its own. Elsewhere each has a mailbox with that layout.
  bool shares_mailbox() const { return public_terms.memory() == v1::SESSION_MEMORY_DEVICE; }
  // Of all mailboxes.
  uint64_t mailbox_bytes() const {
    const int32_t mailboxes = shares_mailbox() ? 1 : endpoints.count;
    return static_cast<uint64_t>(command.layout.bytes) * static_cast<uint64_t>(mailboxes);
  }
};

// At least so many step commands of a session on a GPU are with the workers at a time, as far as
// there are any: while one is computed the next ones are on their way.
inline constexpr int32_t kCommandsAhead = 4;

// INVALID_ARGUMENT with the field under "open". Slots have room for the heads of the widest layer
// of the cache.
absl::StatusOr<SessionTerms> ResolveSessionTerms(const v1::OpenSession& asked,
                                                 const worker::CacheSpec& spec);

}  // namespace tributary::service
