// Measures prefill on one GPU: new tokens over each other, and over context in the paged cache.
//
// L2 is cold: consecutive calls use different copies of every tensor, together several times the
// size of L2. The calls are captured in one CUDA graph; a figure is the median of its replays
// divided by the number of its calls. Before a case is timed, sampled rows and heads are checked
// against a float64 kernel that shares nothing with the measured ones but the layout. Usage:
//   prefill_bench [--only TEXT] [--json FILE] [--portable] [--invariant] [--workspace SLOTS]
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <string>

#include "bench/kernels/cuda/gpu_bench.h"
#include "kernels/cuda/layout/page_layout.h"
#include "kernels/cuda/prefill/prefill.h"

namespace tributary::cuda {
namespace {

constexpr size_t kRotatedBytes = size_t{256} << 20;

struct Case {
  std::string name;
  int32_t batch = 1;
  int32_t new_tokens = 0;
  int64_t context = 0;
  DType kv = DType::kBf16;  // of the cache
  int32_t q_heads = 32;
  int32_t kv_heads = 8;
  int32_t key_dim = 128;
  int32_t value_dim = 128;
  int32_t page_size = 16;
  bool fp8_queries = false;
  bool fp8_weights = false;

  KvGeometry Geometry(DType dtype) const {
    return {.kv_heads = kv_heads, .key_dim = key_dim, .value_dim = value_dim, .dtype = dtype};
  }
};

// One row and head, by the definition, in float64, over slots [0, context) of the cache and new
// tokens [0, visible). One block of 256 threads.
__global__ void NaiveRow(PrefillArgs context, KvGeometry g, int page_size, int32_t page_table,
                         int64_t slots, PrefillArgs fresh, int32_t token_begin, int32_t visible,
                         int q_heads, int row, int head, double* o, double* lse) {
  __shared__ double scratch[256];
  const int kv_head = head / (q_heads / g.kv_heads);
  const int bytes = static_cast<int>(SizeOf(g.dtype));
  const auto element = [&](int64_t key, int d, bool values) {
    if (key >= slots) {
      const size_t token = token_begin + (key - slots);
      return ElementAt(DType::kBf16, values ? fresh.v : fresh.k,
                       (token * g.kv_heads + kv_head) * (values ? g.value_dim : g.key_dim) + d);
    }
    const int32_t page = context.page_tables[page_table + key / page_size];
    const int token = static_cast<int>(key % page_size);
    const size_t at =
        values ? ValuePlaneOffset(g, page_size, kv_head) + ValueOffset(token, d, g.value_dim, bytes)
               : KeyPlaneOffset(g, page_size, kv_head) + KeyOffset(token, d, g.key_dim, bytes);
    return ElementAt(g.dtype, context.cache, (page * PageBytes(g, page_size) + at) / bytes);
  };
  const auto logit = [&](int64_t key) {
    double x = 0;
    for (int d = 0; d < g.key_dim; ++d) {
      x += element(key, d, false) *
           ElementAt(DType::kBf16, fresh.q, (size_t(row) * q_heads + head) * g.key_dim + d);
    }
    return x * fresh.sm_scale;
  };
  // The logits are small enough here to be summed without a maximum.
  double sum = 0;
  for (int64_t key = threadIdx.x; key < slots + visible; key += 256) sum += exp(logit(key));
  scratch[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < 256; ++i) sum += scratch[i];
    scratch[0] = sum;
    *lse = log(sum);
  }
  for (int d = threadIdx.x; d < g.value_dim; d += 256) o[d] = 0;
  __syncthreads();
  sum = scratch[0];
  for (int64_t key = threadIdx.x; key < slots + visible; key += 256) {
    const double weight = exp(logit(key)) / sum;
    for (int d = 0; d < g.value_dim; ++d) atomicAdd(o + d, weight * element(key, d, true));
  }
}

// A plan on the device.
struct DevicePlan {
  explicit DevicePlan(const PrefillPlan& plan)
      : items(plan.items), gathers(plan.gathers), keys(plan.keys), passes(plan.passes) {}
  void Set(PrefillArgs* args) const {
    args->items = items.data();
    args->gathers = gathers.data();
    args->keys = keys.data();
  }
  GpuArray<PrefillItem> items;
  GpuArray<PrefillGather> gathers;
  GpuArray<RowKeys> keys;
  std::vector<PrefillPass> passes;
};

struct Result {
  double microseconds = 0;
  double operations = 0;
  double error = 0;
  std::string kernel;
};

// The rows of a case: new tokens that see each other, and the context.
struct Rows {
  std::vector<PrefillEntry> entries;
  std::vector<KeyRange> fresh_keys, context_keys;

