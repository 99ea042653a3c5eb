// What hosts are told of their sessions, and callers of all of them.
#pragma once

#include <cstdint>
#include <string>

#include "service/coordinator/session.h"
#include "service/data/coordinator_lock.h"
#include "tributary/v1/attention.pb.h"
#include "tributary/v1/session.pb.h"
#include "worker/command.h"

namespace tributary::service {

// What an endpoint is told when it has its session, but for where its mailbox lies.
v1::SessionReply OpenedReply(const Session& session, int32_t endpoint = 0) TRIBUTARY_LOCKED;

// The mailbox in shared memory that is handed out for `token` at `socket`.
void AddMailbox(const Session& session, const std::string& token, const std::string& socket,
                v1::SessionOpened* opened);
// How an endpoint finds the mailbox on a GPU, and its own words there.
void AddDeviceMailbox(const Session& session, int32_t endpoint,
                      v1::SessionOpened* opened) TRIBUTARY_LOCKED;
// A worker's mailbox as the API has it.
v1::DeviceMailbox PublicMailbox(const worker::DeviceMailbox& mailbox);

// A step has been accepted.
v1::SessionReply AcceptedReply(const SessionStep& step) TRIBUTARY_LOCKED;

// An open session as topology shows it.
v1::SessionInfo InfoOf(const Session& session,
                       CoordinatorLock::Clock::time_point now) TRIBUTARY_LOCKED;

}  // namespace tributary::service
