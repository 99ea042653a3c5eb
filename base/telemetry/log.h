// One line per event, to stderr: text for people or JSON for machines. A line never carries the
// contents of tensors.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <string>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace tributary::telemetry {

enum class LogLevel : uint8_t { kDebug, kInfo, kWarning, kError };
enum class LogFormat : uint8_t { kText, kJson };

bool Parse(absl::string_view text, LogLevel* level);    // "debug", "info", "warning", "error"
bool Parse(absl::string_view text, LogFormat* format);  // "text", "json"

// A named value of an event. Numbers are numbers in JSON too.
struct LogField {
  template <typename T>
  LogField(absl::string_view name, const T& v)
      : key(name), value(absl::StrCat(v)), is_number(IsNumber(v)) {}
  absl::string_view key;
  std::string value;
  bool is_number = false;

 private:
  template <typename T>
  static bool IsNumber(const T& v) {
    if constexpr (std::is_floating_point_v<T>) {
      return std::isfinite(v);  // JSON has no infinity and no NaN
    } else {
      return std::is_integral_v<T>;
    }
  }
};

class Logger {
 public:
  Logger(LogLevel level, LogFormat format, std::FILE* sink = stderr)
      : level_(level), format_(format), sink_(sink) {}

  // From now on, on any thread.
  void SetLevel(LogLevel level) { level_.store(level, std::memory_order_relaxed); }
  // Whether Write() would write; spares the making of fields.
  bool Logs(LogLevel level) const { return level >= level_.load(std::memory_order_relaxed); }
  void Write(LogLevel level, absl::string_view message,
             std::initializer_list<LogField> fields = {}) const;

  void Debug(absl::string_view m, std::initializer_list<LogField> f = {}) const {
    Write(LogLevel::kDebug, m, f);
  }
  void Info(absl::string_view m, std::initializer_list<LogField> f = {}) const {
    Write(LogLevel::kInfo, m, f);
  }
  void Warning(absl::string_view m, std::initializer_list<LogField> f = {}) const {
    Write(LogLevel::kWarning, m, f);
  }
  void Error(absl::string_view m, std::initializer_list<LogField> f = {}) const {
    Write(LogLevel::kError, m, f);
  }

 private:
  std::atomic<LogLevel> level_;
  const LogFormat format_;
  std::FILE* const sink_;
};

// As --log_level says it. INVALID_ARGUMENT leaves the level as it was.
absl::Status SetLevel(absl::string_view text, Logger& log);

// The line Write() writes, newline included; for tests. In text, bytes that are not printable ASCII
// are written as \xHH; in JSON they are escaped as JSON has it.
std::string FormatLogLine(LogFormat format, LogLevel level, absl::string_view timestamp,
                          absl::string_view message, std::initializer_list<LogField> fields);

}  // namespace tributary::telemetry