  Rows(const Case& c, int64_t pages_of_one) {
    for (int32_t i = 0; i < c.batch; ++i) {
      PrefillEntry entry;
      entry.row_begin = entry.token_begin = i * c.new_tokens;
      entry.row_count = entry.token_count = c.new_tokens;
      entry.page_table = static_cast<int32_t>(i * pages_of_one);
      entries.push_back(entry);
      for (int32_t row = 0; row < c.new_tokens; ++row) {
        fresh_keys.push_back({0, row + 1});
        context_keys.push_back({0, c.context});
      }
    }
  }
};

// The tensors of a case, in as many copies as it takes to keep L2 cold.
struct Tensors {
  Tensors(const Case& c, size_t pages) {
    const size_t rows = size_t(c.batch) * c.new_tokens;
    const size_t q_bytes = 2 * rows * c.q_heads * c.key_dim;
    const size_t o_elements = rows * c.q_heads * c.value_dim;
    const size_t k_bytes = 2 * rows * c.kv_heads * c.key_dim;
    const size_t v_bytes = 2 * rows * c.kv_heads * c.value_dim;
    const size_t cache_bytes = pages * PageBytes(c.Geometry(c.kv), c.page_size);
    const size_t bytes = q_bytes + 2 * o_elements + k_bytes + v_bytes + cache_bytes;
    const auto copies = static_cast<int>(std::max<size_t>(2, kRotatedBytes / bytes + 1));
    for (int i = 0; i < copies; ++i) {
      q.emplace_back(q_bytes);
      k.emplace_back(k_bytes);
      v.emplace_back(v_bytes);
      cache.emplace_back(cache_bytes);
      o.emplace_back(o_elements * 4);
      FillRandom(q.back(), DType::kBf16, 4 * i);
      FillRandom(k.back(), DType::kBf16, 4 * i + 1);
      FillRandom(v.back(), DType::kBf16, 4 * i + 2);
      FillRandom(cache.back(), c.kv, 4 * i + 3);
      o.back().Poison();
    }
  }

  int copies() const { return static_cast<int>(q.size()); }
  void Set(int copy, PrefillArgs* args) const {
    args->q = q[copy].data();
    args->k = k[copy].data();
    args->v = v[copy].data();
    args->cache = cache[copy].data();
    args->o = o[copy].data();
  }

  std::vector<GpuArray<std::byte>> q, k, v, cache, o;
};

std::vector<int32_t> ShuffledTable(size_t pages) {
  std::vector<int32_t> table(pages);
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), std::mt19937(7));
  return table;
}

class Bench {
 public:
  Bench(bool portable, bool invariant, int64_t workspace_slots)
      : portable_(portable), invariant_(invariant), workspace_slots_(workspace_slots) {
    Check(QueryDevice(0, &device_));
  }

