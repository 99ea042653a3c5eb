// A bar on stderr that moves while something takes long; nothing where stderr is no terminal.
#pragma once

#include <string>

namespace tributary::cli {

class Progress {
 public:
  Progress();
  ~Progress() { Clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // `done` in [0, 1]; `note` stands behind the bar.
  void Show(const std::string& what, double done, const std::string& note);
  void Clear();

 private:
  const bool visible_;
  bool shown_ = false;
};

// The line Show() draws, `width` columns at most; for tests.
std::string ProgressLine(const std::string& what, double done, const std::string& note, int width);

}  // namespace tributary::cli
