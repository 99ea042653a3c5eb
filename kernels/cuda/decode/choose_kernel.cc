#include "kernels/cuda/decode/choose_kernel.h"

#include <algorithm>
#include <bit>

#include "kernels/cuda/decode/dispatch_mma.h"
#include "kernels/cuda/decode/sm80/mma_config.h"
#include "kernels/cuda/decode/sm90/wgmma_attention.h"
#include "kernels/cuda/decode/sm90/wgmma_fp8_attention.h"
#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/launch/grid.h"
#include "kernels/cuda/layout/page_layout.h"
#include "kernels/head_dims.h"

namespace tributary::cuda {
namespace {

constexpr int32_t kWidestMmaTile = 16;

// How many clusters of `size` thread blocks run at once.
int32_t Clusters(const DeviceProperties& device, int32_t size) {
  if (size == 1) return device.multiprocessors;
  const int32_t known = device.clusters[std::bit_width(unsigned(size)) - 2];
  // A cluster lies inside a part of the chip that has 16 or 18 multiprocessors.
  return known > 0 ? known : std::max(1, device.multiprocessors / 16 * 16 / size);
}

// What beginning and ending a split costs, as bytes that the thread block could have read instead.
// Two thread blocks on a multiprocessor read half as fast each, and lose somewhat more than half.
constexpr int64_t kSplitBytes = 128 * 1024;
constexpr int64_t kSplitBytesOfTwo = 80 * 1024;

// DecodePlanShape::split_cost.
int32_t SplitCost(const KernelChoice& choice, const AttentionShape& shape) {
  const int64_t share_bytes =
      BytesPerTokenOfHead(shape.geometry) * kStripSlots * choice.share_strips;
  const int64_t bytes = choice.blocks_per_multiprocessor == 2 ? kSplitBytesOfTwo : kSplitBytes;
  return static_cast<int32_t>((bytes << kShareBits) / share_bytes);
}

// How many tiles of `tile_rows` cover so many packed rows.
int64_t TilesOf(int32_t packed_rows, int32_t tile_rows) {
  return (packed_rows + tile_rows - 1) / tile_rows;
}

// Every warp of mma_attention takes one strip in a round.
int32_t MmaShareStrips(const AttentionShape& shape, const KernelChoice& choice) {
  int32_t warps = 1;
  const KvGeometry& g = shape.geometry;
  const Status status = DispatchKvType(g.dtype, [&](auto kv) {
    return DispatchHeadDims<&HeadDims::decode_sm80>(
        g.key_dim, g.value_dim, [&](auto key_dim, auto value_dim) {
          warps = DispatchMmaShape(choice, [&]<int kRowTiles, int kBlocks>() {
            return MmaConfig<kv(), key_dim(), value_dim(), kRowTiles, kBlocks>::kWarps;
          });
          return Status::Ok();
        });
  });
  return status.ok() ? warps : 1;
}

// If few jobs are cut into many splits, one large thread block per multiprocessor merges half as
// many of them. With many jobs, a second thread block hides where the first one's items end.
int32_t BlocksPerMultiprocessor(const DeviceProperties& device, const AttentionShape& shape,
                                int32_t packed_rows) {
  const int64_t jobs =
      int64_t{shape.sequences} * shape.geometry.kv_heads * TilesOf(packed_rows, kWidestMmaTile);
  return 2 * jobs < 3 * int64_t{device.multiprocessors} ? 1 : 2;
}

// A call is long if it reads more bytes of the cache than this per multiprocessor.
constexpr int64_t kLongCall = 192 * 1024;

// Whether a call reads more than `times` as much as that.
bool IsLong(const DeviceProperties& device, const AttentionShape& shape, int32_t times = 1) {
  const int64_t bytes =
      BytesPerTokenOfHead(shape.geometry) * shape.geometry.kv_heads * shape.total_keys;
  return bytes > times * kLongCall * device.multiprocessors;
}

// How many packed rows mma_attention takes where wgmma_attention can take them, too. Beyond 16 it
// would read the keys again, and mma.sync could not keep up. With 16, bf16 and f16 rows of 256
// leave it registers for only eight warps per multiprocessor, too few to keep memory busy; FP8 rows
// do so to a lesser degree. There wgmma_attention gains 6%, and 2 to 4% with rows of 128, but it
// begins so much later that only long calls are repaid. Batch-invariant results take the same
// kernel whatever the length.
int32_t WidestMmaBesideWgmma(const DeviceProperties& device, const AttentionShape& shape,
                             const KernelOptions& options) {
  const KvGeometry& g = shape.geometry;
  if (g.key_dim < 128) return kWidestMmaTile;
  if (!IsFp8(g.dtype)) return g.key_dim >= 256 ? kWidestMmaTile / 2 : kWidestMmaTile;
  const bool repaid = IsLong(device, shape, g.key_dim >= 256 ? 2 : 6);
  return repaid && !options.batch_invariant ? kWidestMmaTile / 2 : kWidestMmaTile;
}

// The slots of which a thread block's warpgroups have four KV tiles each.
constexpr int64_t kFewTiles = 4 * 16 * int64_t{kWgmmaShareStrips};

// Whether one cluster per job leaves so little to each thread block that splitting jobs would not
// be worth the merging.
bool OneClusterPerJob(const AttentionShape& shape, int32_t size) {
  return shape.total_keys > 0 && shape.total_keys <= int64_t{shape.sequences} * size * kFewTiles;
}

// The thread blocks of kWgmmaFp8 collect a job's splits as these arrive, so that there may be many:
// a pair only if a job would have fewer than four thread blocks, and a larger cluster only if
// nothing is left to split.
int32_t ClusterSizeOfWgmmaFp8(const DeviceProperties& device, const AttentionShape& shape,
                              int64_t jobs) {
  for (int32_t size = kMaxClusterSize; size > 2; size /= 2) {
    if (jobs <= Clusters(device, size) && OneClusterPerJob(shape, size)) return size;
  }
  return 4 * jobs > device.multiprocessors && jobs <= Clusters(device, 2) ? 2 : 1;
}

// What the thread blocks of a cluster computed is merged without a detour through memory, but it is
// harder to deal work evenly to clusters than to thread blocks. So clusters are as large as leaves
// three per job. Splits of wide query tiles are so large that one pair per job still gains, and a
// larger cluster if nothing is left to split. Clusters of more than a pair leave about one in ten
// multiprocessors idle: a long call loses more by that than merging costs.
int32_t ClusterSize(const DeviceProperties& device, const AttentionShape& shape,
                    const KernelChoice& choice, int32_t packed_rows) {
  const int64_t jobs =
      int64_t{shape.sequences} * shape.geometry.kv_heads * TilesOf(packed_rows, choice.tile_rows);
  if (choice.kind == KernelKind::kWgmmaFp8) return ClusterSizeOfWgmmaFp8(device, shape, jobs);
  const bool wide = choice.kind == KernelKind::kWgmma;
  for (int32_t size = IsLong(device, shape) ? 2 : kMaxClusterSize; size > 1; size /= 2) {
    const int32_t clusters = Clusters(device, size);
    if (3 * jobs <= clusters) return size;
    if (wide && jobs <= clusters && (size == 2 || OneClusterPerJob(shape, size))) return size;
  }
  return 1;
}

// Whether strips of NVFP4 come through shared memory. With 16 packed rows, or long keys, registers
// that hold strips leave too few for the rest; otherwise a step of two strips takes fewer
// instructions.
bool TakesRings(const KvGeometry& g, int32_t tile_rows) {
  if (g.dtype != DType::kNvfp4) return false;
  return g.key_dim > 128 || (g.key_dim > 64 && tile_rows > 8);
}

// The kernel of wide query tiles and its tile, for so many packed rows.
void ChooseWgmma(const AttentionShape& shape, int32_t packed_rows, KernelChoice* choice) {
  const KvGeometry& g = shape.geometry;
  choice->tile_rows = packed_rows <= 32 ? 32 : WidestWgmmaTile(g.value_dim);
  choice->share_strips = kWgmmaShareStrips;
  choice->kind = choice->tile_rows == 64 && HasWgmmaFp8(g.dtype, g.key_dim, g.value_dim)
                     ? KernelKind::kWgmmaFp8
                     : KernelKind::kWgmma;
}

const char* Name(KernelKind kind) {
  switch (kind) {
    case KernelKind::kMma:
      return "mma";
    case KernelKind::kWgmma:
      return "wgmma";
    case KernelKind::kWgmmaFp8:
      return "wgmma_fp8";
    case KernelKind::kTcgen05:
      return "tcgen05";
  }
  return "unknown";
}

}  // namespace

std::string ToString(const KernelChoice& choice) {
  return std::string(Name(choice.kind)) + ", tile " + std::to_string(choice.tile_rows) +
         (choice.blocks_per_multiprocessor == 2 ? ", 2 blocks" : "") +
         (choice.cluster_size > 1 ? ", clusters of " + std::to_string(choice.cluster_size) : "") +
         (choice.rings ? ", rings" : "") + (choice.fp8_queries ? ", fp8 queries" : "");
}

KernelChoice ChooseKernel(const DeviceProperties& device, const AttentionShape& shape,
                          const KernelOptions& options) {
  return ChooseKernelWith(FeaturesOf(device.compute_capability, options.portable), device, shape,
                          options);
}

KernelChoice ChooseKernelWith(const Features& can, const DeviceProperties& device,
                              const AttentionShape& shape, const KernelOptions& options) {
  const int32_t packed_rows = shape.max_rows * (shape.q_heads / shape.geometry.kv_heads);
  const bool has_wgmma = can.wgmma && HasKernel<&HeadDims::decode_sm90>(shape.geometry);
  KernelChoice choice;
  choice.batch_invariant = options.batch_invariant;
  choice.fp8_queries = options.fp8_queries;
  choice.begins_early = can.early_launch && options.begins_early;
  if (has_wgmma && packed_rows > WidestMmaBesideWgmma(device, shape, options)) {
    ChooseWgmma(shape, packed_rows, &choice);
  } else {
    if (can.tcgen05 && shape.geometry.dtype != DType::kNvfp4 &&
        HasKernel<&HeadDims::decode_sm100>(shape.geometry)) {
      choice.kind = KernelKind::kTcgen05;
    }
    // (Without wgmma kernels for these head dims, any number of packed rows: in more tiles.)
    choice.tile_rows = packed_rows <= 8 ? 8 : kWidestMmaTile;
    // The shape of a thread block decides in which order the keys of a row are added up.
    choice.blocks_per_multiprocessor =
        options.batch_invariant ? 2 : BlocksPerMultiprocessor(device, shape, packed_rows);
    choice.share_strips = MmaShareStrips(shape, choice);
    choice.rings = has_wgmma && TakesRings(shape.geometry, choice.tile_rows);
  }
  if (can.clusters && !options.batch_invariant && choice.blocks_per_multiprocessor == 1) {
    choice.cluster_size = ClusterSize(device, shape, choice, packed_rows);
  }
  return choice;
}

KernelKind LaunchedKind(const KernelChoice& choice, DType q, float soft_cap) {
  const bool plain = q == DType::kBf16 && soft_cap == 0.0f;
  return choice.kind == KernelKind::kWgmmaFp8 && !plain ? KernelKind::kWgmma : choice.kind;
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
  plan.split_cost = SplitCost(choice, shape);
  const bool few_rows = choice.kind == KernelKind::kMma || choice.kind == KernelKind::kTcgen05;
  plan.lone_splits = !few_rows || choice.cluster_size > 1;
  plan.batch_invariant = choice.batch_invariant;
  return plan;
}

SharingCosts SharingCostsFor(const DeviceProperties& device, const AttentionShape& shape,
                             const KernelOptions& options) {
  const KvGeometry& g = shape.geometry;
  const Features can = FeaturesOf(device.compute_capability, options.portable);
  const bool has_wgmma = can.wgmma && HasKernel<&HeadDims::decode_sm90>(g);
  return {.gqa_ratio = shape.q_heads / g.kv_heads,
          .widest_tile = has_wgmma ? WidestWgmmaTile(g.value_dim) : kWidestMmaTile,
          .kv_heads = g.kv_heads,
          .bytes_per_token = BytesPerTokenOfHead(g),
          .multiprocessors = device.multiprocessors};
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

}  // namespace tributary::cuda
