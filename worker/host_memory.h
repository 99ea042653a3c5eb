// How much memory this process could still take.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>

namespace tributary::worker {

// A file's contents; nullopt when there is none or it cannot be read.
using ReadFile = std::function<std::optional<std::string>(const std::string& path)>;

// The least of what the machine would give (/proc/meminfo, MemAvailable) and of what the limits of
// this process's control group and of those around it leave, in bytes; SIZE_MAX when none says.
// Both hierarchies are looked at: cgroup v2 (memory.max) and v1 (memory.limit_in_bytes). File pages
// that the kernel drops before it refuses memory count as free.
size_t AvailableHostMemory(const ReadFile& read);

// Of this machine.
size_t AvailableHostMemory();

}  // namespace tributary::worker
