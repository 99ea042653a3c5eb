// tributary health: is the service alive, and can it serve?
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "service/cli/commands.h"
#include "service/cli/connect_flags.h"
#include "service/cli/health_check.h"
#include "service/cli/table.h"
#include "service/cli/terminal.h"
#include "service/client/client.h"

namespace tributary::cli {
namespace {

class Health final : public Command {
 public:
  std::string name() const override { return "health"; }
  std::string summary() const override { return "whether the service lives and can serve"; }
  std::string description() const override {
    return "Exit code 0 when the service is alive and ready, 1 otherwise.\n"
           "Asks the admin server (grpc.health.v1) for liveness and readiness; with --target, "
           "asks\n"
           "the service itself, where ready means that all workers are connected.\n";
  }
  void AddFlags(FlagSet& flags) override {
    flags.Add("admin", &admin_,
              absl::StrCat("the coordinator's --admin_listen. Default, without --target: ",
                           kDefaultAdmin));
    AddConnectFlags(flags, &target_,
                    "host:port or unix:/path of the service, to ask it as hosts do", &security_);
    flags.Add("timeout", &timeout_, "how long to wait for an answer");
  }

  int Run() override {
    if (admin_.empty() && target_.empty()) admin_ = kDefaultAdmin;
    if (!admin_.empty()) AskAdmin();
    if (!target_.empty()) AskService();
    std::fputs(table_.Render(style_).c_str(), stdout);
    return healthy_ ? kDone : kFailed;
  }

 private:
  std::chrono::milliseconds timeout() const { return absl::ToChronoMilliseconds(timeout_); }

  void AskAdmin() {
    const auto channel = grpc::CreateChannel(admin_, grpc::InsecureChannelCredentials());
    for (const std::string what : {"liveness", "readiness"}) {
      const absl::StatusOr<bool> serving = CheckHealth(channel, what, timeout());
      Add(what, admin_, serving.ok() && *serving,
          serving.ok() ? "" : std::string(serving.status().message()));
    }
  }

  void AskService() {
    const auto client = client::Client::Connect(
        {.target = target_, .security = security_, .timeout = timeout(), .max_attempts = 1});
    if (!client.ok()) {
      Add("liveness", target_, false, std::string(client.status().message()));
      return Add("readiness", target_, false, "");
    }
    const auto topology = (*client)->GetTopology({});
    Add("liveness", target_, topology.ok(),
        topology.ok() ? "" : std::string(topology.status().message()));
    const bool ready = topology.ok() && topology->state() == v1::GROUP_STATE_READY;
    std::string note;
    if (topology.ok()) {
      int connected = 0;
      for (const auto& worker : topology->workers()) connected += worker.connected() ? 1 : 0;
      note = absl::StrCat(connected, " of ", topology->workers_size(), " workers, epoch ",
                          topology->epoch());
    }
    Add("readiness", target_, ready, note);
  }

  void Add(const std::string& what, const std::string& where, bool good, const std::string& note) {
    healthy_ = healthy_ && good;
    table_.AddRow({what, where, good ? style_.Green("SERVING") : style_.Red("NOT_SERVING"), note});
  }

  std::string admin_;
  std::string target_;
  ChannelSecurity security_;
  absl::Duration timeout_ = absl::Seconds(3);
  const Style style_ = Style::For(stdout);
  Table table_{{{"CHECK"}, {"WHERE"}, {"STATE"}, {"NOTE"}}};
  bool healthy_ = true;
};

}  // namespace

std::unique_ptr<Command> MakeHealth() { return std::make_unique<Health>(); }

}  // namespace tributary::cli
