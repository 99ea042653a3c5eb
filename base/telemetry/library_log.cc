#include "base/telemetry/library_log.h"

#include <google/protobuf/stubs/logging.h>
#include <grpc/support/log.h>

#include <memory>
#include <string>
#include <utility>

#include "base/sync/mutex.h"
#include "base/telemetry/line_throttle.h"

namespace tributary {
namespace {

using telemetry::LogLevel;

constexpr int kLinesPerSecond = 10;

// Both libraries take a function without context, hence a variable of the process. Never destroyed:
// a thread of gRPC's may be writing to the log at any time.
struct Target {
  Mutex mutex;
  std::shared_ptr<const telemetry::Logger> log TRIBUTARY_GUARDED_BY(mutex);
  // What clients send may make the libraries write a line for each message.
  telemetry::LineThrottle throttle TRIBUTARY_GUARDED_BY(mutex){kLinesPerSecond};
};
Target& ProcessTarget() {
  static auto* const target = new Target;
  return *target;
}

void Write(LogLevel level, absl::string_view library, absl::string_view file, int line,
           absl::string_view message) {
  std::shared_ptr<const telemetry::Logger> log;
  int64_t skipped = 0;
  {
    Target& target = ProcessTarget();
    const MutexLock lock(target.mutex);
    if (!target.throttle.Admit(telemetry::LineThrottle::Clock::now(), &skipped)) return;
    log = target.log;
  }
  if (skipped > 0) log->Warning("lines of libraries were left out", {{"lines", skipped}});
  log->Write(level, message, {{"library", library}, {"file", file}, {"line", line}});
}

void OnProtobuf(google::protobuf::LogLevel level, const char* file, int line,
                const std::string& message) {
  const LogLevel ours = level == google::protobuf::LOGLEVEL_INFO      ? LogLevel::kInfo
                        : level == google::protobuf::LOGLEVEL_WARNING ? LogLevel::kWarning
                                                                      : LogLevel::kError;
  Write(ours, "protobuf", file, line, message);
}

void OnGrpc(gpr_log_func_args* args) {
  const LogLevel ours = args->severity == GPR_LOG_SEVERITY_DEBUG  ? LogLevel::kDebug
                        : args->severity == GPR_LOG_SEVERITY_INFO ? LogLevel::kInfo
                                                                  : LogLevel::kError;
  Write(ours, "grpc", args->file, args->line, args->message);
}

}  // namespace

void LogLibrariesTo(std::shared_ptr<const telemetry::Logger> log) {
  {
    Target& target = ProcessTarget();
    const MutexLock lock(target.mutex);
    target.log = std::move(log);
  }
  google::protobuf::SetLogHandler(&OnProtobuf);
  gpr_set_log_function(&OnGrpc);
}

}  // namespace tributary
