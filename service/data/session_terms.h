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

  // Of the mailboxes of all endpoints; that of one is command.layout.
  uint64_t mailbox_bytes() const {
    return static_cast<uint64_t>(command.layout.bytes) * static_cast<uint64_t>(endpoints.count);
  }
};

// INVALID_ARGUMENT with the field under "open". The slots of each endpoint's mailbox have room for
// its heads of the widest layer of the cache.
absl::StatusOr<SessionTerms> ResolveSessionTerms(const v1::OpenSession& asked,
                                                 const worker::CacheSpec& spec);

}  // namespace tributary::service
