// What this processor can do, as far as the kernels choose by it.
#pragma once

namespace tributary::cpu {

// The bf16 dot-product instruction, and the byte permutes used with it. Obeys
// hwy::SetSupportedTargetsForTest.
bool HasBf16Dot();

// Whether the prefetcher reads on from lines that a program asks for, one of four (AskedLines in
// tiling.h). As measured: Zen 4 does, Intel's cores do not.
bool PrefetcherGoesOn();

}  // namespace tributary::cpu
