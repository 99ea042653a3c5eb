#include "base/rpc/watched_file.h"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <utility>

#include "absl/strings/str_cat.h"

namespace tributary {

absl::StatusOr<std::string> ReadSmallFile(const std::string& path, size_t most) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::NotFoundError(absl::StrCat(path, ": ", std::strerror(errno)));
  std::string content(most + 1, '\0');
  file.read(content.data(), static_cast<std::streamsize>(content.size()));
  if (file.bad()) return absl::NotFoundError(absl::StrCat(path, ": cannot be read"));
  content.resize(static_cast<size_t>(file.gcount()));
  if (content.size() > most) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": is larger than ", most, " bytes"));
  }
  return content;
}

absl::StatusOr<std::string> WatchedFile::Read(bool* changed) {
  const MutexLock lock(mutex_);
  if (changed != nullptr) *changed = false;
  const auto now = std::chrono::steady_clock::now();
  if (known_ && now < next_look_) return content_;
  next_look_ = now + interval_;
  absl::StatusOr<std::string> content = ReadSmallFile(path_);
  if (!content.ok()) {
    if (known_) return content_;
    return content.status();
  }
  if (changed != nullptr) *changed = !known_ || *content != content_;
  known_ = true;
  content_ = *std::move(content);
  return content_;
}

}  // namespace tributary
