#include "base/status/rpc_errors.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/types/span.h"
#include "base/status/errors.h"
#include "google/rpc/error_details.pb.h"

namespace tributary {
namespace {

constexpr char kTypePrefix[] = "type.googleapis.com/";
constexpr char kWrongResult[] = "WRONG_RESULT";

template <typename Detail>
void Attach(const Detail& detail, absl::Status* status) {
  status->SetPayload(absl::StrCat(kTypePrefix, detail.GetDescriptor()->full_name()),
                     absl::Cord(detail.SerializeAsString()));
}

// The first detail of the type, whatever the prefix of its URL.
template <typename Detail>
std::optional<Detail> FindDetail(const absl::Status& status) {
  const std::string suffix = absl::StrCat("/", Detail::descriptor()->full_name());
  std::optional<Detail> found;
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& bytes) {
    if (found.has_value() || !absl::EndsWith(url, suffix)) return;
    Detail detail;
    if (detail.ParseFromString(std::string(bytes))) found = std::move(detail);
  });
  return found;
}

void AttachReason(absl::string_view reason, const std::map<std::string, std::string>& metadata,
                  absl::Status* status) {
  google::rpc::ErrorInfo info;
  info.set_reason(std::string(reason));
  info.set_domain(kErrorDomain);
  for (const auto& [key, value] : metadata) (*info.mutable_metadata())[key] = value;
  Attach(info, status);
}

void AttachRetry(std::chrono::milliseconds delay, absl::Status* status) {
  google::rpc::RetryInfo retry;
  retry.mutable_retry_delay()->set_seconds(delay.count() / 1000);
  retry.mutable_retry_delay()->set_nanos(static_cast<int32_t>(delay.count() % 1000 * 1'000'000));
  Attach(retry, status);
}

void AttachQuota(absl::string_view subject, absl::string_view description, absl::Status* status) {
  google::rpc::QuotaFailure quota;
  auto* violation = quota.add_violations();
  violation->set_subject(std::string(subject));
  violation->set_description(std::string(description));
  Attach(quota, status);
}

}  // namespace

std::string EntryField(int index, absl::string_view field) {
  return absl::StrCat("entries[", index, "].", field);
}

absl::Status NotFound(absl::string_view what, absl::string_view name, absl::string_view field) {
  absl::Status status =
      FieldError(absl::StatusCode::kNotFound, field, absl::StrCat("no ", what, " '", name, "'"));
  AttachReason("NOT_FOUND", {{"resource", std::string(what)}, {"name", std::string(name)}},
               &status);
  return status;
}

absl::Status BeyondEnd(absl::string_view field, int64_t position, int64_t length) {
  absl::Status status =
      FieldError(absl::StatusCode::kOutOfRange, field,
                 absl::StrCat("position ", position, " is beyond the ", length, " tokens held"));
  AttachReason("BEYOND_END", {{"length", absl::StrCat(length)}}, &status);
  return status;
}

absl::Status GivenUp(absl::string_view field, int64_t position, int64_t first_possible) {
  absl::Status status =
      FieldError(absl::StatusCode::kOutOfRange, field,
                 absl::StrCat("rows at ", position, " would see tokens that were given up; ",
                              first_possible, " is the first position possible"));
  AttachReason("GIVEN_UP", {{"first_position", absl::StrCat(first_possible)}}, &status);
  return status;
}

absl::Status Conflict(absl::string_view field, absl::string_view message) {
  absl::Status status = FieldError(absl::StatusCode::kAlreadyExists, field, message);
  AttachReason("CONFLICT", {}, &status);
  return status;
}

absl::Status Exhausted(absl::string_view subject, absl::string_view message) {
  absl::Status status = absl::ResourceExhaustedError(absl::StrCat(subject, ": ", message));
  AttachQuota(subject, message, &status);
  return status;
}

absl::Status Unsupported(absl::string_view subject, const std::vector<std::string>& reasons) {
  absl::Status status = absl::FailedPreconditionError(
      absl::StrCat(subject, " is not supported: ", absl::StrJoin(reasons, "; ")));
  google::rpc::PreconditionFailure failure;
  for (const std::string& reason : reasons) {
    auto* violation = failure.add_violations();
    violation->set_type("UNSUPPORTED");
    violation->set_subject(std::string(subject));
    violation->set_description(reason);
  }
  Attach(failure, &status);
  return status;
}