  Result Run(const Case& c) {
    const int32_t row_count = c.batch * c.new_tokens;
    const int64_t pages_of_one = (c.context + c.page_size - 1) / c.page_size;
    const size_t pages = pages_of_one * c.batch;
    PrefillShape fresh_shape;
    fresh_shape.geometry = c.Geometry(DType::kBf16);
    fresh_shape.q_heads = fresh_shape.head_count = c.q_heads;
    PrefillShape context_shape = fresh_shape;
    context_shape.geometry.dtype = c.kv;
    context_shape.page_size = c.page_size;
    const PrefillChoice fresh_choice = ChoosePrefill(device_, fresh_shape, {portable_});
    const PrefillChoice context_choice = ChoosePrefill(device_, context_shape,
                                                       {.portable = portable_,
                                                        .fp8_queries = c.fp8_queries,
                                                        .fp8_weights = c.fp8_weights,
                                                        .batch_invariant = invariant_});

    const Rows rows(c, pages_of_one);
    PrefillPlan plan;
    PrefillPlanShape plan_shape =
        PrefillPlanShapeFor(context_choice, context_shape, device_, workspace_slots_);
    PlanPrefillContext(plan_shape, rows.entries, rows.context_keys, &plan);
    const DevicePlan context_plan(plan);
    plan_shape = PrefillPlanShapeFor(fresh_choice, fresh_shape, device_);
    plan_shape.accumulate = c.context > 0;
    PlanPrefillNewTokens(plan_shape, rows.entries, rows.fresh_keys, &plan);
    const DevicePlan fresh_plan(plan);

    const GpuArray<int32_t> page_tables(ShuffledTable(pages));
    const GpuArray<std::byte> workspace(
        PrefillWorkspaceBytes(context_choice, context_shape, row_count, workspace_slots_));
    const Tensors tensors(c, pages);
    GpuArray<float> lse(size_t(row_count) * c.q_heads);
    lse.Poison();

    PrefillArgs args;
    args.rows = args.tokens = row_count;
    args.page_tables = page_tables.data();
    args.sm_scale = 1.0f / std::sqrt(static_cast<float>(c.key_dim));
    // Parts are merged in f32; one part alone gives the model's own type.
    args.o_dtype = c.context > 0 ? DType::kF32 : DType::kBf16;
    args.lse = lse.data();
    args.workspace = workspace.data();
    args.workspace_slots = workspace_slots_;
    const auto launch = [&](int call) {
      tensors.Set(call % tensors.copies(), &args);
      if (c.context > 0) {
        context_plan.Set(&args);
        Check(LaunchPrefill(context_choice, context_shape, context_plan.passes, args,
                            timer_.stream()));
      }
      fresh_plan.Set(&args);
      Check(LaunchPrefill(fresh_choice, fresh_shape, fresh_plan.passes, args, timer_.stream()));
    };

    Result result;
    result.kernel = ToString(c.context > 0 ? context_choice : fresh_choice);
    launch(tensors.copies() - 1);
    Check(cudaStreamSynchronize(timer_.stream()), "prefill");
    result.error = Compare(c, args, rows.entries);
    result.microseconds = timer_.MicrosecondsOf(std::max(tensors.copies(), 4), launch);
    const double pairs =
        double(row_count) * (double(c.context) + (double(c.new_tokens) + 1) / 2) * c.q_heads;
    result.operations = 2 * pairs * (c.key_dim + c.value_dim);
    return result;
  }

 private:
  // The largest error of O and LSE over a few rows and heads, O's relative to what its type rounds.
  double Compare(const Case& c, const PrefillArgs& args, const std::vector<PrefillEntry>& entries) {
    const GpuArray<double> expected(c.value_dim + 1);
    double worst = 0;
    constexpr int kSamples = 5;
    for (int i = 0; i < kSamples; ++i) {
      const PrefillEntry& entry = entries[i * (entries.size() - 1) / (kSamples - 1)];
      const int in_entry = i * (entry.row_count - 1) / (kSamples - 1);
      const int row = entry.row_begin + in_entry;
      const int head = i * (c.q_heads - 1) / (kSamples - 1);
      NaiveRow<<<1, 256>>>(args, c.Geometry(c.kv), c.page_size, entry.page_table, c.context, args,
                           entry.token_begin, in_entry + 1, c.q_heads, row, head, expected.data(),
                           expected.data() + c.value_dim);
      Check(cudaDeviceSynchronize(), "check");
      const size_t at = size_t(row) * c.q_heads + head;
      float lse = 0;
      Check(cudaMemcpy(&lse, args.lse + at, sizeof(lse), cudaMemcpyDeviceToHost), "check");
      worst = std::max(worst, std::abs(lse - expected.At(c.value_dim)));
      if (std::isnan(lse)) return INFINITY;
      for (int d = 0; d < c.value_dim; ++d) {
        const size_t element = at * c.value_dim + d;
        float actual = 0;
        if (args.o_dtype == DType::kF32) {
          Check(
              cudaMemcpy(&actual, static_cast<float*>(args.o) + element, 4, cudaMemcpyDeviceToHost),
              "check");
        } else {
          uint16_t bits = 0;
          Check(cudaMemcpy(&bits, static_cast<uint16_t*>(args.o) + element, 2,
                           cudaMemcpyDeviceToHost),
                "check");
          actual = FloatFromBf16(bits);
        }
        const double error = std::abs(actual - expected.At(d));
        worst = std::isnan(error) ? INFINITY : std::max(worst, error);
      }
    }
    return worst;
  }

  const bool portable_;
  const bool invariant_;
  const int64_t workspace_slots_;
  DeviceProperties device_;
  GraphTimer timer_;
};

