#include "service/cli/table.h"

#include <algorithm>

namespace tributary::cli {

std::string Table::Render(const Style& style) const {
  std::vector<size_t> widths;
  for (const Column& column : columns_) widths.push_back(VisibleWidth(column.title));
  for (const auto& row : rows_) {
    for (size_t c = 0; c < columns_.size(); ++c) {
      widths[c] = std::max(widths[c], VisibleWidth(row[c]));
    }
  }
  const auto line = [&](const std::vector<std::string>& cells) {
    std::string out;
    for (size_t c = 0; c < columns_.size(); ++c) {
      const std::string padding(widths[c] - VisibleWidth(cells[c]), ' ');
      if (c > 0) out += "  ";
      if (columns_[c].align == Align::kRight) out += padding;
      out += cells[c];
      if (columns_[c].align == Align::kLeft && c + 1 < columns_.size()) out += padding;
    }
    return out + "\n";
  };
  std::vector<std::string> titles;
  for (const Column& column : columns_) titles.push_back(style.Bold(column.title));
  std::string out = line(titles);
  for (const auto& row : rows_) out += line(row);
  return out;
}

}  // namespace tributary::cli
