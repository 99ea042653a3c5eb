#include "worker/host_memory.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <limits>
#include <string>

namespace tributary::worker {
namespace {

constexpr size_t kUnknown = std::numeric_limits<size_t>::max();

size_t OfMachine() {
  std::ifstream meminfo("/proc/meminfo");
  std::string line;
  while (std::getline(meminfo, line)) {
    unsigned long long kib = 0;
    if (std::sscanf(line.c_str(), "MemAvailable: %llu kB", &kib) == 1) return kib << 10;
  }
  return kUnknown;
}

size_t ReadNumber(const char* path) {
  std::ifstream file(path);
  size_t value = 0;
  return file >> value ? value : kUnknown;  // "max" is no number: no limit
}

// File pages that the kernel drops before it refuses memory; counted as used all the same.
size_t ReclaimableOfControlGroup() {
  std::ifstream stat("/sys/fs/cgroup/memory.stat");
  std::string key;
  size_t value = 0;
  while (stat >> key >> value) {
    if (key == "inactive_file") return value;
  }
  return 0;
}

// Inside a container the group's own files are at the root of the mount.
size_t OfControlGroup() {
  const size_t limit = ReadNumber("/sys/fs/cgroup/memory.max");
  const size_t current = ReadNumber("/sys/fs/cgroup/memory.current");
  if (limit == kUnknown || current == kUnknown) return kUnknown;
  const size_t used = current - std::min(current, ReclaimableOfControlGroup());
  return limit > used ? limit - used : 0;
}

}  // namespace

size_t AvailableHostMemory() { return std::min(OfMachine(), OfControlGroup()); }

}  // namespace tributary::worker
