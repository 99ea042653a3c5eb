// Commands and replies as messages (worker.proto), and back. What is decoded equals what was
// encoded, bit for bit.
#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <chrono>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "google/rpc/status.pb.h"
#include "tributary/v1/worker.pb.h"
#include "worker/command.h"

namespace tributary::worker {

using TimePoint = std::chrono::steady_clock::time_point;

// The serialised CoordinatorMessage of a command. Large tensors are not copied: the buffer refers
// to them and keeps the command alive until the last copy of the buffer is gone. So one buffer
// serves all ranks.
// `settled`: see Command::settled; the command's own is not looked at.
grpc::ByteBuffer EncodeCommand(std::shared_ptr<const Command> command, TimePoint now,
                               uint64_t settled = 0);

// The tensors move into Command::owner. kInvalidArgument names the field that is missing or
// unknown; shapes are the executor's to check.
absl::StatusOr<Command> DecodeCommand(v1::CoordinatorMessage message, TimePoint now);

// A cache's geometry, as workers are told it.
void EncodeSpec(const CacheSpec& spec, v1::CreateCacheCommand* out);
absl::StatusOr<CacheSpec> DecodeSpec(const v1::CreateCacheCommand& spec);

v1::WorkerMessage EncodeReply(const Reply& reply);

// The most bytes that rank 0's reply to a command takes when it is encoded, without its conflicts.
size_t MostReplyBytes(const Command& command);
absl::StatusOr<Reply> DecodeReply(uint64_t epoch, v1::CommandReply message);

// Statuses travel with their payloads, so the field that an error names arrives, too.
google::rpc::Status EncodeStatus(const absl::Status& status);
absl::Status DecodeStatus(const google::rpc::Status& message);

grpc::ByteBuffer EncodeMessage(const google::protobuf::Message& message);
// False when the bytes are not such a message.
bool DecodeMessage(const grpc::ByteBuffer& buffer, google::protobuf::Message* message);

}  // namespace tributary::worker
