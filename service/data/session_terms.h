// What a host asked of a session, checked and with every default filled in.
#pragma once

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"
#include "tributary/v1/session.pb.h"
#include "worker/cache_spec.h"
#include "worker/command.h"

namespace tributary::service {

struct SessionTerms {
  v1::OpenSession public_terms;        // as the API shows them
  worker::OpenSessionCommand command;  // what workers are told; the session's number is missing
};

// INVALID_ARGUMENT with the field under "open". The slots of the mailbox have room for the widest
// layer of the cache.
absl::StatusOr<SessionTerms> ResolveSessionTerms(const v1::OpenSession& asked,
                                                 const worker::CacheSpec& spec);

}  // namespace tributary::service
