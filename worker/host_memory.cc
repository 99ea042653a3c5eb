#include "worker/host_memory.h"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <limits>
#include <sstream>

namespace tributary::worker {
namespace {

constexpr size_t kUnknown = std::numeric_limits<size_t>::max();

// Where a hierarchy of control groups says what.
struct Hierarchy {
  const char* root;  // where it is mounted
  const char* limit;
  const char* used;
  const char* reclaimable;  // key in memory.stat, of the group with all below it
};
constexpr Hierarchy kV2 = {"/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"};
constexpr Hierarchy kV1 = {"/sys/fs/cgroup/memory", "memory.limit_in_bytes",
                           "memory.usage_in_bytes", "total_inactive_file"};

size_t OfMachine(const ReadFile& read) {
  std::istringstream meminfo(read("/proc/meminfo").value_or(""));
  for (std::string line; std::getline(meminfo, line);) {
    unsigned long long kib = 0;
    if (std::sscanf(line.c_str(), "MemAvailable: %llu kB", &kib) == 1) return kib << 10;
  }
  return kUnknown;
}

size_t NumberIn(const std::optional<std::string>& text) {
  std::istringstream stream(text.value_or(""));
  size_t value = 0;
  return stream >> value ? value : kUnknown;  // "max" is no number: no limit
}

size_t ValueOf(const std::string& key, const std::optional<std::string>& text) {
  std::istringstream stat(text.value_or(""));
  std::string name;
  for (size_t value = 0; stat >> name >> value;) {
    if (name == key) return value;
  }
  return 0;
}

// What one group's limit leaves. v1 says "no limit" by a number beyond any memory.
size_t OfGroup(const Hierarchy& hierarchy, const std::string& directory, const ReadFile& read) {
  const size_t limit = NumberIn(read(directory + hierarchy.limit));
  const size_t charged = NumberIn(read(directory + hierarchy.used));
  if (limit == kUnknown || charged == kUnknown) return kUnknown;
  const size_t reclaimable =
      std::min(charged, ValueOf(hierarchy.reclaimable, read(directory + "memory.stat")));
  const size_t used = charged - reclaimable;
  return limit > used ? limit - used : 0;
}

// Of the group at `path` below the root of the hierarchy and of every group around it.
size_t OfGroups(const Hierarchy& hierarchy, std::string path, const ReadFile& read) {
  size_t least = kUnknown;
  while (true) {
    while (!path.empty() && path.back() == '/') path.pop_back();
    least = std::min(least, OfGroup(hierarchy, hierarchy.root + path + "/", read));
    if (path.empty()) return least;
    path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
  }
}

// This process's group by /proc/self/cgroup: lines "0::/path" (v2) and "id:controllers:/path" (v1).
// In a container that path may be the host's; the container's own group is then at the root of the
// mount, which is looked at too.
size_t OfControlGroups(const ReadFile& read) {
  size_t least = std::min(OfGroups(kV2, "", read), OfGroups(kV1, "", read));
  std::istringstream groups(read("/proc/self/cgroup").value_or(""));
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first == std::string::npos ? first : first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (controllers.empty()) {
      least = std::min(least, OfGroups(kV2, path, read));
    } else if (("," + controllers + ",").find(",memory,") != std::string::npos) {
      least = std::min(least, OfGroups(kV1, path, read));
    }
  }
  return least;
}

std::optional<std::string> ReadFromDisk(const std::string& path) {
  std::ifstream file(path);
  if (!file) return std::nullopt;
  std::ostringstream contents;
  contents << file.rdbuf();
  return contents.str();
}

}  // namespace

size_t AvailableHostMemory(const ReadFile& read) {
  return std::min(OfMachine(read), OfControlGroups(read));
}

size_t AvailableHostMemory() { return AvailableHostMemory(&ReadFromDisk); }

}  // namespace tributary::worker
