#include "kernels/cuda/attention.h"

#include <algorithm>
#include <bit>

#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/mma_attention.h"
#include "kernels/cuda/wgmma_attention.h"
#include "kernels/validate.h"

namespace tributary::cuda {
namespace {

Status FromCuda(const char* what, cudaError_t error) {
  if (error == cudaSuccess) return Status::Ok();
  return {StatusCode::kInternal, std::string(what) + ": " + cudaGetErrorString(error)};
}

// The widest block of columns whose accumulators fit the registers of two warpgroups.
int32_t WidestWgmma(int32_t head_dim) { return head_dim == 256 ? 32 : 64; }

int32_t MmaShareGroups(const AttentionShape& shape, int32_t columns) {
  int32_t warps = 0;
  const Status status = DispatchKvType(shape.kv, [&](auto kv) {
    return DispatchHeadDim(shape.head_dim, [&](auto head_dim) {
      warps = columns == 8 ? MmaWarps<kv(), head_dim(), 1>() : MmaWarps<kv(), head_dim(), 2>();
      return Status::Ok();
    });
  });
  return status.ok() ? warps : 1;
}

template <DType kKv, int kHeadDim>
cudaError_t Run(const KernelChoice& choice, const AttentionArgs& args, int blocks,
                cudaStream_t stream) {
  if (choice.kind == KernelKind::kMma) {
    return choice.columns == 8 ? RunMmaAttention<kKv, kHeadDim, 1>(args, blocks, stream)
                               : RunMmaAttention<kKv, kHeadDim, 2>(args, blocks, stream);
  }
  if (choice.columns == 16) return RunWgmmaAttention<kKv, kHeadDim, 16>(args, blocks, stream);
  if (choice.columns == 32) return RunWgmmaAttention<kKv, kHeadDim, 32>(args, blocks, stream);
  if constexpr (kHeadDim <= 128) {
    return RunWgmmaAttention<kKv, kHeadDim, 64>(args, blocks, stream);
  }
  return cudaErrorNotSupported;
}

}  // namespace

Status QueryDevice(int device, DeviceProperties* properties) {
  int major = 0;
  int minor = 0;
  Status status = FromCuda(
      "cudaDeviceGetAttribute",
      std::max({cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
                cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device),
                cudaDeviceGetAttribute(&properties->multiprocessors,
                                       cudaDevAttrMultiProcessorCount, device)}));
  properties->compute_capability = 10 * major + minor;
  return status;
}

std::string ToString(const KernelChoice& choice) {
  return std::string(choice.kind == KernelKind::kMma ? "mma, " : "wgmma, ") +
         std::to_string(choice.columns) + " columns";
}

KernelChoice ChooseKernel(const DeviceProperties& device, const AttentionShape& shape,
                          bool portable) {
  const int32_t columns = shape.max_rows * (shape.q_heads / shape.kv_heads);
  KernelChoice choice;
  // Columns beyond 16 would have mma_attention read the keys again, and mma.sync could not keep up.
  if (columns > (getenv("W16") ? 8 : 16) && device.compute_capability == 90 && !portable) {
    choice.kind = KernelKind::kWgmma;
    choice.columns = columns <= 16 ? 16 : columns <= 32 ? 32 : WidestWgmma(shape.head_dim);
    choice.share_groups = kWgmmaShareGroups;
    return choice;
  }
  choice.columns = columns <= 8 ? 8 : 16;
  choice.share_groups = MmaShareGroups(shape, choice.columns);
  return choice;
}

PlanShape PlanShapeFor(const KernelChoice& choice, const AttentionShape& shape,
                       const DeviceProperties& device, bool batch_invariant) {
  PlanShape plan;
  plan.group = shape.q_heads / shape.kv_heads;
  plan.kv_heads = shape.kv_heads;
  plan.columns_per_block = choice.columns;
  plan.share_groups = choice.share_groups;
  plan.blocks = device.multiprocessors;
  plan.batch_invariant = batch_invariant;
  return plan;
}

Status Validate(const AttentionShape& shape) {
  if (shape.kv_heads < 1) return InvalidArgument("kv.kv_heads: must be positive");
  if (shape.q_heads < 1 || shape.q_heads % shape.kv_heads != 0) {
    return InvalidArgument("q_heads: " + std::to_string(shape.q_heads) +
                           " is not a positive multiple of kv.kv_heads, " +
                           std::to_string(shape.kv_heads));
  }
  if (shape.q_heads / shape.kv_heads > kMaxGroup) {
    return Unsupported("q_heads: more than " + std::to_string(kMaxGroup) +
                       " query heads to a kv head");
  }
  if (shape.page_size < 16 || shape.page_size > 128 || !std::has_single_bit(unsigned(shape.page_size))) {
    return InvalidArgument("kv.page_size: " + std::to_string(shape.page_size) +
                           " is not 16, 32, 64 or 128");
  }
  return DispatchKvType(shape.kv, [&](auto) {
    return DispatchHeadDim(shape.head_dim, [](auto) { return Status::Ok(); });
  });
}

Status LaunchAttention(const KernelChoice& choice, const AttentionShape& shape,
                       const AttentionArgs& args, int32_t blocks, cudaStream_t stream) {
  if (Status status = Validate(shape); !status.ok()) return status;
  if (IsFp8(args.q_dtype)) {
    return Unsupported(std::string("q_dtype: ") + Name(args.q_dtype) + " is not f32, bf16 or f16");
  }
  return DispatchKvType(shape.kv, [&](auto kv) {
    return DispatchHeadDim(shape.head_dim, [&](auto head_dim) {
      return FromCuda("attention kernel", Run<kv(), head_dim()>(choice, args, blocks, stream));
    });
  });
}

}  // namespace tributary::cuda
