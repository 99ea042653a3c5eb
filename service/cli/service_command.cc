#include "service/cli/service_command.h"

#include <chrono>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/rpc/channel_security.h"
#include "base/rpc/connection_failure.h"
#include "base/status/grpc_status.h"
#include "service/cli/connect_flags.h"
#include "service/client/groups/targets.h"

namespace tributary::cli {

void ServiceCommand::AddFlags(FlagSet& flags) {
  AddConnectFlags(flags, &target_, defaults_.target_help, &security_);
  AddOwnFlags(flags);
  flags.Add("timeout", &timeout_, "The command waits no longer for each answer of the service.");
}

absl::StatusOr<std::unique_ptr<client::Client>> ServiceCommand::ConnectTo(
    const std::string& group) const {
  ChannelSecurity security = security_;
  client::NameServer(client::NameOfGroups(target_), &security);
  return client::Client::Connect({.target = group,
                                  .security = security,
                                  .timeout = absl::ToChronoMilliseconds(timeout_),
                                  .max_attempts = defaults_.max_attempts,
                                  .wait_for_service = false});
}

absl::StatusOr<std::vector<std::string>> ServiceCommand::GroupTargets() const {
  return client::GroupsOf(target_);
}

absl::Status ServiceCommand::CallOver(const ChannelCall& call) const {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);  // a trace may be larger than what calls may send
  const auto channel = DialSecurely(target_, security_, arguments);
  if (!channel.ok()) return channel.status();
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + absl::ToChronoNanoseconds(timeout_));
  const grpc::Status status = call(*channel, &context);
  if (status.ok()) return absl::OkStatus();
  const absl::Status answer = FromGrpcStatus(status);
  if (absl::IsUnavailable(answer)) {
    return absl::UnavailableError(
        ExplainConnectionFailure(target_, security_, status.error_message()));
  }
  return absl::Status(answer.code(), absl::StrCat(target_, ": ", status.error_message()));
}

int ServiceCommand::FailToAsk(const absl::Status& status) const {
  const std::string message(status.message());
  if (!NamesConnectFlag(status)) return FailWith(message);
  return WrongUsage(absl::StrCat("--", message));
}

int ServiceCommand::WrongUsage(const std::string& message) const {
  Fail(name(), message);
  return kWrongUsage;
}

}  // namespace tributary::cli
