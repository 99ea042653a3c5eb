// The place of prefill on sm_100. It compiles with every build whose CUDA knows the architecture,
// so that it does not rot, and is chosen by builds with TRIBUTARY_SM100_KERNELS (architectures.h).
//
// Until a kernel with tcgen05 can be run and measured, it holds the portable kernel as sm_100's own
// machine code. Whoever has such a GPU replaces the kernel here, its sizes in
// sm100_prefill_config.h, and the rows it is instantiated for.
#include "kernels/cuda/prefill/sm100/sm100_prefill.h"
#include "kernels/cuda/prefill/sm100/sm100_prefill_config.h"
#include "kernels/cuda/prefill/sm80/mma_prefill.cuh"
#include "kernels/head_dims.h"

namespace tributary::cuda {

template <DType kCompute, int kKeyDim, int kValueDim>
cudaError_t RunSm100Prefill(const PrefillKernelArgs& args, int blocks, cudaStream_t stream) {
  using Traits = MmaPrefillTraits<kCompute, kKeyDim, kValueDim>;
  static_assert(Traits::kRows == Sm100PrefillRows(kValueDim));
  static_assert(Traits::kKeys == Sm100PrefillKeys(kKeyDim));
  static_assert(HasKernel<&HeadDims::prefill_sm100>(kKeyDim, kValueDim));
  constexpr int kBytes = sizeof(typename Traits::Shared);
  const auto kernel = MmaPrefillKernel<Traits>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  kernel<<<blocks, Traits::kThreads, kBytes, stream>>>(args);
  return cudaGetLastError();
}

template cudaError_t RunSm100Prefill<DType::kBf16, 128, 128>(const PrefillKernelArgs&, int,
                                                             cudaStream_t);
template cudaError_t RunSm100Prefill<DType::kF16, 128, 128>(const PrefillKernelArgs&, int,
                                                            cudaStream_t);

}  // namespace tributary::cuda
