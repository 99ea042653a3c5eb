// tributary stat: what the service has done so far, and with --watch what it is doing.
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/time/time.h"
#include "base/status/rpc_errors.h"
#include "service/cli/commands.h"
#include "service/cli/report.h"
#include "service/cli/service_command.h"

namespace tributary::cli {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kLinesBetweenTitles = 20;

class Stat final : public ServiceCommand {
 public:
  std::string name() const override { return "stat"; }
  std::string summary() const override { return "requests, steps and where the time goes"; }
  std::string description() const override {
    return "Totals since the service started. With --watch, rates over each interval, a line "
           "each,\n"
           "until interrupted (or --lines were printed).\n";
  }
  void AddOwnFlags(FlagSet& flags) override {
    flags.Add("watch", &watch_,
              "Rates are printed at this interval, 1s for example; 0 prints the totals once.");
    flags.Add("lines", &lines_,
              "With --watch, the command stops after this many lines; 0 means never.");
  }

  int Run() override {
    auto client = Connect();
    if (!client.ok()) return FailToAsk(client.status());
    const auto first = (*client)->GetTopology({});
    if (!first.ok()) return FailWith(StatusText(first.status()));
    if (watch_ > absl::ZeroDuration()) return Watch(**client, first->statistics());
    std::fputs(StatisticsReport(*first, style_).c_str(), stdout);
    return kDone;
  }

 private:
  int Watch(client::Client& client, v1::Statistics before) {
    const auto interval = absl::ToChronoNanoseconds(watch_);
    Clock::time_point asked = Clock::now();
    for (int line = 0; lines_ == 0 || line < lines_; ++line) {
      std::this_thread::sleep_until(asked + interval);
      const auto reply = client.GetTopology({});
      if (!reply.ok()) return FailWith(StatusText(reply.status()));
      const Clock::time_point now = Clock::now();
      const double seconds = std::chrono::duration<double>(now - asked).count();
      if (line % kLinesBetweenTitles == 0) std::fputs(RatesTitle(style_).c_str(), stdout);
      std::fputs(RatesLine(before, reply->statistics(), seconds).c_str(), stdout);
      std::fflush(stdout);
      before = reply->statistics();
      asked = now;
    }
    return kDone;
  }

  absl::Duration watch_ = absl::ZeroDuration();
  int32_t lines_ = 0;
  const Style style_ = Style::For(stdout);
};

}  // namespace

std::unique_ptr<Command> MakeStat() { return std::make_unique<Stat>(); }

}  // namespace tributary::cli
