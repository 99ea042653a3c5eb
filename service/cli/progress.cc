#include "service/cli/progress.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "service/cli/terminal.h"

namespace tributary::cli {

std::string ProgressLine(const std::string& what, double done, const std::string& note, int width) {
  done = std::clamp(done, 0.0, 1.0);
  const std::string before = absl::StrFormat("%-9s ", what);
  const std::string after = absl::StrFormat(" %3.0f%%  %s", std::floor(100 * done), note);
  const int room = width - static_cast<int>(VisibleWidth(before) + VisibleWidth(after)) - 1;
  const int columns = std::clamp(room, 0, 40);
  const int full = static_cast<int>(std::floor(done * columns));
  std::string bar;
  for (int i = 0; i < columns; ++i) absl::StrAppend(&bar, i < full ? "█" : "░");
  return absl::StrCat(before, bar, after);
}

Progress::Progress() : visible_(IsTerminal(stderr)) {}

void Progress::Show(const std::string& what, double done, const std::string& note) {
  if (!visible_) return;
  std::fprintf(stderr, "\r\x1b[K%s", ProgressLine(what, done, note, TerminalWidth(stderr)).c_str());
  std::fflush(stderr);
  shown_ = true;
}

void Progress::Clear() {
  if (shown_) std::fputs("\r\x1b[K", stderr);
  shown_ = false;
}

}  // namespace tributary::cli
