// Sessions on GPUs as messages (worker.proto), and back.
#pragma once

#include "absl/status/statusor.h"
#include "tributary/v1/worker.pb.h"
#include "worker/backend.h"
#include "worker/command.h"

namespace tributary::worker {

void Encode(const OpenSessionCommand& command, v1::OpenSessionCommand* out);
void Encode(const CloseSessionCommand& command, v1::CloseSessionCommand* out);
void Encode(const SessionStepCommand& command, v1::SessionStepCommand* out);
void Encode(const DeviceMailbox& mailbox, v1::CommandReply* out);
v1::SessionNews EncodeNews(const SessionNews& news);

// kInvalidArgument names the field that is unknown.
absl::StatusOr<OpenSessionCommand> Decode(const v1::OpenSessionCommand& message);
CloseSessionCommand Decode(const v1::CloseSessionCommand& message);
absl::StatusOr<SessionStepCommand> Decode(const v1::SessionStepCommand& message);
DeviceMailbox DecodeMailbox(const v1::CommandReply& message);
// News of a rank. A status that says OK counts as none.
SessionNews DecodeNews(int32_t rank, const v1::SessionNews& message);

}  // namespace tributary::worker
