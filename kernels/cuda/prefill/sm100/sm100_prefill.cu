// The registered place of prefill on sm_100 (architectures.h): compiled, never chosen.
//
// Until kernels with tcgen05 can be run and measured, it holds the portable kernel as that
// architecture's own machine code. Whoever has such a GPU replaces it and sets `enabled`.
#include "kernels/cuda/architectures.h"
#include "kernels/cuda/prefill/sm80/mma_prefill.cuh"

namespace tributary::cuda {

static_assert(!FeaturesOf(100).tcgen05, "sm_100 has not been run yet");

template <DType kCompute, int kHeadDim>
cudaError_t RunSm100Prefill(const PrefillKernelArgs& args, int blocks, cudaStream_t stream) {
  using Traits = MmaPrefillTraits<kCompute, kHeadDim>;
  constexpr int kBytes = sizeof(typename Traits::Shared);
  const auto kernel = MmaPrefillKernel<Traits>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  kernel<<<blocks, Traits::kThreads, kBytes, stream>>>(args);
  return cudaGetLastError();
}

template cudaError_t RunSm100Prefill<DType::kBf16, 128>(const PrefillKernelArgs&, int,
                                                        cudaStream_t);
template cudaError_t RunSm100Prefill<DType::kF16, 128>(const PrefillKernelArgs&, int, cudaStream_t);

}  // namespace tributary::cuda
