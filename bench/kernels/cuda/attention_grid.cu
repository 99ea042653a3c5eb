// How fast attention over a paged cache is on one GPU, against how fast that GPU reads memory.
//
// Cold L2: consecutive calls use different copies of the cache, which together are several times
// the L2. The calls are captured in one CUDA graph; a figure is the median over replays of the
// graph's time divided by its calls. Each case is checked, on sampled rows and heads, against a
// float64 kernel that shares nothing with those under test but the layout. Usage:
//   attention_grid [--set field|nvfp4|shapes|dims|spread|wide|batches|drafts|cascade|grid|all]
//                  [--only TEXT] [--json FILE] [--portable] [--invariant] [--fp8-queries]
//                  [--alone] [--apart] [--in-turn] [--shared-multiprocessors N] [--cluster N]
//                  [--output f32|bf16|f16|fp8_e4m3|nvfp4]
// --fp8-queries rounds queries, too, and leaves out what has no FP8 cache. --alone keeps a call
// from beginning before the one ahead of it has ended. --apart reads what sequences share once for
// each of them. --in-turn reads it in a launch of its own that nothing runs beside.
// --shared-multiprocessors gives so many to that launch, where the other one gains by running
// beside it. --output adds the launch that stores a call's result in that type, which a service
// needs where the result goes to the caller's memory.
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "bench/kernels/cuda/attention_cases.h"
#include "bench/kernels/cuda/gpu_bench.h"
#include "kernels/cuda/decode/attention.h"
#include "kernels/cuda/decode/shared_attention.h"
#include "kernels/cuda/decode/side_by_side.h"
#include "kernels/cuda/layout/nvfp4_layout.h"
#include "kernels/cuda/layout/page_layout.h"
#include "kernels/cuda/merge/merge.h"
#include "kernels/element.h"
#include "kernels/float4.h"
#include "kernels/fp8_queries.h"
#include "kernels/kv_geometry.h"
#include "kernels/output_format.h"

namespace tributary::cuda {
namespace {

constexpr size_t kPoolBytes = size_t{24} << 30;
constexpr size_t kRotatedBytes = size_t{320}
                                 << 20;  // at least this much between two uses of a copy

struct Result {
  double microseconds = 0;
  double bytes = 0;
  double error = 0;
  std::string kernel;
};

__global__ void ReadAll(const uint4* data, size_t count, uint32_t* sink) {
  uint32_t sum = 0;
  const size_t stride = size_t(gridDim.x) * blockDim.x;
#pragma unroll 8
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += stride) {
    const uint4 v = __ldcs(data + i);
    sum += v.x ^ v.y ^ v.z ^ v.w;
  }
  if (sum == 0x12345678u) *sink = sum;
}

__device__ double Nvfp4At(const std::byte* plane, CodePlace place, size_t scale) {
  const uint32_t code = CodeOfByte(static_cast<uint32_t>(plane[place.byte]), place.high);
  return double{FloatFromFloat4E2M1(static_cast<uint8_t>(code))} *
         FloatFromFloat8E4M3(static_cast<uint8_t>(plane[scale]));
}

// One row and head, by the definition, in float64. One thread block of 256 threads.
__global__ void NaiveRow(AttentionArgs args, KvGeometry kv, int32_t page_table, KeyRange range,
                         int row, int head, double* o /* [value_dim] */, double* lse) {
  __shared__ double scratch[256];
  const int page_size = 1 << args.page_shift;
  const int kv_head = head / (args.q_heads / args.kv_heads);
  const int bytes = IsFp8(kv.dtype) ? 1 : 2;
  const auto element = [&](int64_t slot, int d, bool values) {
    const int32_t page = args.page_tables[page_table + slot / page_size];
    const std::byte* base = args.cache + size_t(page) * PageBytes(kv, page_size);
    const int token = static_cast<int>(slot % page_size);
    if (kv.dtype == DType::kNvfp4) {
      return values ? Nvfp4At(base + ValuePlaneOffset(kv, page_size, kv_head),
                              Nvfp4ValuePlace(token, d, kv.value_dim),
                              Nvfp4ValueScale(token, d, kv.value_dim))
                    : Nvfp4At(base + KeyPlaneOffset(kv, page_size, kv_head),
                              Nvfp4KeyPlace(token, d, kv.key_dim),
                              Nvfp4KeyScale(token, d, kv.key_dim));
    }
    const size_t at =
        values
            ? ValuePlaneOffset(kv, page_size, kv_head) + ValueOffset(token, d, kv.value_dim, bytes)
            : KeyPlaneOffset(kv, page_size, kv_head) + KeyOffset(token, d, kv.key_dim, bytes);
    return ElementAt(kv.dtype, base + at, 0);
  };
  const auto logit = [&](int64_t slot) {
    double x = 0;
    for (int d = 0; d < kv.key_dim; ++d) {
      x += element(slot, d, false) *
           FloatFromBf16(static_cast<const uint16_t*>(
               args.q)[(size_t(row) * args.q_heads + head) * kv.key_dim + d]);
    }
    return x * args.sm_scale;
  };
  // The logits are small enough here to be summed without a maximum.
  double sum = 0;
  for (int64_t slot = range.lo + threadIdx.x; slot < range.hi; slot += 256) sum += exp(logit(slot));
  scratch[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < 256; ++i) sum += scratch[i];
    scratch[0] = sum;
    *lse = log(sum);
  }
  __syncthreads();
  sum = scratch[0];
  for (int d = threadIdx.x; d < kv.value_dim; d += 256) o[d] = 0;
  __syncthreads();
  for (int64_t slot = range.lo + threadIdx.x; slot < range.hi; slot += 256) {
    const double weight = exp(logit(slot)) / sum;
    for (int d = 0; d < kv.value_dim; ++d) atomicAdd(o + d, weight * element(slot, d, true));
  }
}

