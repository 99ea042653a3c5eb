// Parts that the commands of steps share, as messages (worker.proto) and back.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "tributary/v1/worker.pb.h"
#include "worker/command.h"

namespace tributary::worker {

// Errors name `field`.
absl::StatusOr<DType> DecodeDType(v1::DType dtype, absl::string_view field);

v1::StepCommand::Kind EncodeKind(StepKind kind);
absl::StatusOr<StepKind> DecodeKind(v1::StepCommand::Kind kind);

void Encode(const PageUpdate& update, v1::PageUpdate* out);
std::vector<PageUpdate> Decode(const google::protobuf::RepeatedPtrField<v1::PageUpdate>& updates);

void Encode(const std::vector<PageCopy>& copies,
            google::protobuf::RepeatedPtrField<v1::PageCopy>* out);
std::vector<PageCopy> Decode(const google::protobuf::RepeatedPtrField<v1::PageCopy>& copies);

void Encode(const std::vector<StepEntry>& entries,
            google::protobuf::RepeatedPtrField<v1::StepEntry>* out);
std::vector<StepEntry> Decode(const google::protobuf::RepeatedPtrField<v1::StepEntry>& entries);

}  // namespace tributary::worker
