#pragma once

#include "kernels/cuda/prefill/sm80/mma_prefill.cuh"
#include "kernels/cuda/prefill/sm80/mma_prefill.h"

namespace tributary::cuda {

template <DType kCompute, int kHeadDim>
cudaError_t RunMmaPrefill(const PrefillKernelArgs& args, int blocks, cudaStream_t stream) {
  using Traits = MmaPrefillTraits<kCompute, kHeadDim>;
  const auto kernel = MmaPrefillKernel<Traits>;
  constexpr int kBytes = sizeof(typename Traits::Shared);
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  kernel<<<blocks, Traits::kThreads, kBytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace tributary::cuda

// One head dim, both types computed in.
#define TRIBUTARY_MMA_PREFILL(head_dim)                                                     \
  namespace tributary::cuda {                                                               \
  template cudaError_t RunMmaPrefill<DType::kBf16, head_dim>(const PrefillKernelArgs&, int, \
                                                             cudaStream_t);                 \
  template cudaError_t RunMmaPrefill<DType::kF16, head_dim>(const PrefillKernelArgs&, int,  \
                                                            cudaStream_t);                  \
  }