AttentionShape ShapeOf(const Case& c) {
  int64_t total_keys = 0;
  for (const int64_t length : c.lengths) {
    total_keys += c.window < 0 ? length : std::min(length, c.window + c.rows);
  }
  return {.geometry = c.kv,
          .q_heads = c.q_heads,
          .page_size = c.page_size,
          .max_rows = c.rows,
          .sequences = static_cast<int32_t>(c.lengths.size()),
          .total_keys = total_keys};
}

// The rows of a case as they are planned, the page tables of its sequences, and the bytes of keys
// and values that they see, those of a page that several have counted once.
struct Rows {
  std::vector<PlanEntry> entries;
  std::vector<KeyRange> keys;
  std::vector<int32_t> pages;  // the tables, one behind the other; pages are numbered from 0
  int32_t page_count = 0;
  std::vector<SharedPages> shared;
  double bytes = 0;

  explicit Rows(const Case& c) {
    for (int32_t i = 0; i < static_cast<int32_t>(c.lengths.size()); ++i) {
      entries.push_back({i * c.rows, c.rows, static_cast<int32_t>(pages.size())});
      const int64_t common = AddSharedPages(c, i);
      KeyRange any{INT64_MAX, 0};
      for (int32_t row = 0; row < c.rows; ++row) {
        const int64_t position = c.lengths[i] - c.rows + row;
        const int64_t limit = c.causal ? position + 1 : c.lengths[i];
        keys.push_back(VisibleKeys(position, {c.window, -1}, limit));
        any = {std::min(any.lo, keys.back().lo), std::max(any.hi, keys.back().hi)};
      }
      AddBytes(c, Length(any) - common);
      AddPages((c.lengths[i] - common + c.page_size - 1) / c.page_size);
    }
  }

  // The tables of each sequence, as far as its rows see.
  std::vector<AttentionEntry> Entries() const {
    std::vector<AttentionEntry> all;
    for (size_t i = 0; i < entries.size(); ++i) {
      const size_t begin = entries[i].page_table;
      const size_t end = i + 1 < entries.size() ? entries[i + 1].page_table : pages.size();
      all.push_back({entries[i].row_begin, entries[i].row_count,
                     std::span(pages).subspan(begin, end - begin)});
    }
    return all;
  }

