#include "service/coordinator/sessions/admission.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status/errors.h"
#include "base/status/rpc_errors.h"
#include "base/status/status_macros.h"
#include "service/schedule/client_quota.h"
#include "worker/rpc/protocol.h"

namespace tributary::service {

absl::Status MailboxesAreLocal() {
  return FieldError(absl::StatusCode::kFailedPrecondition, "open.memory",
                    "a mailbox is shared with callers on this machine: use the Unix socket");
}

SessionAdmission::SessionAdmission(const CoordinatorOptions& options, const WorkerGroup& group,
                                   const MailboxHandout& mailboxes, OnRefused on_refused)
    : options_(options), group_(group), mailboxes_(mailboxes), on_refused_(std::move(on_refused)) {}

absl::Status SessionAdmission::CheckMemory(v1::SessionMemory memory, bool local) const {
  if (memory == v1::SESSION_MEMORY_MESSAGES) return absl::OkStatus();
  if (memory == v1::SESSION_MEMORY_UNSPECIFIED) return InvalidField("open.memory", "is missing");
  if (memory == v1::SESSION_MEMORY_DEVICE) {
    TRIBUTARY_RETURN_IF_ERROR(group_.CheckDeviceSessions());
    if (options_.journal != nullptr) {
      return NoDeviceSessions(
          "the coordinator may be restarted (--state_dir), and workers keep no account of the "
          "tokens that come to them through a mailbox on a GPU; HOST sessions are accounted for");
    }
  } else if (memory != v1::SESSION_MEMORY_HOST) {
    return InvalidField("open.memory", absl::StrCat("is unknown: ", memory));
  } else if (const absl::Status served = mailboxes_.socket().status(); !served.ok()) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "open.memory", served.message());
  }
  return local ? absl::OkStatus() : MailboxesAreLocal();
}

absl::Status SessionAdmission::CheckWorkers(const SessionTerms& terms) const {
  const bool timed = terms.public_terms.timed();
  if (!timed && terms.command.endpoints == 1) return absl::OkStatus();
  for (const Member& member : group_.members()) {
    if (member.protocol == 0 || member.protocol >= worker::kSharedMailboxProtocol) continue;
    return FieldError(absl::StatusCode::kFailedPrecondition,
                      timed ? "open.timed" : "open.endpoints",
                      absl::StrCat("the worker of rank ", member.rank,
                                   " is of an older build, which does not know of it"));
  }
  return absl::OkStatus();
}

absl::Status SessionAdmission::CheckClient(const std::string& client,
                                           uint64_t mailbox_bytes) const {
  const auto found = clients_.find(client);
  const Held held = found == clients_.end() ? Held{} : found->second;
  const auto refuse = [&](ClientLimit limit, int64_t has, int64_t wanted, int64_t most) {
    if (on_refused_) on_refused_(limit);
    return LimitReached(client, limit, has, wanted, most);
  };
  const ClientLimits& each = options_.client_limits;
  if (each.sessions > 0 && held.sessions >= each.sessions) {
    return refuse(ClientLimit::kSessions, held.sessions, 1, each.sessions);
  }
  const auto has = static_cast<int64_t>(held.mailbox_bytes);
  const auto wanted = static_cast<int64_t>(mailbox_bytes);
  const int64_t most = each.mailbox_bytes;
  if (most > 0 && wanted > most - std::min(most, has)) {
    return refuse(ClientLimit::kMailboxBytes, has, wanted, most);
  }
  return absl::OkStatus();
}

absl::Status SessionAdmission::Enter(const std::string& client, uint64_t mailbox_bytes) {
  const SessionLimits& limits = options_.session_limits;
  if (all_.sessions >= limits.sessions) {
    return Exhausted("sessions", absl::StrCat("all ", limits.sessions, " are open"));
  }
  if (mailbox_bytes > limits.mailbox_bytes - std::min(limits.mailbox_bytes, all_.mailbox_bytes)) {
    return Exhausted("mailboxes",
                     absl::StrCat("the session needs ", mailbox_bytes, " bytes, of ",
                                  limits.mailbox_bytes, " ", all_.mailbox_bytes, " are taken"));
  }
  TRIBUTARY_RETURN_IF_ERROR(CheckClient(client, mailbox_bytes));
  for (Held* held : {&all_, &clients_[client]}) {
    ++held->sessions;
    held->mailbox_bytes += mailbox_bytes;
  }
  return absl::OkStatus();
}

void SessionAdmission::Leave(const std::string& client, uint64_t mailbox_bytes) {
  const auto found = clients_.find(client);
  for (Held* held : {&all_, &found->second}) {
    --held->sessions;
    held->mailbox_bytes -= mailbox_bytes;
  }
  if (found->second.sessions == 0) clients_.erase(found);
}

}  // namespace tributary::service
