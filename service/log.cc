#include "service/log.h"

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace tributary::service {
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

std::string Quoted(absl::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      absl::StrAppendFormat(&out, "\\u%04x", c);
    } else {
      out += c;
    }
  }
  out += '"';
  return out;
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
    line = absl::StrCat("{\"ts\":", Quoted(timestamp), ",\"level\":\"", Name(level),
                        "\",\"msg\":", Quoted(message));
    for (const LogField& f : fields)
      absl::StrAppend(&line, ",", Quoted(f.key), ":", Quoted(f.value));
    line += "}\n";
    return line;
  }
  line = absl::StrCat(timestamp, " ", Name(level), " ", message);
  for (const LogField& f : fields) absl::StrAppend(&line, " ", f.key, "=", f.value);
  line += '\n';
  return line;
}

void Logger::Write(LogLevel level, absl::string_view message,
                   std::initializer_list<LogField> fields) const {
  if (level < level_) return;
  const std::string now =
      absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", absl::Now(), absl::UTCTimeZone());
  const std::string line = FormatLogLine(format_, level, now, message, fields);
  // One call a line: lines of several threads do not mix. A full disk loses lines, not the service.
  std::fwrite(line.data(), 1, line.size(), sink_);
}

}  // namespace tributary::service