 private:
  void AddPages(int64_t count) {
    for (int64_t page = 0; page < count; ++page) pages.push_back(page_count++);
  }
  void AddBytes(const Case& c, int64_t tokens) {
    bytes += static_cast<double>(tokens * c.kv.kv_heads * BytesPerTokenOfHead(c.kv));
  }
  // What sequence i shares: of the first of each group new pages, of the others those of the first.
  int64_t AddSharedPages(const Case& c, int32_t i) {
    int64_t before = 0;
    for (const SharedLevel& level : c.shared) {
      const auto members = static_cast<int32_t>(c.lengths.size()) / level.groups;
      const int32_t first = i / members * members;
      if (i == first) {
        shared.push_back({{before, before + level.tokens}, {}});
        for (int32_t j = 0; j < members; ++j) shared.back().entries.push_back(first + j);
        AddPages(level.tokens / c.page_size);
        AddBytes(c, level.tokens);
      } else {
        const int64_t from = entries[first].page_table + before / c.page_size;
        for (int64_t page = 0; page < level.tokens / c.page_size; ++page) {
          pages.push_back(pages[from + page]);
        }
      }
      before += level.tokens;
    }
    return before;
  }
};

// Page tables of `copies` copies of the cache, each in an order of its own.
std::vector<int32_t> ShuffledTables(const Rows& rows, size_t copies, std::mt19937& random) {
  std::vector<int32_t> tables;
  std::vector<int32_t> order(rows.page_count);
  std::iota(order.begin(), order.end(), 0);
  for (size_t copy = 0; copy < copies; ++copy) {
    std::shuffle(order.begin(), order.end(), random);
    for (const int32_t page : rows.pages) tables.push_back(order[page]);
  }
  return tables;
}

std::vector<std::byte> RandomQueries(size_t elements, std::mt19937& random) {
  std::vector<std::byte> q(BytesOf(DType::kBf16, static_cast<int64_t>(elements)));
  std::normal_distribution<float> normal(0.0f, 1.0f);
  for (size_t i = 0; i < elements; ++i) StoreElement(DType::kBf16, q.data(), i, normal(random));
  return q;
}

// The queries as the reference sees them where kernels round them to FP8.
std::vector<std::byte> RoundedQueries(std::vector<std::byte> q, size_t elements, int32_t key_dim) {
  std::vector<float> floats(elements);
  RoundQueriesToFp8(DType::kBf16, key_dim, q, floats.data());
  for (size_t i = 0; i < elements; ++i) {
    StoreElement(DType::kBf16, q.data(), i, floats[i]);  // exact
  }
  return q;
}

// What a launch uses of the workspace.
struct Used {
  size_t partial_rows = 0;
  size_t arrivals = 0;
};
Used UsedBy(const Plan& plan, const KernelChoice& choice) {
  return {size_t(plan.partials) * choice.tile_rows, size_t(plan.arrivals)};
}

// A plan, outputs and workspace on the device.
struct DeviceCall {
  DeviceCall(const Case& c, const Plan& plan, const Used& used, size_t output_rows)
      : items(plan.items),
        keys(plan.keys),
        o(output_rows * c.kv.value_dim),
        lse(output_rows),
        partial_o(used.partial_rows * c.kv.value_dim),
        partial_lse(used.partial_rows),
        arrivals(std::vector<uint64_t>(used.arrivals)) {}

  // Everything but queries, cache and page tables.
  AttentionArgs Args(const Case& c) const {
    AttentionArgs args;
    args.items = items.data();
    args.keys = keys.data();
    args.q_heads = c.q_heads;
    args.kv_heads = c.kv.kv_heads;
    args.page_shift = static_cast<int32_t>(std::log2(c.page_size));
    args.sm_scale = 1.0f / std::sqrt(static_cast<float>(c.kv.key_dim));
    args.o = o.data();
    args.lse = lse.data();
    args.partial_o = partial_o.data();
    args.partial_lse = partial_lse.data();
    args.arrivals = arrivals.data();
    return args;
  }

  GpuArray<WorkItem> items;
  GpuArray<RowKeys> keys;
  GpuArray<float> o, lse, partial_o, partial_lse;
  GpuArray<uint64_t> arrivals;
};

