// Which family of kernels an architecture runs: a table, and a pure function of it.
//
// Every family is registered, also those that nobody could run yet: they compile, so that they do
// not rot, and are not chosen. What is chosen instead is the next family that the device can run.
#pragma once

#include <array>
#include <cstdint>

namespace tributary::cuda {

enum class KernelFamily {
  kPortable,  // mma.sync
  kSm90,      // wgmma, bulk copies
  kSm100,     // the place of kernels with tcgen05; sm100_prefill.cu
};

struct FamilyEntry {
  KernelFamily family;
  const char* name;
  int32_t min_capability;  // 10 * major + minor, both inclusive
  int32_t max_capability;
  bool enabled;  // false: compiled only
};

// The most special first.
inline constexpr std::array<FamilyEntry, 3> kKernelFamilies = {{
    {KernelFamily::kSm100, "sm_100a", 100, 103, false},
    {KernelFamily::kSm90, "sm_90a", 90, 90, true},
    {KernelFamily::kPortable, "portable", 80, INT32_MAX, true},
}};

constexpr KernelFamily ChooseFamily(int32_t capability, bool portable) {
  for (const FamilyEntry& entry : kKernelFamilies) {
    if (!entry.enabled || (portable && entry.family != KernelFamily::kPortable)) continue;
    if (capability >= entry.min_capability && capability <= entry.max_capability) {
      return entry.family;
    }
  }
  return KernelFamily::kPortable;
}

}  // namespace tributary::cuda