namespace {

absl::Status LostStatus(const std::vector<uint64_t>& sequences, absl::string_view field,
                        absl::string_view advice, std::map<std::string, std::string> metadata) {
  // Details travel in a trailer, which has room for a few kilobytes.
  constexpr size_t kMostNamed = 100;
  const auto named = absl::MakeConstSpan(sequences).first(std::min(kMostNamed, sequences.size()));
  const std::string others =
      sequences.size() > 1 ? absl::StrCat(" and ", sequences.size() - 1, " more of the call") : "";
  absl::Status status = FieldError(
      absl::StatusCode::kDataLoss, field,
      absl::StrCat("sequence ", sequences.front(), others,
                   " lost tokens, with a worker or with the step that forked it; ", advice));
  metadata["sequence"] = absl::StrCat(sequences.front());
  metadata["sequences"] = absl::StrJoin(named, ",");
  metadata["count"] = absl::StrCat(sequences.size());
  AttachReason("SHARD_LOST", metadata, &status);
  return status;
}

}  // namespace

absl::Status Lost(const std::vector<uint64_t>& sequences, absl::string_view field) {
  return LostStatus(sequences, field, "open it again", {});
}

absl::Status Lost(const std::vector<uint64_t>& sequences, absl::string_view field,
                  const MissingTokens& missing) {
  const auto name = [](std::string* out, const PositionRange& range) {
    absl::StrAppend(out, range.begin, "-", range.end - 1);
  };
  return LostStatus(sequences, field, "append those that are missing, in order, or open it again",
                    {{"missing", absl::StrJoin(missing.ranges, ",", name)},
                     {"missing_tokens", absl::StrCat(missing.tokens)},
                     {"layer", absl::StrCat(missing.layer)}});
}

absl::Status Unavailable(absl::string_view reason, absl::string_view message,
                         std::chrono::milliseconds retry_delay) {
  absl::Status status = absl::UnavailableError(message);
  AttachReason(reason, {}, &status);
  AttachRetry(retry_delay, &status);
  return status;
}

absl::Status StepAborted(absl::string_view why, std::chrono::milliseconds retry_delay) {
  absl::Status status =
      absl::AbortedError(absl::StrCat("the step did not complete and may be repeated: ", why));
  AttachReason("STEP_ABORTED", {}, &status);
  AttachRetry(retry_delay, &status);
  return status;
}

absl::Status WrongResult(absl::string_view message) {
  absl::Status status = absl::InternalError(message);
  AttachReason(kWrongResult, {}, &status);
  return status;
}

absl::Status FromOutcome(const absl::Status& outcome, std::chrono::milliseconds retry_delay) {
  switch (outcome.code()) {
    case absl::StatusCode::kOk:
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kUnimplemented:
      return outcome;
    case absl::StatusCode::kResourceExhausted: {
      if (FindDetail<google::rpc::QuotaFailure>(outcome).has_value()) return outcome;
      absl::Status detailed = outcome;
      AttachQuota(kWorkerMemory, outcome.message(), &detailed);
      return detailed;
    }
    default: {
      // A repetition would be answered as wrongly.
      const auto info = FindDetail<google::rpc::ErrorInfo>(outcome);
      if (info.has_value() && info->reason() == kWrongResult) return outcome;
      return StepAborted(outcome.message(), retry_delay);
    }
  }
}

google::rpc::Status ToRpcStatus(const absl::Status& status) {
  google::rpc::Status rpc;
  rpc.set_code(static_cast<int>(status.code()));
  rpc.set_message(std::string(status.message()));
  const std::string field = FieldOf(status);
  if (!field.empty()) {
    google::rpc::BadRequest bad;
    auto* violation = bad.add_field_violations();
    violation->set_field(field);
    violation->set_description(std::string(status.message()));
    rpc.add_details()->PackFrom(bad);
  }
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) {
    if (!absl::StartsWith(url, kTypePrefix)) return;
    auto* detail = rpc.add_details();
    detail->set_type_url(std::string(url));
    detail->set_value(std::string(payload));
  });
  return rpc;
}

