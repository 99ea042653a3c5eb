// tributary limits: what a service accepts.
#include <cstdio>
#include <memory>
#include <string>

#include "base/status/rpc_errors.h"
#include "service/cli/commands.h"
#include "service/cli/limits_report.h"
#include "service/cli/print_json.h"
#include "service/cli/service_command.h"

namespace tributary::cli {
namespace {

class Limits final : public ServiceCommand {
 public:
  std::string name() const override { return "limits"; }
  std::string summary() const override {
    return "what the service accepts, and how precise f32 is";
  }
  std::string description() const override {
    return "Shows the limits on messages, calls and clients, what caches each backend serves, and\n"
           "how far f32 outputs may be from attention over what a cache holds. Of several groups\n"
           "it shows those of one.\n";
  }
  void AddOwnFlags(FlagSet& flags) override {
    flags.Add("json", &json_, "The service's reply is printed as JSON.");
  }

  int Run() override {
    const auto client = Connect();
    if (!client.ok()) return FailToAsk(client.status());
    const auto limits = (*client)->GetLimits();
    if (!limits.ok()) return FailWith(StatusText(limits.status()));
    if (json_) return PrintJson(name(), *limits);
    std::fputs(LimitsReport(*limits, Style::For(stdout)).c_str(), stdout);
    return kDone;
  }

 private:
  bool json_ = false;
};

}  // namespace

std::unique_ptr<Command> MakeLimits() { return std::make_unique<Limits>(); }

}  // namespace tributary::cli