// What the sequences of a call share, on the device. Nothing if that is not worth it.
class SharedCall {
 public:
  SharedCall(const Case& c, const Rows& rows, const DeviceProperties& device,
             const KernelOptions& options) {
    if (options.batch_invariant) return;
    std::vector<int32_t> page_tables;
    for (const PlanEntry& entry : rows.entries) page_tables.push_back(entry.page_table);
    const AttentionShape call = ShapeOf(c);
    costs_ = SharingCostsFor(device, call, options);
    PlanShared(costs_, rows.Entries(), page_tables, rows.keys, rows.shared, &plan_);
    shape_ = ShapeOfShared(call, plan_);
  }

  bool empty() const { return plan_.empty(); }
  const SharedPlan& plan() const { return plan_; }
  const AttentionShape& shape() const { return shape_; }
  const SharingCosts& costs() const { return costs_; }
  const GatheredLaunch& launch() const { return launch_; }

  // Plans its launch. Returns what both launches use, given what the other one does.
  Used Plan(const Case& c, const SharedChoice& both, const Used& rest) {
    const KernelChoice& choice = both.shared;
    const bool side_by_side = both.side_by_side;
    const DecodePlanShape plan_shape = DecodePlanShapeFor(choice, shape_, both.shared_device);
    PlanAttention(plan_shape, plan_.entries, plan_.keys, &gathered_);
    items_ = GpuArray<WorkItem>(gathered_.items);
    keys_ = GpuArray<RowKeys>(gathered_.keys);
    rows_ = GpuArray<int32_t>(plan_.rows);
    parts_ = GpuArray<RowParts>(plan_.parts);
    part_rows_ = GpuArray<int32_t>(plan_.part_rows);
    const size_t heads = plan_.rows.size() * c.q_heads;
    q_ = GpuArray<std::byte>(BytesOf(DType::kBf16, heads * c.kv.key_dim));
    o_ = GpuArray<float>(heads * c.kv.value_dim);
    lse_ = GpuArray<float>(heads);
    launch_ = {.choice = choice,
               .shape = shape_,
               .blocks = plan_shape.blocks,
               .items = items_.data(),
               .keys = keys_.data(),
               .gathered_rows = static_cast<int32_t>(plan_.rows.size()),
               .rows = plan_.InOrder() ? nullptr : rows_.data(),
               .first_row = plan_.rows.front(),
               .q = q_.data(),
               .o = o_.data(),
               .lse = lse_.data(),
               .call_rows = static_cast<int32_t>(plan_.parts.size()),
               .parts = parts_.data(),
               .part_rows = part_rows_.data(),
               .side_by_side = side_by_side,
               .first_partial_row = side_by_side ? static_cast<int64_t>(rest.partial_rows) : 0,
               .first_arrival = side_by_side ? static_cast<int32_t>(rest.arrivals) : 0};
    const Used used = UsedBy(gathered_, choice);
    if (!side_by_side) {
      return {std::max(used.partial_rows, rest.partial_rows),
              std::max(used.arrivals, rest.arrivals)};
    }
    return {used.partial_rows + rest.partial_rows, used.arrivals + rest.arrivals};
  }

 private:
  AttentionShape shape_;
  SharingCosts costs_;
  SharedPlan plan_;
  cuda::Plan gathered_;
  GpuArray<WorkItem> items_;
  GpuArray<RowKeys> keys_;
  GpuArray<int32_t> rows_, part_rows_;
  GpuArray<RowParts> parts_;
  GpuArray<std::byte> q_;
  GpuArray<float> o_, lse_;
  GatheredLaunch launch_;
};

struct BenchOptions {
  int32_t cluster_size = 0;
  bool apart = false;
  bool in_turn = false;
  int32_t shared_multiprocessors = 0;
  std::optional<DType> output;
};

class Bench {
 public:
  Bench(const KernelOptions& options, const BenchOptions& bench)
      : options_(options), bench_(bench), pool_(kPoolBytes) {
    Check(QueryDevice(0, &device_));
  }

