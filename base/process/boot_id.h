// The running kernel's name of itself, by which processes find out whether they share a machine.
#pragma once

#include <fstream>
#include <string>

namespace tributary {

// The same in every process and container of one machine until it boots again; empty when the
// system does not say.
inline std::string BootId() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string line;
  std::getline(file, line);
  return line;
}

}  // namespace tributary
