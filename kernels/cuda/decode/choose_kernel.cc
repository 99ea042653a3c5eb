#include <algorithm>
#include <bit>

#include "kernels/cuda/architectures.h"
#include "kernels/cuda/decode/attention.h"
#include "kernels/cuda/decode/sm80/mma_attention.h"
#include "kernels/cuda/decode/sm90/wgmma_attention.h"
#include "kernels/cuda/decode/sm90/wgmma_fp8_attention.h"
#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/launch/cluster.h"
#include "kernels/cuda/layout/page_layout.h"
#include "kernels/cuda/status.h"
#include "kernels/head_dims.h"

namespace tributary::cuda {
namespace {

constexpr int32_t kWidestMma = 16;

// Clusters of `size` blocks that run at once.
int32_t Clusters(const DeviceProperties& device, int32_t size) {
  if (size == 1) return device.multiprocessors;
  const int32_t known = device.clusters[std::bit_width(unsigned(size)) - 2];
  // Processors share a cluster only inside a part of the chip that has 16 or 18 of them.
  return known > 0 ? known : std::max(1, device.multiprocessors / 16 * 16 / size);
}

// What beginning and ending a piece of a job costs, as bytes that a block could have read instead;
// by two blocks to a multiprocessor, which read half as fast each, somewhat more than half.
constexpr int64_t kPieceBytes = 128 * 1024;
constexpr int64_t kPieceBytesOfTwo = 80 * 1024;

// The same as DecodePlanShape has it.
int32_t PieceCost(const KernelChoice& choice, const AttentionShape& shape) {
  const int64_t share_bytes =
      BytesPerTokenOfHead(shape.geometry) * kStripSlots * choice.share_strips;
  const int64_t bytes = choice.blocks_per_multiprocessor == 2 ? kPieceBytesOfTwo : kPieceBytes;
  return static_cast<int32_t>((bytes << kShareBits) / share_bytes);
}

// Calls f.operator()<tiles, blocks per multiprocessor>() for the choice.
template <typename F>
auto DispatchMma(const KernelChoice& choice, F f) {
  if (choice.tile_rows == 8) {
    return choice.blocks_per_multiprocessor == 1 ? f.template operator()<1, 1>()
                                                 : f.template operator()<1, 2>();
  }
  return choice.blocks_per_multiprocessor == 1 ? f.template operator()<2, 1>()
                                               : f.template operator()<2, 2>();
}

int32_t MmaShareStrips(const AttentionShape& shape, const KernelChoice& choice) {
  int32_t warps = 1;
  const KvGeometry& g = shape.geometry;
  const Status status = DispatchKvType(g.dtype, [&](auto kv) {
    return DispatchHeadDims<&HeadDims::decode_sm80>(
        g.key_dim, g.value_dim, [&](auto key_dim, auto value_dim) {
          warps = DispatchMma(choice, [&]<int kTiles, int kBlocks>() {
            return MmaWarps<kv(), key_dim(), value_dim(), kTiles, kBlocks>();
          });
          return Status::Ok();
        });
  });
  return status.ok() ? warps : 1;
}

// Cutting few jobs into many pieces, one large block to a multiprocessor merges half as many; with
// many jobs, a second block hides where the first one's items end.
int32_t BlocksPerMultiprocessor(const DeviceProperties& device, const AttentionShape& shape,
                                int32_t columns) {
  const int64_t jobs = int64_t{shape.sequences} * shape.geometry.kv_heads *
                       ((columns + kWidestMma - 1) / kWidestMma);
  return 2 * jobs < 3 * int64_t{device.multiprocessors} ? 1 : 2;
}

// Bytes of the cache to a multiprocessor from which a call is long.
constexpr int64_t kLongCall = 192 * 1024;

// Whether a call reads more than `times` what makes it long.
bool IsLong(const DeviceProperties& device, const AttentionShape& shape, int32_t times = 1) {
  const int64_t bytes =
      BytesPerTokenOfHead(shape.geometry) * shape.geometry.kv_heads * shape.total_keys;
  return bytes > times * kLongCall * device.multiprocessors;
}

// Columns beyond 16 would have mma_attention read the keys again, and mma.sync could not keep up.
// With 16, bf16 and f16 rows of 256 leave it registers for eight warps a multiprocessor, too few to
// keep memory busy. So do those of FP8, to a lesser degree: there wgmma_attention gains 6%, and 2
// to 4% with rows of 128, but begins so much later that only long calls are repaid. Batch-invariant
// results take the same kernel whatever the length.
int32_t WidestMmaOnHopper(const DeviceProperties& device, const AttentionShape& shape,
                          const KernelOptions& options) {
  if (shape.geometry.key_dim < 128) return kWidestMma;
  if (!IsFp8(shape.geometry.dtype))
    return shape.geometry.key_dim == 256 ? kWidestMma / 2 : kWidestMma;
  const bool repaid = IsLong(device, shape, shape.geometry.key_dim == 256 ? 2 : 6);
  return repaid && !options.batch_invariant ? kWidestMma / 2 : kWidestMma;
}

// Slots of a sequence of which a block's warpgroups have four tiles each.
constexpr int64_t kFewTiles = 4 * 16 * int64_t{kWgmmaShareStrips};

// Whether a cluster to each job leaves so little to a block that cutting jobs would not be worth
// the merging.
bool OneClusterAJob(const AttentionShape& shape, int32_t size) {
  return shape.total_keys > 0 && shape.total_keys <= int64_t{shape.sequences} * size * kFewTiles;
}

// Whether the kernel of 64 columns is wgmma_fp8_attention.cuh's, for queries in bf16.
bool IsWideFp8(const KernelChoice& choice, const AttentionShape& shape) {
  return choice.kind == KernelKind::kWgmma && choice.tile_rows == 64 &&
         IsFp8(shape.geometry.dtype) && HasKernel<&HeadDims::decode_sm90_fp8>(shape.geometry);
}

// Its blocks collect the pieces of a job as these come, so that there may be many: a pair only
// where a job would have fewer than four blocks, and a larger cluster where nothing is left to cut.
int32_t ClusterSizeOfWideFp8(const DeviceProperties& device, const AttentionShape& shape,
                             int64_t jobs) {
  for (int32_t size = kMaxClusterSize; size > 2; size /= 2) {
    if (jobs <= Clusters(device, size) && OneClusterAJob(shape, size)) return size;
  }
  return 4 * jobs > device.multiprocessors && jobs <= Clusters(device, 2) ? 2 : 1;
}

// What the blocks of a cluster found is merged without a detour through memory, but clusters are
// clumsy to deal work to: so they are as large as leaves three to a job. Pieces of wide blocks are
// so large that a pair to a job still gains, and a larger cluster where nothing is left to cut.
// Clusters of more than a pair leave multiprocessors idle, about one in ten: a long call loses more
// by that than merging costs.
int32_t ClusterSize(const DeviceProperties& device, const AttentionShape& shape,
                    const KernelChoice& choice, int32_t columns) {
  const int64_t jobs = int64_t{shape.sequences} * shape.geometry.kv_heads *
                       ((columns + choice.tile_rows - 1) / choice.tile_rows);
  if (IsWideFp8(choice, shape)) return ClusterSizeOfWideFp8(device, shape, jobs);
  const bool wide = choice.kind == KernelKind::kWgmma;
  for (int32_t size = IsLong(device, shape) ? 2 : kMaxClusterSize; size > 1; size /= 2) {
    const int32_t clusters = Clusters(device, size);
    if (3 * jobs <= clusters) return size;
    if (wide && jobs <= clusters && (size == 2 || OneClusterAJob(shape, size))) return size;
  }
  return 1;
}

// Whether the kernel is wgmma_fp8_attention.cuh's.
bool IsWideFp8(const KernelChoice& choice, const AttentionShape& shape, DType q, float soft_cap) {
  return IsWideFp8(choice, shape) && q == DType::kBf16 && soft_cap == 0.0f;
}

template <DType kKv, int kKeyDim, int kValueDim>
cudaError_t Run(const KernelChoice& choice, const AttentionShape& shape, const AttentionArgs& args,
                const Grid& grid, cudaStream_t stream) {
  if (choice.kind == KernelKind::kMma) {
    return DispatchMma(choice, [&]<int kTiles, int kBlocks>() {
      return RunMmaAttention<kKv, kKeyDim, kValueDim, kTiles, kBlocks>(args, grid, stream);
    });
  }
  if constexpr (IsFp8(kKv) && HasKernel<&HeadDims::decode_sm90_fp8>(kKeyDim, kValueDim)) {
    if (IsWideFp8(choice, shape, args.q_dtype, args.soft_cap)) {
      return RunWgmmaFp8Attention<kKv>(args, grid, stream);
    }
  }
  if constexpr (HasKernel<&HeadDims::decode_sm90>(kKeyDim, kValueDim)) {
    if (choice.tile_rows == 32) {
      return RunWgmmaAttention<kKv, kKeyDim, kValueDim, 32>(args, grid, stream);
    }
    if constexpr (WidestWgmma(kValueDim) == 64) {
      return RunWgmmaAttention<kKv, kKeyDim, kValueDim, 64>(args, grid, stream);
    }
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
  if (major >= 9) status = CudaStatus(QueryClusters(properties->clusters), "cluster query");
  return status;
}

std::string ToString(const KernelChoice& choice) {
  return std::string(choice.kind == KernelKind::kMma ? "mma, " : "wgmma, ") +
         std::to_string(choice.tile_rows) + " columns" +
         (choice.blocks_per_multiprocessor == 2 ? ", 2 blocks" : "") +
         (choice.cluster_size > 1 ? ", clusters of " + std::to_string(choice.cluster_size) : "") +
         (choice.fp8_queries ? ", fp8 queries" : "");
}

KernelChoice ChooseKernel(const DeviceProperties& device, const AttentionShape& shape,
                          const KernelOptions& options) {
  const int32_t columns = shape.max_rows * (shape.q_heads / shape.geometry.kv_heads);
  const Features can = FeaturesOf(device.compute_capability, options.portable);
  const bool wgmma = can.wgmma && HasKernel<&HeadDims::decode_sm90>(shape.geometry);
  KernelChoice choice;
  choice.batch_invariant = options.batch_invariant;
  choice.fp8_queries = options.fp8_queries;
  choice.begins_early = can.early_launch && options.begins_early;
  if (wgmma && columns > WidestMmaOnHopper(device, shape, options)) {
    choice.kind = KernelKind::kWgmma;
    choice.tile_rows = columns <= 32 ? 32 : WidestWgmma(shape.geometry.value_dim);
    choice.share_strips = kWgmmaShareStrips;
  } else {
    choice.tile_rows = columns <= 8 ? 8 : kWidestMma;
    // The shape of a block decides in which order a row's keys are added up.
    choice.blocks_per_multiprocessor =
        options.batch_invariant ? 2 : BlocksPerMultiprocessor(device, shape, columns);
    choice.share_strips = MmaShareStrips(shape, choice);
  }
  if (can.clusters && !options.batch_invariant && choice.blocks_per_multiprocessor == 1) {
    choice.cluster_size = ClusterSize(device, shape, choice, columns);
  }
  return choice;
}

DecodePlanShape DecodePlanShapeFor(const KernelChoice& choice, const AttentionShape& shape,
                                   const DeviceProperties& device) {
  DecodePlanShape plan;
  plan.gqa_ratio = shape.q_heads / shape.geometry.kv_heads;
  plan.kv_heads = shape.geometry.kv_heads;
  plan.tile_rows = choice.tile_rows;
  plan.share_strips = choice.share_strips * choice.cluster_size;
  plan.blocks = Clusters(device, choice.cluster_size) * choice.blocks_per_multiprocessor;
  plan.cluster_size = choice.cluster_size;
  plan.split_cost = PieceCost(choice, shape);
  plan.lone_splits = choice.kind == KernelKind::kWgmma || choice.cluster_size > 1;
  plan.batch_invariant = choice.batch_invariant;
  return plan;
}

Status Validate(const AttentionShape& shape) {
  if (shape.geometry.kv_heads < 1) return InvalidArgument("kv.kv_heads: must be positive");
  if (shape.q_heads < 1 || shape.q_heads % shape.geometry.kv_heads != 0) {
    return InvalidArgument("q_heads: " + std::to_string(shape.q_heads) +
                           " is not a positive multiple of kv.kv_heads, " +
                           std::to_string(shape.geometry.kv_heads));
  }
  if (shape.q_heads / shape.geometry.kv_heads > kMaxGqaRatio) {
    return Unsupported("q_heads: more than " + std::to_string(kMaxGqaRatio) +
                       " query heads per KV head");
  }
  if (shape.page_size < 16 || shape.page_size > 128 ||
      !std::has_single_bit(unsigned(shape.page_size))) {
    return InvalidArgument("kv.page_size: " + std::to_string(shape.page_size) +
                           " is not 16, 32, 64 or 128");
  }
  if (shape.geometry.value_in_key) return Unsupported("kv.value_in_key: is not supported");
  return DispatchKvType(shape.geometry.dtype, [&](auto) {
    return DispatchHeadDims<&HeadDims::decode_sm80>(
        shape.geometry.key_dim, shape.geometry.value_dim, [](auto, auto) { return Status::Ok(); });
  });
}

Status Validate(const AttentionShape& shape, const KernelOptions& options) {
  if (Status status = Validate(shape); !status.ok()) return status;
  if (options.fp8_queries && !IsFp8(shape.geometry.dtype)) {
    return Unsupported(std::string("fp8_queries: the cache is ") + Name(shape.geometry.dtype) +
                       ", not FP8");
  }
  return Status::Ok();
}

int32_t LateStripsOf(int32_t tokens) {
  return tokens <= 0 ? 0 : (tokens + kStripSlots - 2) / kStripSlots + 1;
}

bool MayAttendBlock(const KernelChoice& choice, const AttentionShape& shape, DType q,
                    DType block_kv, float soft_cap) {
  return block_kv == DType::kBf16 && IsWideFp8(choice, shape, q, soft_cap);
}

Status LaunchAttention(const KernelChoice& choice, const AttentionShape& shape,
                       const AttentionArgs& args, int32_t blocks, cudaStream_t stream) {
  if (Status status = Validate(shape, {.fp8_queries = choice.fp8_queries}); !status.ok()) {
    return status;
  }
  if (IsFp8(args.q_dtype)) {
    return Unsupported(std::string("q_dtype: ") + Name(args.q_dtype) + " is not f32, bf16 or f16");
  }
  if (args.block.k != nullptr &&
      !MayAttendBlock(choice, shape, args.q_dtype, DType::kBf16, args.soft_cap)) {
    return Unsupported("block: only the kernel of 64 columns of FP8 takes one along");
  }
  AttentionArgs complete = args;
  complete.fp8_queries = choice.fp8_queries;
  complete.gqa_ratio = args.q_heads / args.kv_heads;
  complete.inverse_gqa_ratio = 1.0f / static_cast<float>(complete.gqa_ratio);
  const KvGeometry& g = shape.geometry;
  return DispatchKvType(g.dtype, [&](auto kv) {
    return DispatchHeadDims<&HeadDims::decode_sm80>(
        g.key_dim, g.value_dim, [&](auto key_dim, auto value_dim) {
          const Grid grid{blocks, choice.cluster_size, choice.begins_early};
          return CudaStatus(
              Run<kv(), key_dim(), value_dim()>(choice, shape, complete, grid, stream),
              "attention kernel");
        });
  });
}

}  // namespace tributary::cuda