std::vector<Case> Cases() {
  std::vector<Case> cases;
  const auto add = [&](std::string name, Case c) {
    c.name = name + ", " + std::to_string(c.q_heads) + "/" + std::to_string(c.kv_heads) + ", D " +
             std::to_string(c.key_dim) +
             (c.key_dim == c.value_dim ? "" : "/" + std::to_string(c.value_dim));
    if (c.context > 0) c.name = std::string(Name(c.kv)) + " " + c.name;
    cases.push_back(c);
  };
  const auto add_fp8 = [&](int32_t key_dim, int32_t value_dim) {
    for (const bool weights : {false, true}) {
      add(weights ? "2K new over 64K, FP8 queries, weights" : "2K new over 64K, FP8 queries",
          {.new_tokens = 2048,
           .context = 65536,
           .kv = DType::kFp8E4M3,
           .key_dim = key_dim,
           .value_dim = value_dim,
           .fp8_queries = true,
           .fp8_weights = weights});
    }
  };
  for (int32_t tokens : {1024, 2048, 4096, 8192, 16384, 32768}) {
    add(std::to_string(tokens / 1024) + "K new", {.new_tokens = tokens});
  }
  add("8 x 1K new", {.batch = 8, .new_tokens = 1024});
  add("8K new", {.new_tokens = 8192, .q_heads = 64, .kv_heads = 8, .key_dim = 64, .value_dim = 64});
  add("8K new",
      {.new_tokens = 8192, .q_heads = 16, .kv_heads = 4, .key_dim = 256, .value_dim = 256});
  // The other head dims, with the heads and lengths of D 128.
  const std::pair<int32_t, int32_t> dims[] = {{80, 80}, {96, 96}, {192, 192}, {192, 128}};
  for (const auto& [key_dim, value_dim] : dims) {
    add("8K new", {.new_tokens = 8192, .key_dim = key_dim, .value_dim = value_dim});
    for (DType kv : {DType::kBf16, DType::kFp8E4M3}) {
      add("2K new over 64K", {.new_tokens = 2048,
                              .context = 65536,
                              .kv = kv,
                              .key_dim = key_dim,
                              .value_dim = value_dim});
    }
    add_fp8(key_dim, value_dim);
  }
  for (DType kv : {DType::kBf16, DType::kFp8E4M3}) {
    add("2K new over 64K", {.new_tokens = 2048, .context = 65536, .kv = kv});
    add("1K new over 64K", {.new_tokens = 1024, .context = 65536, .kv = kv});
    add("4 x (4K new over 8K)", {.batch = 4, .new_tokens = 4096, .context = 8192, .kv = kv});
    add("128 new over 64K", {.new_tokens = 128, .context = 65536, .kv = kv});
    add("512 new over 32K", {.new_tokens = 512, .context = 32768, .kv = kv});
  }
  add_fp8(128, 128);
  return cases;
}

int Main(int argc, char** argv) {
  std::string only;
  std::string json;
  bool portable = false;
  bool invariant = false;
  int64_t workspace_slots = 65536;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const char* value = i + 1 < argc ? argv[i + 1] : "";
    if (flag == "--only") {
      only = value, ++i;
    } else if (flag == "--json") {
      json = value, ++i;
    } else if (flag == "--portable") {
      portable = true;
    } else if (flag == "--invariant") {
      invariant = true;
    } else if (flag == "--workspace") {
      workspace_slots = std::atoll(value), ++i;
    } else {
      std::fprintf(stderr, "unknown flag %s\n", argv[i]);
      return 2;
    }
  }
  Bench bench(portable, invariant, workspace_slots);
  CaseFile file(json, "");
  std::printf("%-48s %10s %8s %9s  %s\n", "case", "us", "TFLOP/s", "error", "kernel");
  bool wrong = false;
  for (const Case& c : Cases()) {
    if (c.name.find(only) == std::string::npos) continue;
    const Result r = bench.Run(c);
    std::printf("%-48s %10.1f %8.0f %9.1e  %s\n", c.name.c_str(), r.microseconds,
                r.operations / r.microseconds * 1e-6, r.error, r.kernel.c_str());
    std::fflush(stdout);
    if (!(r.error < 2e-2)) wrong = true;
    char text[64];
    std::snprintf(text, sizeof text, "\"operations\": %.4g", r.operations);
    file.Add(c.name, r.microseconds, text, r.error, r.kernel);
  }
  if (wrong) std::fprintf(stderr, "a result differs from the reference\n");
  return wrong ? 1 : 0;
}

}  // namespace
}  // namespace tributary::cuda

int main(int argc, char** argv) { return tributary::cuda::Main(argc, argv); }
