#include "base/rpc/channel_security.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/support/client_interceptor.h>

#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/rpc/tls.h"
#include "base/rpc/watched_file.h"
#include "base/status/errors.h"
#include "base/sync/mutex.h"

namespace tributary {
namespace {

constexpr std::chrono::milliseconds kTokenLook{1'000};

// The first line, without what surrounds the token.
std::string FirstLine(absl::string_view text) {
  return std::string(absl::StripAsciiWhitespace(text.substr(0, text.find('\n'))));
}

absl::Status CheckTokenText(const std::string& token) {
  if (token.empty()) return absl::InvalidArgumentError("the first line is empty");
  for (const char c : token) {
    if (!absl::ascii_isgraph(c)) {
      return absl::InvalidArgumentError("a token has no blanks or control characters");
    }
  }
  return absl::OkStatus();
}

// The token as its file last had a usable one: gRPC ends the process over metadata that it cannot
// send, and a file that is being written is empty for a moment.
class TokenSource {
 public:
  explicit TokenSource(const std::string& path) : file_(path, kTokenLook) { (void)Current(); }
  std::string Current() {
    const MutexLock lock(mutex_);
    const absl::StatusOr<std::string> content = file_.Read();
    if (content.ok()) {
      std::string token = FirstLine(*content);
      if (CheckTokenText(token).ok()) token_ = std::move(token);
    }
    return token_;
  }

 private:
  Mutex mutex_;
  WatchedFile file_ TRIBUTARY_GUARDED_BY(mutex_);
  std::string token_ TRIBUTARY_GUARDED_BY(mutex_);
};

// Adds a line of a file to the metadata of every call of a channel. A call credential would do the
// same, but gRPC takes those over TLS only, and a Unix socket is as safe.
class AddToken final : public grpc::experimental::Interceptor {
 public:
  // `before`: what comes before the line in the header.
  AddToken(TokenSource* tokens, std::string header, std::string before)
      : tokens_(tokens), header_(std::move(header)), before_(std::move(before)) {}
  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    using Point = grpc::experimental::InterceptionHookPoints;
    if (methods->QueryInterceptionHookPoint(Point::PRE_SEND_INITIAL_METADATA)) {
      const std::string token = tokens_->Current();
      if (!token.empty()) {
        methods->GetSendInitialMetadata()->insert({header_, absl::StrCat(before_, token)});
      }
    }
    methods->Proceed();
  }

 private:
  TokenSource* const tokens_;
  const std::string header_;
  const std::string before_;
};

class AddTokenFactory final : public grpc::experimental::ClientInterceptorFactoryInterface {
 public:
  AddTokenFactory(const std::string& path, std::string header, std::string before)
      : tokens_(path), header_(std::move(header)), before_(std::move(before)) {}
  grpc::experimental::Interceptor* CreateClientInterceptor(
      grpc::experimental::ClientRpcInfo*) override {
    return new AddToken(&tokens_, header_, before_);  // gRPC takes it
  }

 private:
  TokenSource tokens_;
  const std::string header_;
  const std::string before_;
};

// `field` names the setting that names the file; an empty `file` is none.
absl::Status CheckToken(const std::string& target, const ChannelSecurity& security,
                        absl::string_view field, const std::string& file) {
  if (file.empty()) return absl::OkStatus();
  const absl::StatusOr<std::string> content = ReadSmallFile(file);
  if (!content.ok()) return InvalidField(field, content.status().message());
  if (absl::Status usable = CheckTokenText(FirstLine(*content)); !usable.ok()) {
    return InvalidField(field, absl::StrCat(file, ": ", usable.message()));
  }
  if (security.tls.authorities.empty() && !IsLocalAddress(target)) {
    return InvalidField(field, absl::StrCat("would travel in plain text to ", target,
                                            "; give the authorities of its certificate"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::Channel>> DialSecurely(
    const std::string& target, const ChannelSecurity& security,
    const grpc::ChannelArguments& arguments) {
  if (absl::Status s = CheckTlsFiles(security.tls, "tls_", "tls_ca"); !s.ok()) return s;
  if (security.tls.authorities.empty() && !security.tls.certificate.empty()) {
    return InvalidField("tls_ca", "is missing; tls_cert is given");
  }
  if (security.tls.authorities.empty() && !security.server_name.empty()) {
    return InvalidField("tls_ca", "is missing; tls_server_name is given");
  }
  if (absl::Status s = CheckToken(target, security, "token_file", security.token_file); !s.ok()) {
    return s;
  }
  if (absl::Status s = CheckToken(target, security, "join_secret_file", security.join_secret_file);
      !s.ok()) {
    return s;
  }
  std::vector<std::unique_ptr<grpc::experimental::ClientInterceptorFactoryInterface>> interceptors;
  if (!security.token_file.empty()) {
    interceptors.push_back(
        std::make_unique<AddTokenFactory>(security.token_file, "authorization", "Bearer "));
  }
  if (!security.join_secret_file.empty()) {
    interceptors.push_back(
        std::make_unique<AddTokenFactory>(security.join_secret_file, kJoinSecretHeader, ""));
  }
  grpc::ChannelArguments own = arguments;
  if (!security.server_name.empty()) own.SetSslTargetNameOverride(security.server_name);
  return grpc::experimental::CreateCustomChannelWithInterceptors(
      target, ChannelCredentialsFrom(security.tls), own, std::move(interceptors));
}

}  // namespace tributary
