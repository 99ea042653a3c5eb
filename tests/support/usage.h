// What a process takes of its machine.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

namespace tributary::test {

// Whether this is a build of a sanitizer. It keeps what was freed, and shadows of all memory, so
// that a process takes several times what it would by itself, and it is several times slower.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kInstrumented = true;
#else
inline constexpr bool kInstrumented = false;
#endif

struct Usage {
  // Bytes in RAM: all, the most there ever were, and those without a file behind them (heap and
  // stacks; the rest is code, which comes in as it is used).
  size_t resident = 0;
  size_t peak = 0;
  size_t anonymous = 0;
  size_t threads = 0;
  size_t files = 0;  // descriptors
};

// All zero when there is no such process.
inline Usage UsageOf(pid_t process) {
  const std::string directory = "/proc/" + std::to_string(process);
  Usage usage;
  std::ifstream status(directory + "/status");
  for (std::string line; std::getline(status, line);) {
    std::istringstream words(line);
    std::string key;
    size_t value = 0;
    if (!(words >> key >> value)) continue;
    if (key == "VmRSS:") usage.resident = value << 10;
    if (key == "VmHWM:") usage.peak = value << 10;
    if (key == "RssAnon:") usage.anonymous = value << 10;
    if (key == "Threads:") usage.threads = value;
  }
  std::error_code gone;
  const std::filesystem::directory_iterator files(directory + "/fd", gone);
  if (!gone) usage.files = static_cast<size_t>(std::distance(begin(files), end(files)));
  return usage;
}

}  // namespace tributary::test