  const DeviceProperties& device() const { return device_; }

  // Bytes per second.
  double ReadBandwidth() {
    const GpuArray<uint32_t> sink(1);
    Fill(SquareGeometry(1, 128, DType::kFp8E4M3));
    const size_t bytes = size_t{8} << 30;
    const double us = timer_.MicrosecondsOf(1, [&](int) {
      ReadAll<<<device_.multiprocessors * 4, 512, 0, timer_.stream()>>>(
          reinterpret_cast<const uint4*>(pool_.data()), bytes / 16, sink.data());
    });
    return static_cast<double>(bytes) / (us * 1e-6);
  }

  Result Run(const Case& c) {
    Fill(c.kv);
    Rows rows(c);
    if (bench_.apart) rows.shared.clear();
    SharedCall shared(c, rows, device_, options_);
    const std::vector<KeyRange>& own_keys = shared.empty() ? rows.keys : shared.plan().rest;
    AttentionShape shape = ShapeOf(c);
    if (!shared.empty()) {
      shape.total_keys = 0;
      for (const PlanEntry& entry : rows.entries) {
        shape.total_keys += Length(own_keys[entry.row_begin + entry.row_count - 1]);
      }
    }
    SharedChoice both{.rest = ChooseKernel(device_, shape, options_), .rest_device = device_};
    if (!shared.empty()) {
      both = ChooseShared(device_, shared.shape(), shape, options_, DealFor(shared));
    }
    KernelChoice& choice = both.rest;
    if (bench_.cluster_size > 0) choice.cluster_size = bench_.cluster_size;
    const DecodePlanShape plan_shape = DecodePlanShapeFor(choice, shape, both.rest_device);
    Plan plan;
    PlanAttention(plan_shape, rows.entries, own_keys, &plan);
    Used used = UsedBy(plan, choice);
    if (!shared.empty()) used = shared.Plan(c, both, used);

    Result result;
    result.bytes = rows.bytes;
    const size_t copy_bytes = PageBytes(c.kv, c.page_size) * rows.page_count;
    if (copy_bytes > kPoolBytes) return result;
    const size_t copies = std::clamp<size_t>(
        static_cast<size_t>(double(kRotatedBytes) / result.bytes) + 1, 2, kPoolBytes / copy_bytes);
    std::mt19937 random(3);
    const GpuArray<int32_t> page_tables(ShuffledTables(rows, copies, random));
    const size_t output_rows = rows.keys.size() * c.q_heads;
    const size_t elements = output_rows * c.kv.key_dim;  // of the queries
    const std::vector<std::byte> host_q = RandomQueries(elements, random);
    const GpuArray<std::byte> q(host_q);
    const DeviceCall call(c, plan, used, output_rows);
    const auto numbers = static_cast<int64_t>(output_rows) * c.kv.value_dim;
    const GpuArray<std::byte> stored(OutputBytes(bench_.output.value_or(DType::kF32), numbers));
    const auto args_of = [&](size_t copy) {
      AttentionArgs args = call.Args(c);
      args.q = q.data();
      args.cache = pool_.data() + copy * copy_bytes;
      args.page_tables = page_tables.data() + copy * rows.pages.size();
      return args;
    };
    const auto attend = [&](AttentionArgs args) {
      if (shared.empty()) {
        return Check(LaunchAttention(choice, shape, args, plan_shape.blocks, timer_.stream()));
      }
      // As behind an append of one token to each sequence.
      args.late_strips = LateStripsOf(1);
      Check(LaunchSharedAttention(choice, shape, args, plan_shape.blocks, shared.launch(),
                                  timer_.stream()));
    };
    const auto launch = [&](size_t copy) {
      const AttentionArgs args = args_of(copy);
      attend(args);
      if (bench_.output.has_value()) {
        Store(c, args, static_cast<int32_t>(rows.keys.size()), stored.data());
      }
    };

    result.kernel = ToString(choice);
    if (!shared.empty()) {
      result.kernel = "shared: " + ToString(shared.launch().choice) + "; rest: " + result.kernel;
      if (both.side_by_side) {
        result.kernel += "; side by side, " + std::to_string(both.shared_device.multiprocessors) +
                         " and " + std::to_string(both.rest_device.multiprocessors);
      }
    }
    launch(copies - 1);
    AttentionArgs checked = args_of(copies - 1);
    GpuArray<std::byte> rounded;
    if (options_.fp8_queries) {
      rounded = GpuArray<std::byte>(RoundedQueries(host_q, elements, c.kv.key_dim));
      checked.q = rounded.data();
    }
    result.error = Compare(c, checked, rows);
    result.microseconds =
        timer_.MicrosecondsOf(static_cast<int>(std::max<size_t>(copies, 8)),
                              [&](int i) { launch(static_cast<size_t>(i) % copies); });
    return result;
  }