absl::Status FromRpcStatus(const google::rpc::Status& rpc) {
  absl::Status status(static_cast<absl::StatusCode>(rpc.code()), rpc.message());
  for (const auto& detail : rpc.details()) {
    google::rpc::BadRequest bad;
    if (detail.UnpackTo(&bad)) {
      if (bad.field_violations_size() == 0) continue;
      status.SetPayload(kFieldPayloadUrl, absl::Cord(bad.field_violations(0).field()));
    } else {
      status.SetPayload(detail.type_url(), absl::Cord(detail.value()));
    }
  }
  return status;
}

std::string StatusText(const absl::Status& status) {
  std::vector<std::string> details;
  const std::string field = FieldOf(status);
  if (!field.empty() && !absl::StrContains(status.message(), field)) {
    details.push_back(absl::StrCat("field ", field));
  }
  if (const auto info = FindDetail<google::rpc::ErrorInfo>(status); info.has_value()) {
    std::string reason = absl::StrCat("reason ", absl::CHexEscape(info->reason()));
    const std::map<std::string, std::string> metadata(info->metadata().begin(),
                                                      info->metadata().end());
    for (const auto& [key, value] : metadata) {
      absl::StrAppend(&reason, ", ", absl::CHexEscape(key), " ", absl::CHexEscape(value));
    }
    details.push_back(std::move(reason));
  }
  if (const auto delay = RetryDelayOf(status); delay.has_value()) {
    details.push_back(absl::StrCat("retry after ", delay->count(), " ms"));
  }
  const std::string code = absl::StatusCodeToString(status.code());
  std::string text = status.message().empty() ? code : absl::StrCat(code, ": ", status.message());
  if (!details.empty()) absl::StrAppend(&text, " (", absl::StrJoin(details, "; "), ")");
  return text;
}

std::optional<std::chrono::milliseconds> RetryDelayOf(const absl::Status& status) {
  const auto detail = FindDetail<google::rpc::RetryInfo>(status);
  if (!detail.has_value() || !detail->has_retry_delay()) return std::nullopt;
  const auto& delay = detail->retry_delay();
  const auto exact =
      std::chrono::seconds(delay.seconds()) + std::chrono::nanoseconds(delay.nanos());
  return std::max(std::chrono::milliseconds(0),
                  std::chrono::ceil<std::chrono::milliseconds>(exact));
}

namespace {

// A value of ErrorInfo.metadata; "" where there is none.
std::string MetadataOf(const absl::Status& status, const char* key) {
  const auto info = FindDetail<google::rpc::ErrorInfo>(status);
  if (!info.has_value() || info->domain() != kErrorDomain) return "";
  const auto found = info->metadata().find(key);
  return found == info->metadata().end() ? "" : found->second;
}

std::optional<PositionRange> ReadRange(absl::string_view text) {
  const std::pair<absl::string_view, absl::string_view> ends = absl::StrSplit(text, '-');
  PositionRange range;
  int64_t last = 0;
  if (!absl::SimpleAtoi(ends.first, &range.begin) || !absl::SimpleAtoi(ends.second, &last)) {
    return std::nullopt;
  }
  range.end = last + 1;
  return range;
}

}  // namespace

std::optional<MissingTokens> MissingTokensOf(const absl::Status& status) {
  const std::string ranges = MetadataOf(status, "missing");
  MissingTokens missing;
  if (!absl::IsDataLoss(status) || ranges.empty() ||
      !absl::SimpleAtoi(MetadataOf(status, "sequence"), &missing.sequence) ||
      !absl::SimpleAtoi(MetadataOf(status, "layer"), &missing.layer) ||
      !absl::SimpleAtoi(MetadataOf(status, "missing_tokens"), &missing.tokens)) {
    return std::nullopt;
  }
  for (const absl::string_view text : absl::StrSplit(ranges, ',')) {
    const std::optional<PositionRange> range = ReadRange(text);
    if (!range.has_value()) return std::nullopt;
    missing.ranges.push_back(*range);
  }
  return missing;
}

std::optional<int64_t> LengthOf(const absl::Status& status) {
  int64_t tokens = 0;
  if (!absl::SimpleAtoi(MetadataOf(status, "length"), &tokens)) return std::nullopt;
  return tokens;
}

}  // namespace tributary
