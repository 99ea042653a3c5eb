#include "base/process/shutdown_signals.h"

#include <unistd.h>

#include <utility>

namespace tributary {
namespace {

constexpr int kWake = SIGUSR1;  // Stop() sends it to the waiting thread

}  // namespace

ShutdownSignals::ShutdownSignals() {
  sigemptyset(&signals_);
  for (const int signal_number : {SIGTERM, SIGINT, kWake}) sigaddset(&signals_, signal_number);
  pthread_sigmask(SIG_BLOCK, &signals_, nullptr);
}

void ShutdownSignals::Start(std::shared_ptr<const telemetry::Logger> log,
                            std::function<void()> drain) {
  thread_ = std::thread([this, log = std::move(log), drain = std::move(drain)] {
    const int first = Wait();
    if (first == kWake) return;
    log->Info("draining", {{"signal", first}});
    drain();
    const int second = Wait();
    if (second == kWake) return;
    log->Warning("leaving at once", {{"signal", second}});
    _exit(128 + second);
  });
}

void ShutdownSignals::Stop() {
  if (!thread_.joinable()) return;
  pthread_kill(thread_.native_handle(), kWake);
  thread_.join();
}

int ShutdownSignals::Wait() const {
  int signal_number = 0;
  sigwait(&signals_, &signal_number);
  return signal_number;
}

}  // namespace tributary
