#include "kernels/cpu/instruction_set.h"

#include <cstdint>

#include "kernels/cpu/backend.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/instruction_set.cc"
#include "hwy/foreach_target.h"
// After foreach_target:
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace tributary::cpu {
namespace HWY_NAMESPACE {

int64_t ThisTarget() { return HWY_TARGET; }

}  // namespace HWY_NAMESPACE
}  // namespace tributary::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tributary::cpu {

// Asked of the dispatch table, not of hwy::SupportedTargets(): that executes CPUID every time,
// which costs tens of microseconds in a virtual machine.
HWY_EXPORT(ThisTarget);

bool HasBf16Dot() {
#if defined(__x86_64__)
  static const bool cpu_has_it = __builtin_cpu_supports("avx512bf16") != 0;
  return cpu_has_it && HWY_DYNAMIC_DISPATCH(ThisTarget)() == HWY_AVX3_DL;
#else
  return false;
#endif
}

bool PrefetcherGoesOn() {
#if defined(__x86_64__)
  static const bool goes_on = __builtin_cpu_is("intel") == 0;
  return goes_on;
#else
  return true;
#endif
}

const char* InstructionSet() {
  return HasBf16Dot() ? "AVX3_DL+BF16" : hwy::TargetName(HWY_DYNAMIC_DISPATCH(ThisTarget)());
}

}  // namespace tributary::cpu
#endif  // HWY_ONCE
