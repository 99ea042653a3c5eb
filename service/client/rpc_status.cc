#include "service/client/rpc_status.h"

#include <algorithm>
#include <string>

#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "google/rpc/error_details.pb.h"
#include "service/client/client.h"

namespace tributary::client {
namespace {

constexpr char kTypeUrlPrefix[] = "type.googleapis.com/";

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

}  // namespace

absl::Status FromRpc(const google::rpc::Status& status) {
  // Code numbers are the same in google.rpc, gRPC and Abseil.
  absl::Status result(static_cast<absl::StatusCode>(status.code()), status.message());
  if (result.ok()) return result;
  for (const auto& detail : status.details()) {
    result.SetPayload(detail.type_url(), absl::Cord(detail.value()));
  }
  return result;
}

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  google::rpc::Status full;
  // The trailer is the peer's: its details count, code and message are taken from the RPC.
  if (!full.ParseFromString(status.error_details())) full.Clear();
  full.set_code(status.error_code());
  full.set_message(status.error_message());
  return FromRpc(full);
}

absl::Status InvalidField(absl::string_view field, absl::string_view message) {
  google::rpc::BadRequest detail;
  auto& violation = *detail.add_field_violations();
  violation.set_field(std::string(field));
  violation.set_description(std::string(message));
  absl::Status status = absl::InvalidArgumentError(absl::StrCat(field, ": ", message));
  status.SetPayload(absl::StrCat(kTypeUrlPrefix, detail.GetDescriptor()->full_name()),
                    absl::Cord(detail.SerializeAsString()));
  return status;
}

std::string FieldOf(const absl::Status& status) {
  const auto detail = FindDetail<google::rpc::BadRequest>(status);
  if (!detail.has_value() || detail->field_violations().empty()) return "";
  return detail->field_violations(0).field();
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

}  // namespace tributary::client
