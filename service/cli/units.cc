#include "service/cli/units.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace tributary::cli {

std::string Bytes(double bytes) {
  if (bytes < 1024) return absl::StrFormat("%.0f B", bytes);
  const char* const units[] = {"KiB", "MiB", "GiB", "TiB", "PiB"};
  int unit = 0;
  for (bytes /= 1024; bytes >= 1024 && unit < 4; ++unit) bytes /= 1024;
  return absl::StrFormat("%.*f %s", bytes < 10 ? 2 : bytes < 100 ? 1 : 0, bytes, units[unit]);
}

std::string Count(int64_t count) {
  std::string digits = absl::StrCat(count);
  const size_t first = count < 0 ? 1 : 0;
  for (size_t i = digits.size(); i > first + 3;) digits.insert(i -= 3, 1, ',');
  return digits;
}

std::string Rate(double per_second) {
  if (per_second >= 100) return Count(std::llround(per_second));
  return absl::StrFormat("%.*f", per_second < 10 ? 2 : 1, per_second);
}

std::string Seconds(double seconds) {
  // The bounds are where rounding would reach the next unit.
  if (seconds < 999.95e-6) return absl::StrFormat("%.1f us", seconds * 1e6);
  if (seconds < 999.995e-3) return absl::StrFormat("%.2f ms", seconds * 1e3);
  if (seconds < 120) return absl::StrFormat("%.2f s", seconds);
  const int64_t minutes = static_cast<int64_t>(seconds / 60);
  if (minutes < 120) return absl::StrFormat("%d min", minutes);
  return absl::StrFormat("%d h %d min", minutes / 60, minutes % 60);
}

std::string Percent(double part, double whole) {
  if (whole <= 0) return "-";
  return absl::StrFormat("%.1f%%", 100 * part / whole);
}

}  // namespace tributary::cli
