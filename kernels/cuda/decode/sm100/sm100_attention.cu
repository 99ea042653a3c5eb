// The place of decode on sm_100. It compiles with every build whose CUDA knows the architecture, so
// that it does not rot, and is chosen by builds with TRIBUTARY_SM100_KERNELS (architectures.h).
//
// Until a kernel with tcgen05 can be run and measured, it holds the portable kernel, in its shapes,
// as sm_100's own machine code. Whoever has such a GPU replaces the kernel here, its query tiles in
// ChooseKernel (choose_kernel.cc), and the rows it is instantiated for.
#include "kernels/cuda/decode/sm100/sm100_attention.h"
#include "kernels/cuda/decode/sm80/mma_attention.cuh"
#include "kernels/head_dims.h"

namespace tributary::cuda {

template <DType kKv, int kKeyDim, int kValueDim, int kRowTiles, int kBlocksPerMultiprocessor>
cudaError_t RunSm100Attention(const AttentionArgs& args, const Grid& grid, cudaStream_t stream) {
  using Traits = MmaTraits<kKv, kKeyDim, kValueDim, kRowTiles, kBlocksPerMultiprocessor>;
  static_assert(HasKernel<&HeadDims::decode_sm100>(kKeyDim, kValueDim));
  return LaunchGrid(MmaAttentionKernel<Traits>, args, grid, Traits::kThreads,
                    sizeof(typename Traits::Shared), stream);
}

#define TRIBUTARY_SM100_SHAPE(kv, tiles, blocks)                                            \
  template cudaError_t RunSm100Attention<kv, 128, 128, tiles, blocks>(const AttentionArgs&, \
                                                                      const Grid&, cudaStream_t);
#define TRIBUTARY_SM100_ATTENTION(kv) \
  TRIBUTARY_SM100_SHAPE(kv, 1, 1)     \
  TRIBUTARY_SM100_SHAPE(kv, 1, 2)     \
  TRIBUTARY_SM100_SHAPE(kv, 2, 1)     \
  TRIBUTARY_SM100_SHAPE(kv, 2, 2)

TRIBUTARY_SM100_ATTENTION(DType::kBf16)
TRIBUTARY_SM100_ATTENTION(DType::kF16)
TRIBUTARY_SM100_ATTENTION(DType::kFp8E4M3)
TRIBUTARY_SM100_ATTENTION(DType::kFp8E5M2)

}  // namespace tributary::cuda
