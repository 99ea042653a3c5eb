// Messages as the bytes they came in.
//
// gRPC's generated methods parse messages themselves. Where one cannot be parsed, a stream ends as
// if its client had said all it wanted, and a unary call is UNIMPLEMENTED. So methods take bytes,
// and parse them when the caller is known.
#pragma once

#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/codegen/proto_utils.h>

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tributary::service {

// Empties `bytes`. INVALID_ARGUMENT when they are no message of the type. The message may outlive
// the call: a slow worker may hold a command that borrows from it for longer.
template <typename Message>
absl::StatusOr<std::shared_ptr<Message>> ParseMessage(grpc::ByteBuffer* bytes) {
  auto message = std::make_shared<Message>();
  if (grpc::SerializationTraits<Message>::Deserialize(bytes, message.get()).ok()) return message;
  return absl::InvalidArgumentError("the message cannot be parsed");
}

template <typename Message>
grpc::ByteBuffer SerializeMessage(const Message& message) {
  grpc::ByteBuffer bytes;
  bool own = false;
  // It fails only for messages beyond 2 GiB, which limits on messages rule out.
  if (!grpc::SerializationTraits<Message>::Serialize(message, &bytes, &own).ok()) bytes.Clear();
  return bytes;
}

}  // namespace tributary::service
