// tributary check: does the service compute what it must?
#include <cstdio>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "base/status/rpc_errors.h"
#include "service/cli/commands.h"
#include "service/cli/self_check.h"
#include "service/cli/service_command.h"
#include "service/cli/table.h"
#include "service/cli/terminal.h"

namespace tributary::cli {
namespace {

class Check final : public ServiceCommand {
 public:
  Check() : ServiceCommand({.timeout = absl::Seconds(30)}) {}
  std::string name() const override { return "check"; }
  std::string summary() const override { return "attention over all ranks against a known answer"; }
  std::string description() const override {
    return "Has a sequence that covers every rank attended over, on a small cache of its own, and\n"
           "compares output and LSE with what they must be: a shard that is missing or counted\n"
           "twice shows. Waits for workers up to --timeout. Exit code 0 when all is as it must "
           "be.\n";
  }

  int Run() override {
    const auto client = Connect();
    if (!client.ok()) return FailToAsk(client.status());
    const auto check = RunSelfCheck(**client);
    if (!check.ok()) return FailWith(StatusText(check.status()));
    const Style style = Style::For(stdout);
    Table table({{"CHECK"}, {"EXPECTED", Align::kRight}, {"FOUND", Align::kRight}, {""}});
    for (const Finding& finding : check->findings) {
      table.AddRow({finding.what, absl::StrFormat("%.4f", finding.expected),
                    absl::StrFormat("%.4f", finding.found),
                    finding.good ? style.Green("OK") : style.Red("WRONG")});
    }
    std::fputs(table.Render(style).c_str(), stdout);
    std::printf("%d %s, backend %s\n", check->ranks, check->ranks == 1 ? "rank" : "ranks",
                check->backend.c_str());
    return check->good() ? kDone : kFailed;
  }
};

}  // namespace

std::unique_ptr<Command> MakeCheck() { return std::make_unique<Check>(); }

}  // namespace tributary::cli