 private:
  SideBySide DealFor(const SharedCall& shared) const {
    if (bench_.in_turn) return {};
    const int32_t chosen = bench_.shared_multiprocessors;
    if (chosen > 0) return {.shared = chosen, .rest = device_.multiprocessors - chosen};
    return DealMultiprocessors(device_, shared.costs(), shared.plan());
  }

  // Stores a call's result as an output of the type asked for.
  void Store(const Case& c, const AttentionArgs& args, int32_t rows, std::byte* to) const {
    MergeArgs merge = ConversionOf(args.o, args.lse, rows, c.q_heads, c.kv.value_dim);
    SetOutput({.dtype = *bench_.output, .scale = 1.0f / 1024}, to, &merge);
    merge.begins_early =
        options_.begins_early && FeaturesOf(device_.compute_capability).early_launch;
    Check(LaunchMerge(merge, timer_.stream()));
  }

  // (Blocks and their scales lie elsewhere for each number of dimensions.)
  void Fill(const KvGeometry& kv) {
    const int32_t dims = kv.dtype == DType::kNvfp4 ? kv.key_dim : 0;
    if (filled_ && filled_with_ == kv.dtype && filled_dims_ == dims) return;
    if (dims == 0) {
      FillRandom(pool_, kv.dtype, /*seed=*/0);
    } else {
      FillRandomStrips<<<2048, 256>>>(reinterpret_cast<uint32_t*>(pool_.data()), pool_.size() / 4,
                                      dims, /*seed=*/0);
      Check(cudaDeviceSynchronize(), "fill");
    }
    filled_ = true;
    filled_with_ = kv.dtype;
    filled_dims_ = dims;
  }

  // The largest error of O over a few rows and heads.
  double Compare(const Case& c, const AttentionArgs& args, const Rows& rows) {
    const int32_t dims = c.kv.value_dim;
    const GpuArray<double> expected(dims + 1);
    std::vector<double> expected_host(dims + 1);
    std::vector<float> actual(dims);
    double worst = 0;
    const int samples = 3;
    for (int i = 0; i < samples; ++i) {
      const PlanEntry& entry = rows.entries[i * (rows.entries.size() - 1) / (samples - 1)];
      const int row = entry.row_begin + i * (c.rows - 1) / (samples - 1);
      const int head = i * (c.q_heads - 1) / (samples - 1);
      NaiveRow<<<1, 256, 0, timer_.stream()>>>(args, c.kv, entry.page_table, rows.keys[row], row,
                                               head, expected.data(), expected.data() + dims);
      Check(cudaStreamSynchronize(timer_.stream()), "check");
      Check(cudaMemcpy(expected_host.data(), expected.data(), sizeof(double) * (dims + 1),
                       cudaMemcpyDeviceToHost),
            "check");
      const size_t at = size_t(row) * c.q_heads + head;
      float lse = 0;
      Check(cudaMemcpy(&lse, args.lse + at, sizeof(float), cudaMemcpyDeviceToHost), "check");
      Check(cudaMemcpy(actual.data(), args.o + at * dims, sizeof(float) * dims,
                       cudaMemcpyDeviceToHost),
            "check");
      worst = std::max(worst, std::abs(lse - expected_host[dims]));
      for (int d = 0; d < dims; ++d) {
        const double error = std::abs(actual[d] - expected_host[d]);
        worst = std::isnan(error) ? INFINITY : std::max(worst, error);
      }
    }
    return worst;
  }

