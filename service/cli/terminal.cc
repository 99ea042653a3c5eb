#include "service/cli/terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>

#include "absl/strings/str_cat.h"

namespace tributary::cli {
namespace {

bool IsSet(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr && value[0] != '\0';
}

}  // namespace

bool IsTerminal(std::FILE* stream) { return isatty(fileno(stream)) == 1; }

int TerminalWidth(std::FILE* stream) {
  winsize size{};
  if (ioctl(fileno(stream), TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
  return size.ws_col;
}

Style Style::For(std::FILE* stream) {
  const char* term = std::getenv("TERM");
  const bool dumb = term == nullptr || absl::string_view(term) == "dumb";
  return Style(IsTerminal(stream) && !dumb && !IsSet("NO_COLOR"));
}

std::string Style::Wrap(absl::string_view code, absl::string_view text) const {
  if (!coloured_) return std::string(text);
  return absl::StrCat("\x1b[", code, "m", text, "\x1b[0m");
}

size_t VisibleWidth(absl::string_view text) {
  size_t width = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\x1b') {
      while (i < text.size() && text[i] != 'm') ++i;
      continue;
    }
    // All bytes of a character but its first are 10xxxxxx.
    if ((static_cast<unsigned char>(text[i]) & 0xC0) != 0x80) ++width;
  }
  return width;
}

}  // namespace tributary::cli
