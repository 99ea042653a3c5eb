// tributary top: the service as it is now, again and again.
#include <signal.h>

#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/time/time.h"
#include "base/status/rpc_errors.h"
#include "service/cli/commands.h"
#include "service/cli/service_command.h"
#include "service/cli/terminal.h"
#include "service/cli/top_report.h"

namespace tributary::cli {
namespace {

using Clock = std::chrono::steady_clock;

// The terminal's second screen, without a cursor, while this lives.
class FullScreen {
 public:
  FullScreen() { std::fputs("\x1b[?1049h\x1b[?25l", stdout); }
  ~FullScreen() {
    std::fputs("\x1b[?25h\x1b[?1049l", stdout);
    std::fflush(stdout);
  }
  FullScreen(const FullScreen&) = delete;
  FullScreen& operator=(const FullScreen&) = delete;

  // Over what was there, so that nothing flickers.
  void Show(const std::string& text) const {
    std::fputs(
        absl::StrCat("\x1b[H", absl::StrReplaceAll(text, {{"\n", "\x1b[K\n"}}), "\x1b[J").c_str(),
        stdout);
    std::fflush(stdout);
  }
};

// Sleeps that end early when the user wants to leave.
class Interrupts {
 public:
  Interrupts() {
    sigemptyset(&signals_);
    for (const int signal_number : {SIGINT, SIGTERM, SIGHUP}) sigaddset(&signals_, signal_number);
    pthread_sigmask(SIG_BLOCK, &signals_, nullptr);
  }
  // True when interrupted.
  bool SleepUntil(Clock::time_point until) const {
    const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(
        std::max(Clock::duration::zero(), until - Clock::now()));
    const timespec timeout{.tv_sec = left.count() / 1'000'000'000,
                           .tv_nsec = left.count() % 1'000'000'000};
    return sigtimedwait(&signals_, nullptr, &timeout) > 0;
  }

 private:
  sigset_t signals_;
};

class Top final : public ServiceCommand {
 public:
  std::string name() const override { return "top"; }
  std::string summary() const override { return "a live view: workers, steps/s, latency, pages"; }
  std::string description() const override {
    return "Shows what the service does, refreshed until Ctrl-C: rates and latencies over the "
           "last\n"
           "interval, how busy each worker was and in which share of the steps the others waited\n"
           "for it (SLOWEST), how full the caches are. With --once, or when the output is not a\n"
           "terminal, one interval is shown and that is all.\n";
  }
  void AddOwnFlags(FlagSet& flags) override {
    flags.Add("interval", &interval_, "The command asks the service this often.");
    flags.Add("once", &once_, "The command shows one interval and ends.");
  }

  int Run() override {
    if (interval_ <= absl::ZeroDuration()) {
      return WrongUsage("interval: must be positive");
    }
    // Before the client's threads begin, so that they inherit what is blocked.
    const Interrupts interrupts;
    auto client = Connect();
    if (!client.ok()) return FailToAsk(client.status());
    auto before = (*client)->GetTopology({});
    if (!before.ok()) return FailWith(StatusText(before.status()));
    const bool live = !once_ && IsTerminal(stdout);
    std::unique_ptr<FullScreen> screen = live ? std::make_unique<FullScreen>() : nullptr;
    Clock::time_point asked = Clock::now();
    while (!interrupts.SleepUntil(asked + absl::ToChronoNanoseconds(interval_))) {
      auto now = (*client)->GetTopology({});
      const Clock::time_point answered = Clock::now();
      const double seconds = std::chrono::duration<double>(answered - asked).count();
      asked = answered;
      if (!now.ok()) {
        if (!live) return FailWith(StatusText(now.status()));
        screen->Show(absl::StrCat(style_.Red("no answer: "), now.status().message(), "\n"));
        continue;
      }
      const std::string report = TopReport(*before, *now, seconds, style_);
      if (!live) {
        std::fputs(report.c_str(), stdout);
        return kDone;
      }
      screen->Show(report);
      before = std::move(now);
    }
    return kDone;
  }

 private:
  absl::Duration interval_ = absl::Seconds(1);
  bool once_ = false;
  const Style style_ = Style::For(stdout);
};

}  // namespace

std::unique_ptr<Command> MakeTop() { return std::make_unique<Top>(); }

}  // namespace tributary::cli