  const KernelOptions options_;
  const BenchOptions bench_;
  DeviceProperties device_;
  GraphTimer timer_;
  const GpuArray<std::byte> pool_;
  bool filled_ = false;
  DType filled_with_ = DType::kF32;
  int32_t filled_dims_ = 0;
};

DType OutputTypeOf(const std::string& name) {
  for (const DType t : {DType::kF32, DType::kBf16, DType::kF16, DType::kFp8E4M3, DType::kNvfp4}) {
    if (name == Name(t)) return t;
  }
  std::fprintf(stderr, "--output: %s is no type of outputs\n", name.c_str());
  std::exit(2);
}

int Main(int argc, char** argv) {
  std::string set = "field";
  std::string only;
  std::string json;
  KernelOptions options;
  BenchOptions bench_options;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const char* value = i + 1 < argc ? argv[i + 1] : "";
    if (flag == "--set")
      set = value, ++i;
    else if (flag == "--only")
      only = value, ++i;
    else if (flag == "--json")
      json = value, ++i;
    else if (flag == "--portable")
      options.portable = true;
    else if (flag == "--invariant")
      options.batch_invariant = true;
    else if (flag == "--fp8-queries")
      options.fp8_queries = true;
    else if (flag == "--alone")
      options.begins_early = false;
    else if (flag == "--apart")
      bench_options.apart = true;
    else if (flag == "--in-turn")
      bench_options.in_turn = true;
    else if (flag == "--shared-multiprocessors")
      bench_options.shared_multiprocessors = std::atoi(value), ++i;
    else if (flag == "--cluster")
      bench_options.cluster_size = std::atoi(value), ++i;
    else if (flag == "--output")
      bench_options.output = OutputTypeOf(value), ++i;
    else {
      std::fprintf(stderr, "unknown flag %s\n", argv[i]);
      return 2;
    }
  }
  const std::vector<Case> cases = CasesOf(set);
  if (cases.empty()) {
    std::fprintf(stderr, "unknown set %s\n", set.c_str());
    return 2;
  }

  Bench bench(options, bench_options);
  const double bandwidth = bench.ReadBandwidth();
  const int32_t* clusters = bench.device().clusters;
  std::printf("multiprocessors: %d, clusters of 2: %d, 4: %d, 8: %d\n",
              bench.device().multiprocessors, clusters[0], clusters[1], clusters[2]);
  std::printf("reads: %.2f TB/s\n%-52s %9s %9s %7s %6s %9s  %s\n", bandwidth * 1e-12, "case", "us",
              "floor us", "TB/s", "of", "error", "kernel");
  char text[64];
  std::snprintf(text, sizeof text, "\"read_bytes_per_second\": %.4g, ", bandwidth);
  CaseFile file(json, text);
  bool wrong = false;
  for (const Case& c : cases) {
    if (c.name.find(only) == std::string::npos) continue;
    if (options.fp8_queries && !IsFp8(c.kv.dtype)) continue;
    const Result r = bench.Run(c);
    if (r.microseconds == 0) {
      std::printf("%-52s does not fit\n", c.name.c_str());
      continue;
    }
    const double rate = r.bytes / (r.microseconds * 1e-6);
    std::printf("%-52s %9.1f %9.1f %7.2f %5.0f%% %9.1e  %s\n", c.name.c_str(), r.microseconds,
                r.bytes / bandwidth * 1e6, rate * 1e-12, 100 * rate / bandwidth, r.error,
                r.kernel.c_str());
    std::fflush(stdout);
    if (!(r.error < 2e-2)) wrong = true;
    std::snprintf(text, sizeof text, "\"bytes\": %.0f", r.bytes);
    file.Add(c.name, r.microseconds, text, r.error, r.kernel);
  }
  if (wrong) std::fprintf(stderr, "a result differs from the reference\n");
  return wrong ? 1 : 0;
}

}  // namespace
}  // namespace tributary::cuda

int main(int argc, char** argv) { return tributary::cuda::Main(argc, argv); }
