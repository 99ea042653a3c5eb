// Which sessions may be opened: for what memory, on which workers, and how many.
#pragma once

#include <cstdint>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "service/coordinator/coordinator_options.h"
#include "service/data/coordinator_lock.h"
#include "service/data/mailbox_handout.h"
#include "service/data/session_terms.h"
#include "service/observe/observer.h"
#include "service/workers/worker_group.h"
#include "tributary/v1/session.pb.h"

namespace tributary::service {

// FAILED_PRECONDITION: the caller is on another machine than its mailbox would be.
absl::Status MailboxesAreLocal();

class SessionAdmission {
 public:
  // All of them outlive this.
  SessionAdmission(const CoordinatorOptions& options, const WorkerGroup& group,
                   const MailboxHandout& mailboxes, OnRefused on_refused);

  // OK when the group and the caller can share such memory. `local`: the caller is on this machine.
  absl::Status CheckMemory(v1::SessionMemory memory, bool local) const;
  // FAILED_PRECONDITION when a worker is of a build that does not know what the session asks for.
  absl::Status CheckWorkers(const SessionTerms& terms) const;

  // Counts one session more of a client, whose mailboxes take so many bytes. RESOURCE_EXHAUSTED
  // when that is too many, for the service or for the client; nothing is counted then.
  absl::Status Enter(const std::string& client, uint64_t mailbox_bytes) TRIBUTARY_LOCKED;
  // A session that was counted has ended.
  void Leave(const std::string& client, uint64_t mailbox_bytes) TRIBUTARY_LOCKED;

 private:
  struct Held {
    int64_t sessions = 0;
    uint64_t mailbox_bytes = 0;
  };

  absl::Status CheckClient(const std::string& client,
                           uint64_t mailbox_bytes) const TRIBUTARY_LOCKED;

  const CoordinatorOptions& options_;
  const WorkerGroup& group_;
  const MailboxHandout& mailboxes_;
  const OnRefused on_refused_;

  Held all_ TRIBUTARY_GUARDED_BY(kCoordinatorLock);
  // By client; none is empty.
  absl::flat_hash_map<std::string, Held> clients_ TRIBUTARY_GUARDED_BY(kCoordinatorLock);
};

}  // namespace tributary::service
