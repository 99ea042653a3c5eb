#include "kernels/cpu/instruction_set.h"

#include "hwy/targets.h"
#include "kernels/cpu/backend.h"

namespace tributary::cpu {

bool HasBf16Dot() {
#if defined(__x86_64__)
  static const bool cpu_has_it = __builtin_cpu_supports("avx512bf16") != 0;
  return cpu_has_it && (hwy::SupportedTargets() & HWY_AVX3_DL) != 0;
#else
  return false;
#endif
}

const char* InstructionSet() {
  if (HasBf16Dot()) return "AVX3_DL+BF16";
  const int64_t supported = hwy::SupportedTargets() & HWY_TARGETS;
  return hwy::TargetName(supported & -supported);  // lower bits are better targets
}

}  // namespace tributary::cpu
