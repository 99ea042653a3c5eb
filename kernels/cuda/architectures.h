// What the kernels of an architecture can do: a table, and a pure function of it.
//
// Choices ask for a feature ("does it have clusters?"), never for an architecture by name. Every
// architecture that has kernels of its own is registered, also one whose kernels nobody could run
// yet: they compile, so that they do not rot, and are not chosen until the entry is enabled. A
// device runs the first entry that is enabled and that covers its compute capability.
#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace tributary::cuda {

// What the machine code that runs on a device makes use of. The portable code does without all of
// it, whatever the device has: on one newer than the table it is compiled from PTX of sm_80.
struct Features {
  bool early_launch = false;  // a launch may begin while the one ahead of it ends
  bool clusters = false;      // thread blocks that merge through each other's shared memory
  bool bulk_copies = false;   // the copy engine: cp.async.bulk, tensor maps
  bool wgmma = false;         // products of warpgroups: decode/sm90, prefill/sm90
  bool tcgen05 = false;       // products of sm_100: decode/sm100, prefill/sm100

  bool operator==(const Features&) const = default;
};

struct Architecture {
  const char* name;
  int32_t min_capability;  // 10 * major + minor, both inclusive
  int32_t max_capability;
  bool enabled;  // false: compiled only
  Features features;
};

// Whether the build links the kernels of sm_100 (CMake: TRIBUTARY_SM100_KERNELS).
#ifdef TRIBUTARY_SM100_KERNELS
inline constexpr bool kHasSm100Kernels = true;
#else
inline constexpr bool kHasSm100Kernels = false;
#endif

// The most special first; the last is the portable one, which every device can run.
inline constexpr std::array<Architecture, 3> kArchitectures = {{
    {"sm_100a",
     100,
     103,
     kHasSm100Kernels,
     {.early_launch = true, .clusters = true, .bulk_copies = true, .tcgen05 = true}},
    {"sm_90a",
     90,
     90,
     true,
     {.early_launch = true, .clusters = true, .bulk_copies = true, .wgmma = true}},
    {"portable", 80, INT32_MAX, true, {}},
}};

// What the code that a device of this capability runs can do. `portable` leaves out what only some
// architectures have.
constexpr Features FeaturesOf(int32_t capability, bool portable = false,
                              std::span<const Architecture> table = kArchitectures) {
  if (portable) return table.back().features;
  for (const Architecture& entry : table) {
    if (!entry.enabled) continue;
    if (capability >= entry.min_capability && capability <= entry.max_capability) {
      return entry.features;
    }
  }
  return table.back().features;
}

}  // namespace tributary::cuda
