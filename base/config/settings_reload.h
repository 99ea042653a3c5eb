// Settings that change without a restart. The --config file is looked at every few seconds, and at
// once on SIGHUP; what has changed in it and can be applied is.
#pragma once

#include <signal.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "base/config/config_file.h"
#include "base/telemetry/log.h"

namespace tributary {

// Seconds between two looks at the file.
inline constexpr int kSettingsLookSeconds = 5;

// What is to be done about a file that says `now` and said `before`.
struct ReloadPlan {
  // Settings to apply, with their values; without a value, the flag's default: the file says
  // nothing of it any more.
  std::map<std::string, std::optional<std::string>> apply;
  std::vector<std::string> at_restart;  // settings that count from the next start
};

// `reloadable` can be applied; `fixed` stand on the command line, which wins.
ReloadPlan PlanReload(const Settings& before, const Settings& now,
                      const std::set<std::string>& reloadable, const std::set<std::string>& fixed);

class SettingsReload {
 public:
  // Applies a value that a flag of that name would take; an error leaves the setting as it was.
  using Apply = std::function<absl::Status(const std::string& value)>;

  // The program's arguments. Without --config nothing is ever done. With one, SIGHUP is blocked in
  // this thread: construct it before any other thread starts (as ShutdownSignals).
  SettingsReload(int argc, char** argv);
  ~SettingsReload() { Stop(); }
  SettingsReload(const SettingsReload&) = delete;
  SettingsReload& operator=(const SettingsReload&) = delete;

  // Begins to look. `reloadable` runs on a thread of its own, one at a time, until Stop.
  void Start(std::shared_ptr<const telemetry::Logger> log, std::map<std::string, Apply> reloadable);
  void Stop();

 private:
  void Run();
  void Look(bool asked);

  std::string path_;
  std::set<std::string> fixed_;
  sigset_t signals_;
  std::shared_ptr<const telemetry::Logger> log_;
  std::map<std::string, Apply> reloadable_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
  // Of the thread that looks, once it has started.
  Settings current_;
  std::string last_error_;
};

}  // namespace tributary
