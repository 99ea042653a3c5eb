#include "base/telemetry/log.h"

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/telemetry/json_string.h"

namespace tributary::telemetry {
namespace {

const char* Name(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return "debug";
    case LogLevel::kInfo:
      return "info";
    case LogLevel::kWarning:
      return "warning";
    case LogLevel::kError:
      return "error";
  }
  return "unknown";
}

// Adds text with every byte that is not printable ASCII as \xHH: a name that a client chose can
// neither begin a line of its own nor steer the terminal of whoever reads the log.
void AppendPrintable(absl::string_view text, std::string* line) {
  for (const char c : text) {
    if (absl::ascii_isprint(static_cast<unsigned char>(c))) {
      *line += c;
    } else {
      absl::StrAppend(line, "\\x", absl::Hex(static_cast<unsigned char>(c), absl::kZeroPad2));
    }
  }
}

}  // namespace

bool Parse(absl::string_view text, LogLevel* level) {
  for (const LogLevel l :
       {LogLevel::kDebug, LogLevel::kInfo, LogLevel::kWarning, LogLevel::kError}) {
    if (text == Name(l)) {
      *level = l;
      return true;
    }
  }
  return false;
}

bool Parse(absl::string_view text, LogFormat* format) {
  if (text != "text" && text != "json") return false;
  *format = text == "json" ? LogFormat::kJson : LogFormat::kText;
  return true;
}

std::string FormatLogLine(LogFormat format, LogLevel level, absl::string_view timestamp,
                          absl::string_view message, std::initializer_list<LogField> fields) {
  std::string line;
  if (format == LogFormat::kJson) {
    line = absl::StrCat("{\"ts\":", JsonString(timestamp), ",\"level\":\"", Name(level),
                        "\",\"msg\":", JsonString(message));
    for (const LogField& f : fields) {
      absl::StrAppend(&line, ",", JsonString(f.key), ":",
                      f.is_number ? f.value : JsonString(f.value));
    }
    line += "}\n";
    return line;
  }
  line = absl::StrCat(timestamp, " ", Name(level), " ");
  AppendPrintable(message, &line);
  for (const LogField& f : fields) {
    absl::StrAppend(&line, " ", f.key, "=");
    AppendPrintable(f.value, &line);
  }
  line += '\n';
  return line;
}

absl::Status SetLevel(absl::string_view text, Logger& log) {
  LogLevel level = LogLevel::kInfo;
  if (!Parse(text, &level)) {
    return absl::InvalidArgumentError("must be debug, info, warning or error");
  }
  log.SetLevel(level);
  return absl::OkStatus();
}

void Logger::Write(LogLevel level, absl::string_view message,
                   std::initializer_list<LogField> fields) const {
  if (!Logs(level)) return;
  const std::string now =
      absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", absl::Now(), absl::UTCTimeZone());
  const std::string line = FormatLogLine(format_, level, now, message, fields);
  // One call a line: lines of several threads do not mix. A full disk loses lines, not the service.
  std::fwrite(line.data(), 1, line.size(), sink_);
}

}  // namespace tributary::telemetry
