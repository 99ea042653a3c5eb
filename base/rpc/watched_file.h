// A small file that may be replaced while the process runs, such as a file of tokens.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>

#include "absl/status/statusor.h"
#include "base/sync/mutex.h"

namespace tributary {

class WatchedFile {
 public:
  // Looks at the file at most once per `interval`.
  WatchedFile(std::string path, std::chrono::milliseconds interval)
      : path_(std::move(path)), interval_(interval) {}

  // The file's content. `changed`, when it is not null, receives whether the content differs from
  // what the last call returned. When the file cannot be read (because it is being replaced, say),
  // this is the content that was read last; it is an error only when none was ever read.
  absl::StatusOr<std::string> Read(bool* changed = nullptr);

  const std::string& path() const { return path_; }

 private:
  const std::string path_;
  const std::chrono::milliseconds interval_;
  Mutex mutex_;
  std::string content_ TRIBUTARY_GUARDED_BY(mutex_);
  bool known_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  std::chrono::steady_clock::time_point next_look_ TRIBUTARY_GUARDED_BY(mutex_);
};

// The whole of a file of at most `most` bytes. INVALID_ARGUMENT or NOT_FOUND with the path.
absl::StatusOr<std::string> ReadSmallFile(const std::string& path, size_t most = size_t{1} << 20);

}  // namespace tributary
