// What the commands that ask a running service share: the flags by which they find it, and the
// connections to it.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/rpc/security_options.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "service/cli/command.h"
#include "service/client/client.h"
#include "tributary/v1/diagnostics.grpc.pb.h"

namespace tributary::cli {

class ServiceCommand : public Command {
 public:
  // --target and what it takes to trust the service and be trusted, the command's own flags, and
  // --timeout.
  void AddFlags(FlagSet& flags) final;

 protected:
  struct Defaults {
    std::string target = kDefaultTarget;
    std::string target_help =
        "The service listens at this address: host:port or unix:/path. Several groups: their "
        "addresses with commas between them, or groups:name:port.";
    absl::Duration timeout = absl::Seconds(5);
    int max_attempts = 4;  // ConnectOptions::max_attempts
  };
  ServiceCommand() : ServiceCommand(Defaults()) {}
  explicit ServiceCommand(Defaults defaults)
      : target_(defaults.target), timeout_(defaults.timeout), defaults_(std::move(defaults)) {}

  virtual void AddOwnFlags(FlagSet&) {}

  // A client of the service.
  absl::StatusOr<std::unique_ptr<client::Client>> Connect() const { return ConnectTo(target_); }
  // A client of one group of it, at one of GroupTargets.
  absl::StatusOr<std::unique_ptr<client::Client>> ConnectTo(const std::string& group) const;
  // The addresses of the service's groups: --target, where it does not name several.
  absl::StatusOr<std::vector<std::string>> GroupTargets() const;

  // Makes one call of one of the service's gRPC services. An error names the target.
  template <typename Service>
  using Call =
      std::function<grpc::Status(typename Service::Stub& stub, grpc::ClientContext* context)>;
  template <typename Service>
  absl::Status Ask(const Call<Service>& call) const {
    return CallOver(
        [&call](const std::shared_ptr<grpc::Channel>& channel, grpc::ClientContext* context) {
          return call(*Service::NewStub(channel), context);
        });
  }
  absl::Status Diagnose(const Call<v1::DiagnosticsService>& call) const {
    return Ask<v1::DiagnosticsService>(call);
  }

  // Prints why the command failed, and returns its exit code.
  int FailWith(const std::string& message) const { return Fail(name(), message); }
  // The same of Connect and Diagnose. A flag by which the service was to be reached is wrong usage.
  int FailToAsk(const absl::Status& status) const;
  int WrongUsage(const std::string& message) const;

  const std::string& target() const { return target_; }
  absl::Duration timeout() const { return timeout_; }

 private:
  using ChannelCall = std::function<grpc::Status(const std::shared_ptr<grpc::Channel>& channel,
                                                 grpc::ClientContext* context)>;
  absl::Status CallOver(const ChannelCall& call) const;

  std::string target_;
  ChannelSecurity security_;
  absl::Duration timeout_;
  const Defaults defaults_;
};

}  // namespace tributary::cli
