#include "service/access/join_secret.h"

#include <algorithm>
#include <chrono>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/rpc/security_options.h"
#include "base/status/errors.h"
#include "base/status/status_macros.h"
#include "service/access/access_control.h"

namespace tributary::service {
namespace {

constexpr std::chrono::milliseconds kLook{1'000};
constexpr size_t kShortest = 16;

absl::StatusOr<std::string> SecretIn(absl::string_view text) {
  const absl::string_view line = absl::StripAsciiWhitespace(text.substr(0, text.find('\n')));
  if (line.size() < kShortest || !std::all_of(line.begin(), line.end(), absl::ascii_isgraph)) {
    return InvalidField("join_secret_file",
                        absl::StrCat("the first line must have at least ", kShortest,
                                     " characters, none of them blank"));
  }
  return std::string(line);
}

}  // namespace

JoinSecret::JoinSecret(const std::string& file) : file_(file, kLook) {}

absl::StatusOr<std::shared_ptr<JoinSecret>> JoinSecret::Create(const std::string& file) {
  std::shared_ptr<JoinSecret> secret(new JoinSecret(file));
  const absl::StatusOr<std::string> text = secret->file_.Read();
  if (!text.ok()) return InvalidField("join_secret_file", text.status().message());
  TRIBUTARY_RETURN_IF_ERROR(SecretIn(*text).status());
  return secret;
}

absl::Status JoinSecret::Check(const grpc::ServerContextBase& context) {
  const auto shown = context.client_metadata().find(kJoinSecretHeader);
  if (shown == context.client_metadata().end()) return CheckShown("");
  return CheckShown(std::string(shown->second.data(), shown->second.size()));
}

absl::Status JoinSecret::CheckShown(const std::string& shown) {
  const absl::StatusOr<std::string> text = file_.Read();
  const absl::StatusOr<std::string> secret = text.ok() ? SecretIn(*text) : text.status();
  if (secret.ok() && SameSecret(*secret, shown)) return absl::OkStatus();
  return absl::UnauthenticatedError(
      shown.empty() ? "the group wants a join secret (--join_secret_file), and none was shown"
                    : "the join secret is not this group's");
}

}  // namespace tributary::service
