#include "examples/tinylm/find_files.h"

#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace tributary::tinylm {
namespace {

namespace fs = std::filesystem;

std::vector<fs::path> Candidates() {
  std::error_code error;
  std::vector<fs::path> candidates;
  const fs::path program = fs::read_symlink("/proc/self/exe", error);
  if (!error) {
    candidates.push_back(program.parent_path().parent_path() / "share/tributary/tinylm");
    fs::path at = program.parent_path();
    while (at.has_relative_path()) {
      candidates.push_back(at / "examples/tinylm");
      at = at.parent_path();
    }
  }
  const fs::path here = fs::current_path(error);
  if (!error) candidates.push_back(here / "examples/tinylm");
  return candidates;
}

}  // namespace

absl::StatusOr<std::string> FindModelFolder() {
  const std::vector<fs::path> candidates = Candidates();
  for (const fs::path& folder : candidates) {
    std::error_code error;
    if (fs::exists(folder / "weights/model.safetensors", error)) return folder.string();
  }
  return absl::NotFoundError(absl::StrCat(
      "no weights/model.safetensors in any of: ",
      absl::StrJoin(candidates, ", ",
                    [](std::string* out, const fs::path& path) { out->append(path.string()); })));
}

absl::StatusOr<std::string> ReadText(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::NotFoundError(absl::StrCat(path, ": cannot be opened"));
  return std::string(std::istreambuf_iterator<char>(file), {});
}

}  // namespace tributary::tinylm
