// tributary health: is the service alive, and can it serve?
#include <cstdio>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/rpc/connection_failure.h"
#include "base/status/rpc_errors.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "service/cli/commands.h"
#include "service/cli/health_check.h"
#include "service/cli/service_command.h"
#include "service/cli/table.h"
#include "service/cli/terminal.h"

namespace tributary::cli {
namespace {

class Health final : public ServiceCommand {
 public:
  Health()
      : ServiceCommand({.target = "",
                        .target_help = "The service listens at this address, host:port or "
                                       "unix:/path; health asks it as hosts do. Of several groups, "
                                       "as in other commands, it asks each.",
                        .timeout = absl::Seconds(3),
                        .max_attempts = 1}) {}
  std::string name() const override { return "health"; }
  std::string summary() const override { return "whether the service lives and can serve"; }
  std::string description() const override {
    return "Exit code 0 when the service is alive and ready, 1 otherwise.\n"
           "Asks the admin server (grpc.health.v1) for liveness and readiness; with --target, "
           "asks\n"
           "the service itself, where ready means that all workers are connected.\n";
  }
  void AddOwnFlags(FlagSet& flags) override {
    flags.Add(
        "admin", &admin_,
        absl::StrCat("The admin server listens at this address: the coordinator's --admin_listen. "
                     "Without this flag and --target it is ",
                     kDefaultAdmin, "."));
  }

  int Run() override {
    if (admin_.empty() && target().empty()) admin_ = kDefaultAdmin;
    if (!admin_.empty()) AskAdmin();
    if (!target().empty()) AskService();
    std::fputs(table_.Render(style_).c_str(), stdout);
    return healthy_ ? kDone : kFailed;
  }

 private:
  void AskAdmin() {
    const auto channel = grpc::CreateChannel(admin_, grpc::InsecureChannelCredentials());
    for (const std::string what : {"liveness", "readiness"}) {
      const absl::StatusOr<bool> serving =
          CheckHealth(channel, what, absl::ToChronoMilliseconds(timeout()));
      std::string note;
      if (absl::IsUnavailable(serving.status())) {
        note = ExplainConnectionFailure(admin_, {}, serving.status().message());
      } else if (!serving.ok()) {
        note = StatusText(serving.status());
      }
      Add(what, admin_, serving.ok() && *serving, note);
    }
  }

  void AskService() {
    const auto groups = GroupTargets();
    if (!groups.ok()) {
      return Add("liveness", target(), false, std::string(groups.status().message()));
    }
    for (const std::string& group : *groups) AskGroup(group);
  }

  void AskGroup(const std::string& group) {
    const auto client = ConnectTo(group);
    if (!client.ok()) {
      Add("liveness", group, false, std::string(client.status().message()));
      return Add("readiness", group, false, "");
    }
    const auto topology = (*client)->GetTopology({});
    Add("liveness", group, topology.ok(),
        topology.ok() ? "" : std::string(topology.status().message()));
    const bool ready = topology.ok() && topology->state() == v1::GROUP_STATE_READY;
    std::string note;
    if (topology.ok()) {
      int connected = 0;
      for (const auto& worker : topology->workers()) connected += worker.connected() ? 1 : 0;
      note = absl::StrCat(connected, " of ", topology->workers_size(), " workers, epoch ",
                          topology->epoch());
    }
    Add("readiness", group, ready, note);
  }

  void Add(const std::string& what, const std::string& where, bool good, const std::string& note) {
    healthy_ = healthy_ && good;
    table_.AddRow({what, where, good ? style_.Green("SERVING") : style_.Red("NOT_SERVING"), note});
  }

  std::string admin_;
  const Style style_ = Style::For(stdout);
  Table table_{{{"CHECK"}, {"WHERE"}, {"STATE"}, {"NOTE"}}};
  bool healthy_ = true;
};

}  // namespace

std::unique_ptr<Command> MakeHealth() { return std::make_unique<Health>(); }

}  // namespace tributary::cli
