// What this processor can do, as far as the kernels choose by it.
#pragma once

namespace tributary::cpu {

// The bf16 dot-product instruction, and the byte permutes used with it. Obeys
// hwy::SetSupportedTargetsForTest.
bool HasBf16Dot();

}  // namespace tributary::cpu
