#include "kernels/cuda/prefill/prefill.h"

#include <utility>

#include "kernels/cuda/architectures.h"
#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/merge/merge.h"
#include "kernels/cuda/prefill/convert_queries.h"
#include "kernels/cuda/prefill/gather_pages.h"
#include "kernels/cuda/prefill/prefill_kernel_args.h"
#include "kernels/cuda/prefill/sm100/sm100_prefill.h"
#include "kernels/cuda/prefill/sm100/sm100_prefill_config.h"
#include "kernels/cuda/prefill/sm80/mma_prefill.h"
#include "kernels/cuda/prefill/sm80/mma_prefill_config.h"
#include "kernels/cuda/prefill/sm90/wgmma_prefill.h"
#include "kernels/cuda/prefill/sm90/wgmma_prefill_config.h"
#include "kernels/cuda/status.h"
#include "kernels/soft_cap.h"

namespace tributary::cuda {
namespace {

constexpr size_t kAlignment = 1024;

size_t Aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

DType ComputeTypeOf(const PrefillShape& shape) {
  if (IsUnscaled(shape.geometry.dtype)) return shape.geometry.dtype;
  return shape.q == DType::kBf16 ? DType::kBf16 : DType::kF16;
}

const char* NameOf(PrefillKind kind) {
  switch (kind) {
    case PrefillKind::kMma:
      return "mma";
    case PrefillKind::kWgmma:
      return "wgmma";
    case PrefillKind::kTcgen05:
      return "tcgen05";
  }
  return "unknown";
}

// Where the parts of the workspace begin, in bytes.
struct WorkspaceLayout {
  size_t k = 0;
  size_t v = 0;
  size_t q = 0;
  size_t q_scale = 0;
  size_t partial_o = 0;
  size_t partial_lse = 0;
  size_t end = 0;
};

// Whether queries and keys are multiplied in FP8.
bool MultipliesFp8(const PrefillChoice& choice) {
  return choice.fp8_queries && choice.kind == PrefillKind::kWgmma;
}

bool ConvertsQueries(const PrefillChoice& choice, const PrefillShape& shape) {
  return choice.fp8_queries || shape.q != choice.compute;
}

WorkspaceLayout LayOut(const PrefillChoice& choice, const PrefillShape& shape, int64_t rows,
                       int64_t workspace_slots) {
  const bool context = shape.page_size != 0;
  const size_t slots = context ? size_t(workspace_slots) : 0;
  const KvGeometry& g = shape.geometry;
  const size_t gathered = slots * g.kv_heads;
  const size_t q_heads = ConvertsQueries(choice, shape) ? size_t(rows) * shape.q_heads : 0;
  const size_t partials = context ? size_t(kMaxSplitRows) * shape.head_count : 0;
  WorkspaceLayout layout;
  const auto place = [&layout](size_t bytes) {
    return std::exchange(layout.end, layout.end + Aligned(bytes));
  };
  layout.k = place(BytesOf(choice.compute, gathered * g.key_dim));
  layout.v = place(BytesOf(choice.compute, gathered * g.value_dim));
  layout.q = place(BytesOf(choice.compute, q_heads * g.key_dim));
  layout.q_scale = place(q_heads * sizeof(float));
  layout.partial_o = place(partials * g.value_dim * sizeof(float));
  layout.partial_lse = place(partials * sizeof(float));
  return layout;
}

// Launches the chosen kernel for one pair of head dims.
template <int kKeyDim, int kValueDim>
cudaError_t Run(const PrefillChoice& choice, DType kv, const PrefillKernelArgs& args, int blocks,
                cudaStream_t stream) {
  const bool bf16 = choice.compute == DType::kBf16;
  if constexpr (kHasSm100Kernels && HasKernel<&HeadDims::prefill_sm100>(kKeyDim, kValueDim)) {
    if (choice.kind == PrefillKind::kTcgen05) {
      return bf16 ? RunSm100Prefill<DType::kBf16, kKeyDim, kValueDim>(args, blocks, stream)
                  : RunSm100Prefill<DType::kF16, kKeyDim, kValueDim>(args, blocks, stream);
    }
  }
  if constexpr (HasKernel<&HeadDims::prefill_sm90>(kKeyDim, kValueDim)) {
    const auto run = [&]<DType kScores, DType kCompute>() {
      return RunWgmmaPrefill<kScores, kCompute, kKeyDim, kValueDim>(args, blocks, stream);
    };
    if (choice.fp8_weights) {
      return kv == DType::kFp8E4M3 ? run.template operator()<DType::kFp8E4M3, DType::kFp8E4M3>()
                                   : run.template operator()<DType::kFp8E5M2, DType::kFp8E5M2>();
    }
    if (MultipliesFp8(choice)) {
      return kv == DType::kFp8E4M3 ? run.template operator()<DType::kFp8E4M3, DType::kF16>()
                                   : run.template operator()<DType::kFp8E5M2, DType::kF16>();
    }
    if (choice.kind == PrefillKind::kWgmma) {
      return bf16 ? run.template operator()<DType::kBf16, DType::kBf16>()
                  : run.template operator()<DType::kF16, DType::kF16>();
    }
  }
  if (choice.kind != PrefillKind::kMma) return cudaErrorNotSupported;
  return bf16 ? RunMmaPrefill<DType::kBf16, kKeyDim, kValueDim>(args, blocks, stream)
              : RunMmaPrefill<DType::kF16, kKeyDim, kValueDim>(args, blocks, stream);
}

// Merges the partials of rows split over keys.
Status MergeSplits(const PrefillShape& shape, const PrefillPass& pass,
                   const PrefillKernelArgs& kernel, cudaStream_t stream) {
  const size_t before = size_t(pass.row_begin) * shape.head_count;
  const size_t heads = size_t(pass.row_count) * shape.head_count;
  const int32_t value_dim = shape.geometry.value_dim;
  const size_t o_bytes = BytesOf(kernel.o_dtype, before * value_dim);
  MergeArgs merge;
  for (int32_t i = 0; i < pass.splits; ++i) {
    merge.o[i] = kernel.partial_o + i * heads * value_dim;
    merge.lse[i] = kernel.partial_lse + i * heads;
  }
  merge.sources = pass.splits;
  merge.rows = pass.row_count;
  merge.heads = shape.head_count;
  merge.value_dim = value_dim;
  merge.out = static_cast<std::byte*>(kernel.o) + o_bytes;
  merge.out_dtype = kernel.o_dtype;
  merge.lse_out = kernel.lse + before;
  if (pass.accumulate) {
    merge.o[merge.sources] = static_cast<const float*>(merge.out);
    merge.lse[merge.sources] = merge.lse_out;
    ++merge.sources;
  }
  return LaunchMerge(merge, stream);
}

// What the kernel takes, all but what a pass adds. Over context it reads the gathered rows.
PrefillKernelArgs KernelArgsOf(const PrefillShape& shape, const PrefillArgs& args,
                               const WorkspaceLayout& layout) {
  const bool context = shape.page_size != 0;
  PrefillKernelArgs kernel;
  kernel.items = args.items;
  kernel.keys = args.keys;
  kernel.q = args.q;
  kernel.k = context ? args.workspace + layout.k : args.k;
  kernel.v = context ? args.workspace + layout.v : args.v;
  kernel.rows = args.rows;
  kernel.tokens = context ? static_cast<int32_t>(args.workspace_slots) : args.tokens;
  kernel.q_heads = shape.q_heads;
  kernel.kv_heads = shape.geometry.kv_heads;
  kernel.head_begin = shape.head_begin;
  kernel.head_count = shape.head_count;
  kernel.k_scale = context ? args.k_scale : nullptr;
  kernel.v_scale = context ? args.v_scale : nullptr;
  kernel.sm_scale = args.sm_scale;
  kernel.soft_cap = BoundedSoftCap(args.soft_cap);
  kernel.o_dtype = args.o_dtype;
  kernel.o = args.o;
  kernel.lse = args.lse;
  kernel.partial_o = reinterpret_cast<float*>(args.workspace + layout.partial_o);
  kernel.partial_lse = reinterpret_cast<float*>(args.workspace + layout.partial_lse);
  return kernel;
}

ConvertQueriesArgs ConvertArgsOf(const PrefillChoice& choice, const PrefillShape& shape,
                                 const PrefillArgs& args, const WorkspaceLayout& layout) {
  ConvertQueriesArgs convert;
  convert.q = args.q;
  convert.from = shape.q;
  convert.to = MultipliesFp8(choice) ? DType::kFp8E4M3 : choice.compute;
  convert.rounds = choice.fp8_queries;
  convert.heads = int64_t{args.rows} * shape.q_heads;
  convert.geometry = shape.geometry;
  convert.out = args.workspace + layout.q;
  convert.scale = reinterpret_cast<float*>(args.workspace + layout.q_scale);
  return convert;
}

GatherArgs GatherArgsOf(const PrefillChoice& choice, const PrefillShape& shape,
                        const PrefillArgs& args, const WorkspaceLayout& layout,
                        const PrefillPass& pass) {
  GatherArgs gather;
  gather.gathers = args.gathers + pass.gather_begin;
  gather.gather_count = pass.gather_count;
  gather.page_tables = args.page_tables;
  gather.cache = args.cache;
  gather.geometry = shape.geometry;
  gather.compute = choice.compute;
  gather.page_size = shape.page_size;
  gather.kept = choice.fp8_weights      ? KeptFp8::kKeysAndValues
                : MultipliesFp8(choice) ? KeptFp8::kKeys
                                        : KeptFp8::kNothing;
  gather.keys_per_tile = choice.keys_per_tile;
  gather.k = args.workspace + layout.k;
  gather.v = args.workspace + layout.v;
  return gather;
}

Status CheckCall(const PrefillShape& shape, std::span<const PrefillPass> passes,
                 const PrefillArgs& args) {
  if (args.o_dtype != DType::kF32 && args.o_dtype != DType::kBf16 && args.o_dtype != DType::kF16) {
    return Unsupported(std::string("o_dtype: ") + Name(args.o_dtype) + " is not f32, bf16 or f16");
  }
  if (args.o_dtype != DType::kF32 && passes.size() > 1) {
    return Unsupported(std::string("o_dtype: passes are merged in f32, not in ") +
                       Name(args.o_dtype));
  }
  for (const PrefillPass& pass : passes) {
    if (pass.accumulate && args.o_dtype != DType::kF32) {
      return Unsupported(std::string("o_dtype: results are merged in f32, not in ") +
                         Name(args.o_dtype));
    }
    if (shape.page_size != 0 && int64_t{pass.gather_count} * kGatherSlots > args.workspace_slots) {
      return InvalidArgument("workspace_slots: " + std::to_string(args.workspace_slots) +
                             " are fewer than a pass of the plan gathers");
    }
  }
  return Status::Ok();
}

}  // namespace

std::string ToString(const PrefillChoice& choice) {
  return std::string(NameOf(choice.kind)) + ", " + Name(choice.compute) +
         (choice.fp8_weights   ? ", fp8 queries and weights, "
          : choice.fp8_queries ? ", fp8 queries, "
                               : ", ") +
         std::to_string(choice.rows_per_tile) + " x " + std::to_string(choice.keys_per_tile);
}

PrefillChoice ChoosePrefillWith(const Features& features, const PrefillShape& shape,
                                const PrefillOptions& options) {
  PrefillChoice choice;
  const KvGeometry& g = shape.geometry;
  choice.compute = ComputeTypeOf(shape);
  choice.fp8_queries = options.fp8_queries;
  choice.batch_invariant = options.batch_invariant;
  if (options.fp8_queries) choice.compute = DType::kF16;  // exact for all that is FP8
  if (features.tcgen05 && HasKernel<&HeadDims::prefill_sm100>(g)) {
    choice.kind = PrefillKind::kTcgen05;
    choice.rows_per_tile = Sm100PrefillRows(g.value_dim);
    choice.keys_per_tile = Sm100PrefillKeys(g.key_dim);
  } else if (features.wgmma && HasKernel<&HeadDims::prefill_sm90>(g)) {
    choice.kind = PrefillKind::kWgmma;
    choice.fp8_weights = options.fp8_weights;
    choice.rows_per_tile = kWgmmaPrefillRows;
    choice.keys_per_tile = WgmmaPrefillKeys(g.value_dim);
  } else {
    choice.rows_per_tile = MmaPrefillRows(g.value_dim);
    choice.keys_per_tile = MmaPrefillKeys(g.key_dim);
  }
  return choice;
}

PrefillChoice ChoosePrefill(const DeviceProperties& device, const PrefillShape& shape,
                            const PrefillOptions& options) {
  return ChoosePrefillWith(FeaturesOf(device.compute_capability, options.portable), shape, options);
}

PrefillPlanShape PrefillPlanShapeFor(const PrefillChoice& choice, const PrefillShape& shape,
                                     const DeviceProperties& device, int64_t workspace_slots) {
  PrefillPlanShape plan;
  plan.rows_per_tile = choice.rows_per_tile;
  plan.keys_per_tile = choice.keys_per_tile;
  plan.gqa_ratio = shape.q_heads / shape.geometry.kv_heads;
  plan.head_begin = shape.head_begin;
  plan.head_count = shape.head_count;
  // Two thread blocks of the portable kernel share a multiprocessor; wgmma_prefill fills one.
  plan.blocks = device.multiprocessors * (choice.kind == PrefillKind::kWgmma ? 1 : 2);
  plan.workspace_slots = workspace_slots;
  plan.batch_invariant = choice.batch_invariant;
  return plan;
}

size_t PrefillWorkspaceBytes(const PrefillChoice& choice, const PrefillShape& shape, int64_t rows,
                             int64_t workspace_slots) {
  return LayOut(choice, shape, rows, workspace_slots).end;
}

Status Validate(const PrefillShape& shape) {
  AttentionShape attention;
  attention.geometry = shape.geometry;
  attention.q_heads = shape.q_heads;
  attention.page_size = shape.page_size == 0 ? 16 : shape.page_size;
  if (Status status = Validate(attention); !status.ok()) return status;
  if (!IsUnscaled(shape.q)) {
    return Unsupported(std::string("q_dtype: ") + Name(shape.q) + " is not f32, bf16 or f16");
  }
  if (shape.page_size == 0 && !IsUnscaled(shape.geometry.dtype)) {
    return Unsupported(std::string("kv_dtype: new tokens are bf16 or f16, not ") +
                       Name(shape.geometry.dtype));
  }
  if (shape.head_begin < 0 || shape.head_count < 1 ||
      int64_t{shape.head_begin} + shape.head_count > shape.q_heads) {
    return InvalidArgument("head_count: " + std::to_string(shape.head_count) + " heads from " +
                           std::to_string(shape.head_begin) + " are not within " +
                           std::to_string(shape.q_heads));
  }
  return Status::Ok();
}

Status Validate(const PrefillShape& shape, const PrefillOptions& options) {
  if (Status status = Validate(shape); !status.ok()) return status;
  if (options.fp8_queries && !IsFp8(shape.geometry.dtype)) {
    return Unsupported(std::string("fp8_queries: K and V are ") + Name(shape.geometry.dtype) +
                       ", not FP8");
  }
  if (options.fp8_weights && !options.fp8_queries) {
    return InvalidArgument("fp8_weights: without fp8_queries");
  }
  return Status::Ok();
}

Status LaunchPrefill(const PrefillChoice& choice, const PrefillShape& shape,
                     std::span<const PrefillPass> passes, const PrefillArgs& args,
                     cudaStream_t stream) {
  const PrefillOptions options{.fp8_queries = choice.fp8_queries,
                               .fp8_weights = choice.fp8_weights};
  if (Status status = Validate(shape, options); !status.ok()) return status;
  if (Status status = CheckCall(shape, passes, args); !status.ok()) return status;
  if (passes.empty()) return Status::Ok();
  const bool context = shape.page_size != 0;
  const WorkspaceLayout layout = LayOut(choice, shape, args.rows, args.workspace_slots);
  PrefillKernelArgs kernel = KernelArgsOf(shape, args, layout);
  if (ConvertsQueries(choice, shape)) {
    const ConvertQueriesArgs convert = ConvertArgsOf(choice, shape, args, layout);
    const cudaError_t error = RunConvertQueries(convert, stream);
    if (error != cudaSuccess) return CudaStatus(error, "query conversion");
    kernel.q = convert.out;
    kernel.q_scale = convert.scale;
  }
  for (const PrefillPass& pass : passes) {
    if (context && pass.gather_count > 0) {
      const cudaError_t error =
          RunGatherPages(GatherArgsOf(choice, shape, args, layout, pass), stream);
      if (error != cudaSuccess) return CudaStatus(error, "gather of pages");
    }
    kernel.item_begin = pass.item_begin;
    kernel.partial_row_begin = pass.row_begin;
    kernel.partial_rows = pass.row_count;
    Status status = DispatchHeadDims<&HeadDims::prefill_sm80>(
        shape.geometry.key_dim, shape.geometry.value_dim, [&](auto key_dim, auto value_dim) {
          const cudaError_t error = Run<key_dim(), value_dim()>(choice, shape.geometry.dtype,
                                                                kernel, pass.blocks, stream);
          return CudaStatus(error, "prefill kernel");
        });
    if (status.ok() && pass.splits > 1) status = MergeSplits(shape, pass, kernel, stream);
    if (!status.ok()) return status;
  }
  return Status::Ok();
}

}  // namespace tributary::cuda
