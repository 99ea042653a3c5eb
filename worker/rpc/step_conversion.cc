#include "worker/rpc/step_conversion.h"

#include <optional>

#include "absl/strings/str_cat.h"
#include "base/status/errors.h"
#include "worker/rpc/dtype_conversion.h"

namespace tributary::worker {

absl::StatusOr<DType> DecodeDType(v1::DType dtype, absl::string_view field) {
  const std::optional<DType> known = FromProto(dtype);
  if (known.has_value()) return *known;
  return InvalidField(field, absl::StrCat("unknown dtype ", static_cast<int>(dtype)));
}

v1::StepCommand::Kind EncodeKind(StepKind kind) {
  switch (kind) {
    case StepKind::kAppend:
      return v1::StepCommand::APPEND;
    case StepKind::kDecode:
      return v1::StepCommand::DECODE;
    case StepKind::kPrefill:
      return v1::StepCommand::PREFILL;
    case StepKind::kDflash:
      return v1::StepCommand::DFLASH;
  }
  return v1::StepCommand::KIND_UNSPECIFIED;
}

absl::StatusOr<StepKind> DecodeKind(v1::StepCommand::Kind kind) {
  switch (kind) {
    case v1::StepCommand::APPEND:
      return StepKind::kAppend;
    case v1::StepCommand::DECODE:
      return StepKind::kDecode;
    case v1::StepCommand::PREFILL:
      return StepKind::kPrefill;
    case v1::StepCommand::DFLASH:
      return StepKind::kDflash;
    default:
      return InvalidField("step.kind", absl::StrCat("unknown kind ", static_cast<int>(kind)));
  }
}

void Encode(const PageUpdate& update, v1::PageUpdate* out) {
  out->set_sequence(update.sequence);
  out->set_first_index(update.first_index);
  out->mutable_pages()->Add(update.pages.begin(), update.pages.end());
}

std::vector<PageUpdate> Decode(const google::protobuf::RepeatedPtrField<v1::PageUpdate>& updates) {
  std::vector<PageUpdate> out;
  out.reserve(updates.size());
  for (const v1::PageUpdate& update : updates) {
    out.push_back({.sequence = update.sequence(),
                   .first_index = update.first_index(),
                   .pages = {update.pages().begin(), update.pages().end()}});
  }
  return out;
}

void Encode(const std::vector<PageCopy>& copies,
            google::protobuf::RepeatedPtrField<v1::PageCopy>* out) {
  for (const PageCopy& copy : copies) {
    v1::PageCopy* message = out->Add();
    message->set_source(copy.source);
    message->set_destination(copy.destination);
  }
}

std::vector<PageCopy> Decode(const google::protobuf::RepeatedPtrField<v1::PageCopy>& copies) {
  std::vector<PageCopy> out;
  out.reserve(copies.size());
  for (const v1::PageCopy& copy : copies) {
    out.push_back({.source = copy.source(), .destination = copy.destination()});
  }
  return out;
}

void Encode(const std::vector<StepEntry>& entries,
            google::protobuf::RepeatedPtrField<v1::StepEntry>* out) {
  for (const StepEntry& entry : entries) {
    v1::StepEntry* message = out->Add();
    message->set_sequence(entry.sequence);
    message->set_first_position(entry.first_position);
    message->set_query_rows(entry.query_rows);
    message->set_new_tokens(entry.new_tokens);
    message->set_replay(entry.replay);
    message->set_more_follows(entry.more_follows);
    message->set_brings_back(entry.brings_back);
  }
}

std::vector<StepEntry> Decode(const google::protobuf::RepeatedPtrField<v1::StepEntry>& entries) {
  std::vector<StepEntry> out;
  out.reserve(entries.size());
  for (const v1::StepEntry& entry : entries) {
    out.push_back({.sequence = entry.sequence(),
                   .first_position = entry.first_position(),
                   .query_rows = entry.query_rows(),
                   .new_tokens = entry.new_tokens(),
                   .replay = entry.replay(),
                   .more_follows = entry.more_follows(),
                   .brings_back = entry.brings_back()});
  }
  return out;
}

}  // namespace tributary::worker
