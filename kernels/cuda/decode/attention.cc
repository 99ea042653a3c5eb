#include "kernels/cuda/decode/attention.h"

#include <algorithm>
#include <string>

#include "kernels/cuda/architectures.h"
#include "kernels/cuda/decode/dispatch_mma.h"
#include "kernels/cuda/decode/sm100/sm100_attention.h"
#include "kernels/cuda/decode/sm80/mma_attention.h"
#include "kernels/cuda/decode/sm90/mma_rings.h"
#include "kernels/cuda/decode/sm90/wgmma_attention.h"
#include "kernels/cuda/decode/sm90/wgmma_fp8_attention.h"
#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/launch/cluster.h"
#include "kernels/cuda/layout/page_layout.h"
#include "kernels/cuda/status.h"
#include "kernels/head_dims.h"
#include "kernels/soft_cap.h"

namespace tributary::cuda {
namespace {

template <DType kKv, int kKeyDim, int kValueDim>
cudaError_t RunMma(const KernelChoice& choice, const AttentionArgs& args, const Grid& grid,
                   cudaStream_t stream) {
  if constexpr (kKv == DType::kNvfp4 && HasKernel<&HeadDims::decode_sm90>(kKeyDim, kValueDim)) {
    if (choice.rings) {
      return DispatchMmaShape(choice, [&]<int kRowTiles, int kBlocks>() {
        return RunMmaWithRings<kKv, kKeyDim, kValueDim, kRowTiles, kBlocks>(args, grid, stream);
      });
    }
  }
  return DispatchMmaShape(choice, [&]<int kRowTiles, int kBlocks>() {
    return RunMmaAttention<kKv, kKeyDim, kValueDim, kRowTiles, kBlocks>(args, grid, stream);
  });
}

template <DType kKv, int kKeyDim, int kValueDim>
cudaError_t RunWgmma(const KernelChoice& choice, const AttentionArgs& args, const Grid& grid,
                     cudaStream_t stream) {
  if constexpr (HasKernel<&HeadDims::decode_sm90>(kKeyDim, kValueDim)) {
    if (choice.tile_rows == 32) {
      return RunWgmmaAttention<kKv, kKeyDim, kValueDim, 32>(args, grid, stream);
    }
    if constexpr (WidestWgmmaTile(kValueDim) == 64) {
      return RunWgmmaAttention<kKv, kKeyDim, kValueDim, 64>(args, grid, stream);
    }
  }
  return cudaErrorNotSupported;
}

template <DType kKv, int kKeyDim, int kValueDim>
cudaError_t RunWgmmaFp8(const AttentionArgs& args, const Grid& grid, cudaStream_t stream) {
  if constexpr (HasWgmmaFp8(kKv, kKeyDim, kValueDim)) {
    return RunWgmmaFp8Attention<kKv, kKeyDim>(args, grid, stream);
  }
  return cudaErrorNotSupported;
}

template <DType kKv, int kKeyDim, int kValueDim>
cudaError_t RunSm100(const KernelChoice& choice, const AttentionArgs& args, const Grid& grid,
                     cudaStream_t stream) {
  if constexpr (kHasSm100Kernels && kKv != DType::kNvfp4 &&
                HasKernel<&HeadDims::decode_sm100>(kKeyDim, kValueDim)) {
    return DispatchMmaShape(choice, [&]<int kRowTiles, int kBlocks>() {
      return RunSm100Attention<kKv, kKeyDim, kValueDim, kRowTiles, kBlocks>(args, grid, stream);
    });
  }
  return cudaErrorNotSupported;
}

template <DType kKv, int kKeyDim, int kValueDim>
cudaError_t Run(const KernelChoice& choice, const AttentionArgs& args, const Grid& grid,
                cudaStream_t stream) {
  switch (LaunchedKind(choice, args.q_dtype, args.soft_cap)) {
    case KernelKind::kMma:
      return RunMma<kKv, kKeyDim, kValueDim>(choice, args, grid, stream);
    case KernelKind::kWgmma:
      return RunWgmma<kKv, kKeyDim, kValueDim>(choice, args, grid, stream);
    case KernelKind::kWgmmaFp8:
      return RunWgmmaFp8<kKv, kKeyDim, kValueDim>(args, grid, stream);
    case KernelKind::kTcgen05:
      return RunSm100<kKv, kKeyDim, kValueDim>(choice, args, grid, stream);
  }
  return cudaErrorNotSupported;
}

}  // namespace

Status QueryDevice(int device, DeviceProperties* properties) {
  int major = 0;
  int minor = 0;
  Status status = CudaStatus(
      std::max({cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
                cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device),
                cudaDeviceGetAttribute(&properties->multiprocessors, cudaDevAttrMultiProcessorCount,
                                       device)}),
      "cudaDeviceGetAttribute");
  if (!status.ok()) return status;
  properties->compute_capability = 10 * major + minor;
  if (major >= 9) status = CudaStatus(QueryClusters(device, properties->clusters), "cluster query");
  return status;
}

int32_t LateStripsOf(int32_t tokens) {
  return tokens <= 0 ? 0 : (tokens + kStripSlots - 2) / kStripSlots + 1;
}

bool MayAttendBlock(const KernelChoice& choice, DType q, DType block_kv, float soft_cap) {
  return block_kv == DType::kBf16 && LaunchedKind(choice, q, soft_cap) == KernelKind::kWgmmaFp8;
}

Status LaunchAttention(const KernelChoice& choice, const AttentionShape& shape,
                       const AttentionArgs& args, int32_t blocks, cudaStream_t stream) {
  if (Status status = Validate(shape, {.fp8_queries = choice.fp8_queries}); !status.ok()) {
    return status;
  }
  if (!IsUnscaled(args.q_dtype)) {
    return Unsupported(std::string("q_dtype: ") + Name(args.q_dtype) + " is not f32, bf16 or f16");
  }
  if (args.q_heads != shape.q_heads || args.kv_heads != shape.geometry.kv_heads) {
    return InvalidArgument("q_heads, kv_heads: " + std::to_string(args.q_heads) + " and " +
                           std::to_string(args.kv_heads) + " are not those of the shape, " +
                           std::to_string(shape.q_heads) + " and " +
                           std::to_string(shape.geometry.kv_heads));
  }
  if (args.block.k != nullptr &&
      !MayAttendBlock(choice, args.q_dtype, DType::kBf16, args.soft_cap)) {
    return Unsupported("block: only wgmma_fp8_attention takes a draft block along");
  }
  if (args.beside == Beside::kLastLaunch && choice.kind != KernelKind::kMma) {
    return Unsupported("beside: only mma_attention runs beside the launch ahead of it");
  }
  AttentionArgs complete = args;
  complete.fp8_queries = choice.fp8_queries;
  complete.soft_cap = BoundedSoftCap(args.soft_cap);
  complete.gqa_ratio = args.q_heads / args.kv_heads;
  complete.inverse_gqa_ratio = 1.0f / static_cast<float>(complete.gqa_ratio);
  const KvGeometry& g = shape.geometry;
  return DispatchKvType(g.dtype, [&](auto kv) {
    return DispatchHeadDims<&HeadDims::decode_sm80>(
        g.key_dim, g.value_dim, [&](auto key_dim, auto value_dim) {
          const Grid grid{blocks, choice.cluster_size, choice.begins_early};
          return CudaStatus(Run<kv(), key_dim(), value_dim()>(choice, complete, grid, stream),
                            "attention kernel");
        });
  });
}

}  // namespace tributary::cuda
