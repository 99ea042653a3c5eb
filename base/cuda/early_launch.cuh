// How a kernel takes part in an early launch (programmatic dependent launch): the launch behind it
// in the stream may begin before it has ended, and the launch itself may have begun so.
//
// Both do nothing on devices that know no early launch, which are those before sm_90.
#pragma once

namespace tributary::cuda {

// Lets the next launch of the stream begin, when it was launched to begin early.
__device__ __forceinline__ void LetNextLaunchBegin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the launches ahead have ended and what they wrote can be read. Before it, only what
// no kernel writes may be read, and nothing may be written.
__device__ __forceinline__ void WaitForLaunchesAhead() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace tributary::cuda
