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

// Adds the token to every call of a channel. A call credential would do the same, but gRPC takes
// those over TLS only, and a Unix socket is as safe.
class AddToken final : public grpc::experimental::Interceptor {
 public:
  explicit AddToken(TokenSource* tokens) : tokens_(tokens) {}
  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    using Point = grpc::experimental::InterceptionHookPoints;
    if (methods->QueryInterceptionHookPoint(Point::PRE_SEND_INITIAL_METADATA)) {
      const std::string token = tokens_->Current();
      if (!token.empty()) {
        methods->GetSendInitialMetadata()->insert(
            {"authorization", absl::StrCat("Bearer ", token)});
      }
    }
    methods->Proceed();
  }

 private:
  TokenSource* const tokens_;
};

class AddTokenFactory final : public grpc::experimental::ClientInterceptorFactoryInterface {
 public:
  explicit AddTokenFactory(const std::string& path) : tokens_(path) {}
  grpc::experimental::Interceptor* CreateClientInterceptor(
      grpc::experimental::ClientRpcInfo*) override {
    return new AddToken(&tokens_);  // gRPC takes it
  }

 private:
  TokenSource tokens_;
};

absl::Status CheckToken(const std::string& target, const ChannelSecurity& security) {
  if (security.token_file.empty()) return absl::OkStatus();
  const absl::StatusOr<std::string> content = ReadSmallFile(security.token_file);
  if (!content.ok()) return InvalidField("token_file", content.status().message());
  if (absl::Status usable = CheckTokenText(FirstLine(*content)); !usable.ok()) {
    return InvalidField("token_file", absl::StrCat(security.token_file, ": ", usable.message()));
  }
  if (security.tls.authorities.empty() && !IsLocalAddress(target)) {
    return InvalidField("token_file", absl::StrCat("would travel in plain text to ", target,
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
  if (absl::Status s = CheckToken(target, security); !s.ok()) return s;
  std::vector<std::unique_ptr<grpc::experimental::ClientInterceptorFactoryInterface>> interceptors;
  if (!security.token_file.empty()) {
    interceptors.push_back(std::make_unique<AddTokenFactory>(security.token_file));
  }
  return grpc::experimental::CreateCustomChannelWithInterceptors(
      target, ChannelCredentialsFrom(security.tls), arguments, std::move(interceptors));
}

}  // namespace tributary
