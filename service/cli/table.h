// Text in aligned columns.
#pragma once

#include <string>
#include <vector>

#include "service/cli/terminal.h"

namespace tributary::cli {

enum class Align { kLeft, kRight };

class Table {
 public:
  struct Column {
    std::string title;
    Align align = Align::kLeft;
  };

  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

  // As many cells as there are columns; they may be coloured.
  void AddRow(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  // Titles and rows, two blanks between columns, none at line ends.
  std::string Render(const Style& style) const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace tributary::cli
