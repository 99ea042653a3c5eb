// What the other end of a stream can show.
#pragma once

#include <cstdio>
#include <string>

#include "absl/strings/string_view.h"

namespace tributary::cli {

bool IsTerminal(std::FILE* stream);
// Columns of the terminal; 80 when it does not say.
int TerminalWidth(std::FILE* stream);

// Colours where they can be seen and are wanted (https://no-color.org), otherwise nothing.
class Style {
 public:
  static Style For(std::FILE* stream);
  explicit Style(bool coloured) : coloured_(coloured) {}

  std::string Bold(absl::string_view text) const { return Wrap("1", text); }
  std::string Dim(absl::string_view text) const { return Wrap("2", text); }
  std::string Red(absl::string_view text) const { return Wrap("31", text); }
  std::string Green(absl::string_view text) const { return Wrap("32", text); }
  std::string Yellow(absl::string_view text) const { return Wrap("33", text); }

 private:
  std::string Wrap(absl::string_view code, absl::string_view text) const;

  bool coloured_;
};

// Columns a text takes: UTF-8 characters, colour codes not counted.
size_t VisibleWidth(absl::string_view text);

}  // namespace tributary::cli
