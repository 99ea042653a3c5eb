// The launch of mma_prefill, and the macro that instantiates it for one pair of head dims.
#pragma once

#include "kernels/cuda/prefill/sm80/mma_prefill.cuh"
#include "kernels/cuda/prefill/sm80/mma_prefill.h"

namespace tributary::cuda {

template <DType kCompute, int kKeyDim, int kValueDim>
cudaError_t RunMmaPrefill(const PrefillKernelArgs& args, int blocks, cudaStream_t stream) {
  using Traits = MmaPrefillTraits<kCompute, kKeyDim, kValueDim>;
  const auto kernel = MmaPrefillKernel<Traits>;
  constexpr int kBytes = sizeof(typename Traits::Shared);
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  kernel<<<blocks, Traits::kThreads, kBytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace tributary::cuda

// Both types computed in, for one dimension of keys and one of values.
#define TRIBUTARY_MMA_PREFILL(key_dim, value_dim)                                                \
  namespace tributary::cuda {                                                                    \
  template cudaError_t RunMmaPrefill<DType::kBf16, key_dim, value_dim>(const PrefillKernelArgs&, \
                                                                       int, cudaStream_t);       \
  template cudaError_t RunMmaPrefill<DType::kF16, key_dim, value_dim>(const PrefillKernelArgs&,  \
                                                                      int, cudaStream_t);        \
  }
