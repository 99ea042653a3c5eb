#include "base/config/settings_reload.h"

#include <ctime>
#include <utility>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/reflection.h"

namespace tributary {
namespace {

std::string DefaultOf(const std::string& name) {
  const absl::CommandLineFlag* flag = absl::FindCommandLineFlag(name);
  return flag == nullptr ? "" : flag->DefaultValue();
}

}  // namespace

ReloadPlan PlanReload(const Settings& before, const Settings& now,
                      const std::set<std::string>& reloadable, const std::set<std::string>& fixed) {
  ReloadPlan plan;
  std::set<std::string> names;
  for (const auto& [name, value] : before) names.insert(name);
  for (const auto& [name, value] : now) names.insert(name);
  for (const std::string& name : names) {
    const auto old_value = before.find(name);
    const auto new_value = now.find(name);
    const bool same = old_value != before.end() && new_value != now.end() &&
                      old_value->second == new_value->second;
    if (same || fixed.count(name) != 0) continue;
    if (reloadable.count(name) == 0) {
      plan.at_restart.push_back(name);
    } else if (new_value == now.end()) {
      plan.apply[name] = std::nullopt;
    } else {
      plan.apply[name] = new_value->second;
    }
  }
  return plan;
}

SettingsReload::SettingsReload(int argc, char** argv)
    : path_(ConfigFileOf(argc, argv)), fixed_(FlagsGiven(argc, argv)) {
  sigemptyset(&signals_);
  if (path_.empty()) return;
  sigaddset(&signals_, SIGHUP);
  pthread_sigmask(SIG_BLOCK, &signals_, nullptr);
  if (auto settings = SettingsOfFile(path_); settings.ok()) current_ = *std::move(settings);
}

void SettingsReload::Start(std::shared_ptr<const telemetry::Logger> log,
                           std::map<std::string, Apply> reloadable) {
  if (path_.empty()) return;
  log_ = std::move(log);
  reloadable_ = std::move(reloadable);
  thread_ = std::thread([this] { Run(); });
}

void SettingsReload::Stop() {
  if (!thread_.joinable()) return;
  stopping_ = true;
  pthread_kill(thread_.native_handle(), SIGHUP);
  thread_.join();
}

void SettingsReload::Run() {
  for (;;) {
    const timespec wait{kSettingsLookSeconds, 0};
    const int received = sigtimedwait(&signals_, nullptr, &wait);
    if (stopping_) return;
    Look(/*asked=*/received == SIGHUP);
  }
}

void SettingsReload::Look(bool asked) {
  const absl::StatusOr<Settings> now = SettingsOfFile(path_);
  if (!now.ok()) {
    const std::string error(now.status().message());
    if (asked || error != last_error_) {
      log_->Error("the settings stay as they are", {{"error", error}});
    }
    last_error_ = error;
    return;
  }
  last_error_.clear();
  std::set<std::string> names;
  for (const auto& [name, apply] : reloadable_) names.insert(name);
  const ReloadPlan plan = PlanReload(current_, *now, names, fixed_);
  current_ = *now;
  for (const auto& [name, given] : plan.apply) {
    const std::string value = given.has_value() ? *given : DefaultOf(name);
    const absl::Status applied = reloadable_.at(name)(value);
    if (applied.ok()) {
      log_->Info("setting changed", {{"setting", name}, {"value", value}});
    } else {
      log_->Error("setting not changed", {{"setting", name}, {"error", applied.message()}});
    }
  }
  for (const std::string& name : plan.at_restart) {
    log_->Warning("setting counts from the next start", {{"setting", name}});
  }
  if (asked && plan.apply.empty() && plan.at_restart.empty()) {
    log_->Info("settings read again: nothing has changed", {{"file", path_}});
  }
}

}  // namespace tributary
