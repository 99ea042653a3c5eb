// What the log says of a group that is not complete: which ranks it waits for, whom it refused, and
// why it could not be formed.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "base/sync/mutex.h"
#include "base/telemetry/log.h"

namespace tributary::service {

// Workers try again every few seconds. So each thing is said when it is news, and again each minute
// while it goes on. From any thread.
class JoinLog {
 public:
  static constexpr std::chrono::minutes kAgain{1};

  // A null log says nothing.
  explicit JoinLog(std::shared_ptr<const telemetry::Logger> log) : log_(std::move(log)) {}

  // `ranks`: "rank 1", "ranks 0, 2".
  void Waits(const std::string& ranks);
  // A worker at this address was not let in. Where it asks for a place that another one holds, it
  // stands by, and that is no reason to worry.
  void Refused(absl::string_view address, const absl::Status& why);
  // All ranks were there.
  void NotFormed(const std::string& why);

 private:
  bool IsNews(const std::string& what);

  const std::shared_ptr<const telemetry::Logger> log_;
  Mutex mutex_;
  std::map<std::string, std::chrono::steady_clock::time_point> said_ TRIBUTARY_GUARDED_BY(mutex_);
};

}  // namespace tributary::service
