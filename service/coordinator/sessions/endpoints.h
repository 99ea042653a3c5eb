// The processes of a host that share one session: who may join, and how all of them are told.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "service/coordinator/session.h"
#include "service/data/coordinator_lock.h"
#include "tributary/v1/session.pb.h"

namespace tributary::service {

// From now on endpoints may join that show the secret. A session of one endpoint has none.
void ExpectEndpoints(Session& session, std::string secret,
                     v1::SessionOpened* opened) TRIBUTARY_LOCKED;

// Whether `shown` is the secret, in a time that does not tell how much of it is.
bool IsSecret(absl::string_view secret, absl::string_view shown);

// Adds a message to the outboxes of all endpoints.
void AddToOutboxes(Session& session, v1::SessionReply reply) TRIBUTARY_LOCKED;
// Adds the last message to them.
void EndOutboxes(Session& session, const absl::Status& why) TRIBUTARY_LOCKED;
// Sends what the outboxes of all endpoints hold; called without the lock.
std::function<void()> DrainOf(const SessionPtr& session) TRIBUTARY_LOCKED;

// Why a session with several endpoints is over when the stream of one of them has ended.
absl::Status EndpointLeft(int32_t endpoint);

}  // namespace tributary::service
