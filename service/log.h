// One line an event, to stderr: text for people or JSON for machines. Never carries tensor
// contents.
#pragma once

#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace tributary::service {

enum class LogLevel : uint8_t { kDebug, kInfo, kWarning, kError };
enum class LogFormat : uint8_t { kText, kJson };

bool Parse(absl::string_view text, LogLevel* level);    // "debug", "info", "warning", "error"
bool Parse(absl::string_view text, LogFormat* format);  // "text", "json"

// A named value of an event.
struct LogField {
  template <typename T>
  LogField(absl::string_view name, const T& v) : key(name), value(absl::StrCat(v)) {}
  absl::string_view key;
  std::string value;
};

class Logger {
 public:
  Logger(LogLevel level, LogFormat format, std::FILE* sink = stderr)
      : level_(level), format_(format), sink_(sink) {}

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
  const LogLevel level_;
  const LogFormat format_;
  std::FILE* const sink_;
};

// The line Write() writes, newline included; for tests.
std::string FormatLogLine(LogFormat format, LogLevel level, absl::string_view timestamp,
                          absl::string_view message, std::initializer_list<LogField> fields);

}  // namespace tributary::service
