// SIGTERM and SIGINT of a program that ends in an orderly way.
//
// A thread waits for the signals, because a signal handler could take no lock. The first signal
// asks the program to drain; the second one ends the process at once, with exit status 128 +
// signal.
#pragma once

#include <signal.h>

#include <functional>
#include <memory>
#include <thread>

#include "base/telemetry/log.h"

namespace tributary {

class ShutdownSignals {
 public:
  // Blocks the signals in this thread. Construct it before any other thread starts, those of CUDA
  // included: they inherit the mask, so that only the waiting thread receives the signals.
  ShutdownSignals();
  ~ShutdownSignals() { Stop(); }
  ShutdownSignals(const ShutdownSignals&) = delete;
  ShutdownSignals& operator=(const ShutdownSignals&) = delete;

  // Begins to wait. `drain` runs once, on the waiting thread, after the first signal. A signal that
  // came before Start counts.
  void Start(std::shared_ptr<const telemetry::Logger> log, std::function<void()> drain);

  // Ends the waiting; `drain` does not run any more.
  void Stop();

 private:
  // The next signal.
  int Wait() const;

  sigset_t signals_;
  std::thread thread_;
};

}  // namespace tributary
