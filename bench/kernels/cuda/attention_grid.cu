// How fast attention over a paged cache is on one GPU, against how fast that GPU reads memory.
//
// Cold L2: consecutive calls use different copies of the cache, which together are several times
// the L2. The calls are captured in one CUDA graph; a figure is the median over replays of the
// graph's time divided by its calls. Each case is checked, on sampled rows and heads, against a
// float64 kernel that shares nothing with those under test but the layout. Usage:
//   attention_grid [--set field|shapes|dims|spread|batches|drafts|grid|all] [--only TEXT]
//                  [--json FILE] [--portable] [--invariant] [--fp8-queries] [--alone]
//                  [--cluster N]
// --fp8-queries rounds queries, too, and leaves out what has no FP8 cache. --alone keeps a call
// from beginning before the one ahead of it has ended.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "bench/kernels/cuda/gpu_bench.h"
#include "kernels/cuda/decode/attention.h"
#include "kernels/cuda/layout/page_layout.h"
#include "kernels/element.h"
#include "kernels/fp8_queries.h"
#include "kernels/head_dims.h"
#include "kernels/kv_geometry.h"

namespace tributary::cuda {
namespace {

constexpr size_t kPoolBytes = size_t{24} << 30;
constexpr size_t kRotatedBytes = size_t{320}
                                 << 20;  // at least this much between two uses of a copy

template <typename T>
T* Allocate(size_t count) {
  void* p = nullptr;
  Check(cudaMalloc(&p, std::max<size_t>(1, count * sizeof(T))), "cudaMalloc");
  return static_cast<T*>(p);
}

template <typename T>
void Upload(T* to, const std::vector<T>& from) {
  Check(cudaMemcpy(to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice), "upload");
}

struct Case {
  std::string name;
  std::vector<int64_t> lengths;
  KvGeometry kv = SquareGeometry(/*kv_heads=*/4, /*head_dim=*/128, DType::kFp8E4M3);
  int32_t q_heads = 32;
  int32_t page_size = 16;
  int32_t rows = 1;
  int64_t window = -1;
  bool causal = true;
};

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

class Bench {
 public:
  Bench(const KernelOptions& options, int32_t cluster_size)
      : options_(options), cluster_size_(cluster_size) {
    Check(QueryDevice(0, &device_));
    Check(cudaStreamCreate(&stream_), "cudaStreamCreate");
    Check(cudaEventCreate(&begin_), "cudaEventCreate");
    Check(cudaEventCreate(&end_), "cudaEventCreate");
    pool_ = Allocate<std::byte>(kPoolBytes);
  }

  const DeviceProperties& device() const { return device_; }

  // Bytes a second.
  double ReadBandwidth() {
    uint32_t* sink = Allocate<uint32_t>(1);
    Fill(DType::kFp8E4M3);
    const size_t bytes = size_t{8} << 30;
    const double us = Median(9, [&] {
      ReadAll<<<device_.multiprocessors * 4, 512, 0, stream_>>>(
          reinterpret_cast<const uint4*>(pool_), bytes / 16, sink);
    });
    return static_cast<double>(bytes) / (us * 1e-6);
  }

  Result Run(const Case& c) {
    Fill(c.kv.dtype);
    const auto sequences = static_cast<int32_t>(c.lengths.size());
    const int32_t rows = sequences * c.rows;
    int64_t total_keys = 0;
    for (const int64_t length : c.lengths) {
      total_keys += c.window < 0 ? length : std::min(length, c.window + c.rows);
    }
    const AttentionShape shape{.geometry = c.kv,
                               .q_heads = c.q_heads,
                               .page_size = c.page_size,
                               .max_rows = c.rows,
                               .sequences = sequences,
                               .total_keys = total_keys};
    KernelChoice choice = ChooseKernel(device_, shape, options_);
    if (cluster_size_ > 0) choice.cluster_size = cluster_size_;
    const DecodePlanShape plan_shape = DecodePlanShapeFor(choice, shape, device_);

    std::vector<PlanEntry> entries;
    std::vector<KeyRange> keys;
    int64_t pages = 0;
    Result result;
    for (int32_t i = 0; i < sequences; ++i) {
      entries.push_back({i * c.rows, c.rows, static_cast<int32_t>(pages)});
      KeyRange any{INT64_MAX, 0};
      for (int32_t row = 0; row < c.rows; ++row) {
        const int64_t position = c.lengths[i] - c.rows + row;
        const int64_t limit = c.causal ? position + 1 : c.lengths[i];
        keys.push_back(VisibleKeys(position, {c.window, -1}, limit));
        any = {std::min(any.lo, keys.back().lo), std::max(any.hi, keys.back().hi)};
      }
      result.bytes += static_cast<double>(Length(any) * c.kv.kv_heads * BytesPerTokenOfHead(c.kv));
      pages += (c.lengths[i] + c.page_size - 1) / c.page_size;
    }
    Plan plan;
    PlanAttention(plan_shape, entries, keys, &plan);

    const size_t copy_bytes = PageBytes(c.kv, c.page_size) * pages;
    if (copy_bytes > kPoolBytes) return result;
    const size_t copies = std::clamp<size_t>(
        static_cast<size_t>(double(kRotatedBytes) / result.bytes) + 1, 2, kPoolBytes / copy_bytes);
    std::vector<int32_t> tables;
    std::vector<int32_t> order(pages);
    std::iota(order.begin(), order.end(), 0);
    std::mt19937 random(3);
    for (size_t copy = 0; copy < copies; ++copy) {
      std::shuffle(order.begin(), order.end(), random);
      tables.insert(tables.end(), order.begin(), order.end());
    }

    WorkItem* items = Allocate<WorkItem>(plan.items.size());
    RowKeys* row_keys = Allocate<RowKeys>(plan.keys.size());
    int32_t* page_tables = Allocate<int32_t>(tables.size());
    Upload(items, plan.items);
    Upload(row_keys, plan.keys);
    Upload(page_tables, tables);
    const size_t output_rows = size_t(rows) * c.q_heads;
    const size_t elements = output_rows * c.kv.key_dim;  // of the queries
    std::vector<std::byte> q_host(elements * SizeOf(DType::kBf16));
    std::normal_distribution<float> normal(0.0f, 1.0f);
    for (size_t i = 0; i < elements; ++i) {
      StoreElement(DType::kBf16, q_host.data(), i, normal(random));
    }
    std::byte* q = Allocate<std::byte>(q_host.size());
    Upload(q, q_host);

    AttentionArgs args;
    args.items = items;
    args.keys = row_keys;
    args.q = q;
    args.q_heads = c.q_heads;
    args.kv_heads = c.kv.kv_heads;
    args.page_shift = static_cast<int32_t>(std::log2(c.page_size));
    args.sm_scale = 1.0f / std::sqrt(static_cast<float>(c.kv.key_dim));
    args.o = Allocate<float>(output_rows * c.kv.value_dim);
    args.lse = Allocate<float>(output_rows);
    args.partial_o = Allocate<float>(size_t(plan.partials) * choice.tile_rows * c.kv.value_dim);
    args.partial_lse = Allocate<float>(size_t(plan.partials) * choice.tile_rows);
    args.arrivals = Allocate<uint64_t>(plan.arrivals);
    Check(cudaMemset(args.arrivals, 0, plan.arrivals * sizeof(uint64_t)), "cudaMemset");
    const auto launch = [&](size_t copy) {
      AttentionArgs of_copy = args;
      of_copy.cache = pool_ + copy * copy_bytes;
      of_copy.page_tables = page_tables + copy * pages;
      Check(LaunchAttention(choice, shape, of_copy, plan_shape.blocks, stream_));
      return of_copy;
    };

    result.kernel = ToString(choice);
    AttentionArgs checked = launch(copies - 1);
    std::byte* rounded = nullptr;  // (the queries that the reference sees)
    if (options_.fp8_queries) {
      std::vector<float> floats(elements);
      RoundQueriesToFp8(DType::kBf16, c.kv.key_dim, q_host, floats.data());
      for (size_t i = 0; i < elements; ++i) {
        StoreElement(DType::kBf16, q_host.data(), i, floats[i]);  // exact
      }
      rounded = Allocate<std::byte>(q_host.size());
      Upload(rounded, q_host);
      checked.q = rounded;
    }
    result.error = Compare(c, checked, entries, keys);

    const size_t calls = std::max<size_t>(copies, 8);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    Check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), "capture");
    for (size_t call = 0; call < calls; ++call) launch(call % copies);
    Check(cudaStreamEndCapture(stream_, &graph), "capture");
    Check(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
    result.microseconds = Median(7, [&] { Check(cudaGraphLaunch(exec, stream_), "replay"); }) /
                          static_cast<double>(calls);
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    for (void* p :
         {static_cast<void*>(items), static_cast<void*>(row_keys), static_cast<void*>(page_tables),
          static_cast<void*>(q), static_cast<void*>(rounded), static_cast<void*>(args.o),
          static_cast<void*>(args.lse), static_cast<void*>(args.partial_o),
          static_cast<void*>(args.partial_lse), static_cast<void*>(args.arrivals)}) {
      cudaFree(p);
    }
    return result;
  }

 private:
  void Fill(DType type) {
    if (filled_ && filled_with_ == type) return;
    FillRandomWords<<<4096, 256, 0, stream_>>>(reinterpret_cast<uint32_t*>(pool_), kPoolBytes / 4,
                                               type, /*seed=*/0);
    Check(cudaStreamSynchronize(stream_), "fill");
    filled_ = true;
    filled_with_ = type;
  }

  template <typename F>
  double Median(int repeats, F f) {
    std::vector<double> times;
    for (int i = 0; i < repeats + 2; ++i) {
      Check(cudaEventRecord(begin_, stream_), "event");
      f();
      Check(cudaEventRecord(end_, stream_), "event");
      Check(cudaEventSynchronize(end_), "run");
      float ms = 0;
      Check(cudaEventElapsedTime(&ms, begin_, end_), "event");
      if (i >= 2) times.push_back(ms * 1e3);
    }
    std::nth_element(times.begin(), times.begin() + repeats / 2, times.end());
    return times[repeats / 2];
  }

  // The largest error of O over a few rows and heads.
  double Compare(const Case& c, const AttentionArgs& args, const std::vector<PlanEntry>& entries,
                 const std::vector<KeyRange>& keys) {
    const int32_t dims = c.kv.value_dim;
    double* expected = Allocate<double>(dims + 1);
    std::vector<double> expected_host(dims + 1);
    std::vector<float> actual(dims);
    double worst = 0;
    const int samples = 3;
    for (int i = 0; i < samples; ++i) {
      const size_t entry = i * (entries.size() - 1) / (samples - 1);
      const int row = entries[entry].row_begin + i * (c.rows - 1) / (samples - 1);
      const int head = i * (c.q_heads - 1) / (samples - 1);
      NaiveRow<<<1, 256, 0, stream_>>>(args, c.kv, entries[entry].page_table, keys[row], row, head,
                                       expected, expected + dims);
      Check(cudaStreamSynchronize(stream_), "check");
      Check(cudaMemcpy(expected_host.data(), expected, sizeof(double) * (dims + 1),
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
    cudaFree(expected);
    return worst;
  }

  const KernelOptions options_;
  const int32_t cluster_size_;
  DeviceProperties device_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
  std::byte* pool_ = nullptr;
  bool filled_ = false;
  DType filled_with_ = DType::kF32;
};

std::string Tokens(int64_t n) {
  return n % 1024 == 0 ? std::to_string(n / 1024) + "K" : std::to_string(n);
}

Case Uniform(int32_t batch, int64_t length, DType kv) {
  Case c;
  c.kv.dtype = kv;
  c.lengths.assign(batch, length);
  c.name = std::string(Name(kv)) + " " + std::to_string(batch) + " x " + Tokens(length);
  return c;
}

// The call of a draft's block of `rows`.
Case WithBlock(Case c, int32_t rows) {
  c.kv.kv_heads = 8;
  c.rows = rows;
  c.causal = false;
  c.name += ", block " + std::to_string(rows) + ", 32/8";
  return c;
}

Case Block(int32_t batch, int64_t length, DType kv, int32_t rows) {
  return WithBlock(Uniform(batch, length, kv), rows);
}

Case WithHeads(Case c, int32_t group, int32_t head_dim) {
  c.q_heads = group * c.kv.kv_heads;
  c.kv.key_dim = c.kv.value_dim = head_dim;
  c.name += ", group " + std::to_string(group) + ", d " + std::to_string(head_dim);
  return c;
}

// Lengths as far apart as those of a service's sequences.
Case LogNormal(int32_t batch, DType kv) {
  Case c = Uniform(batch, 0, kv);
  std::mt19937 random(5);
  std::lognormal_distribution<double> lengths(8.0, 1.0);
  for (int64_t& length : c.lengths) length = 1 + static_cast<int64_t>(lengths(random));
  c.name = std::string(Name(kv)) + " " + std::to_string(batch) + " x log-normal (median 3K)";
  return c;
}

// The table of the kernels' targets (docs/kernels.md).
std::vector<Case> FieldCases() {
  std::vector<Case> cases;
  for (DType kv : {DType::kFp8E4M3, DType::kBf16}) {
    const auto uniform = [&](int32_t batch, std::vector<int64_t> lengths) {
      for (int64_t length : lengths) cases.push_back(Uniform(batch, length * 1024, kv));
    };
    uniform(1, {1, 4, 16, 64, 256});
    uniform(8, {1, 4, 16});
    uniform(32, {4, 16});
    uniform(128, {1, 4});
    Case uneven = Uniform(31, 4096, kv);
    uneven.lengths.insert(uneven.lengths.begin(), 131072);
    uneven.q_heads = 64;
    uneven.kv.kv_heads = 8;
    uneven.page_size = 64;
    uneven.name = std::string(Name(kv)) + " 1 x 128K + 31 x 4K, 64/8, page 64";
    cases.push_back(uneven);
    for (auto [batch, length] : {std::pair{1, 4}, {1, 32}, {8, 4}, {8, 32}, {32, 4}}) {
      cases.push_back(Block(batch, length * 1024, kv, 16));
    }
    Case window = Block(8, 32768, kv, 16);
    window.window = 2047;
    window.name += ", window 2047";
    cases.push_back(window);
    for (int32_t rows : {1, 2, 4, 8}) {
      Case verify = Uniform(32, 16384, kv);
      verify.rows = rows;
      verify.name += ", verify " + std::to_string(rows);
      cases.push_back(verify);
    }
  }
  return cases;
}

// Neighbouring shapes around 512 MB: no cliff between them.
std::vector<Case> ShapeCases() {
  std::vector<Case> cases;
  for (DType kv : {DType::kFp8E4M3, DType::kFp8E5M2, DType::kBf16, DType::kF16}) {
    for (int32_t head_dim : {64, 128, 256}) {
      for (int32_t group : {1, 2, 4, 8, 16}) {
        const int64_t length = 65536 / head_dim * 128 / 4 / int64_t(SizeOf(kv));
        cases.push_back(WithHeads(Uniform(32, length, kv), group, head_dim));
      }
    }
  }
  cases.push_back(LogNormal(128, DType::kFp8E4M3));
  return cases;
}

// Every row of the table of head dims, with as many bytes in all: 32 sequences, 512 MB.
std::vector<Case> DimsCases() {
  std::vector<Case> cases;
  for (DType kv : {DType::kFp8E4M3, DType::kBf16}) {
    for (const HeadDims& dims : kHeadDims) {
      if (!dims.cuda()) continue;
      for (int32_t gqa_ratio : {8, 16}) {
        Case c = Uniform(32, 0, kv);
        c.kv.key_dim = dims.key_dim;
        c.kv.value_dim = dims.value_dim;
        c.q_heads = gqa_ratio * c.kv.kv_heads;
        // (A multiple of 16, so that no strip is read in part.)
        constexpr int64_t kSequenceBytes = int64_t{16} << 20;
        const int64_t length =
            kSequenceBytes / (c.kv.kv_heads * BytesPerTokenOfHead(c.kv)) / 16 * 16;
        c.lengths.assign(c.lengths.size(), length);
        c.name = std::string(Name(kv)) + " d " + HeadDimsName(dims.key_dim, dims.value_dim) +
                 ", GQA ratio " + std::to_string(gqa_ratio) + ", 32 x " + Tokens(length);
        cases.push_back(c);
      }
    }
  }
  return cases;
}

// Lengths far apart, in batches, types, head dims and rows of all sizes.
std::vector<Case> SpreadCases() {
  std::vector<Case> cases;
  for (DType kv : {DType::kFp8E4M3, DType::kBf16}) {
    for (int32_t batch : {8, 32, 128, 256}) cases.push_back(LogNormal(batch, kv));
    for (int32_t head_dim : {64, 256}) {
      for (int32_t group : {8, 16}) {
        cases.push_back(WithHeads(LogNormal(128, kv), group, head_dim));
      }
    }
    for (int32_t batch : {8, 32, 128}) cases.push_back(WithBlock(LogNormal(batch, kv), 16));
  }
  return cases;
}

// Batches of one length whose jobs do not divide the multiprocessors.
std::vector<Case> BatchCases() {
  std::vector<Case> cases;
  for (DType kv : {DType::kFp8E4M3, DType::kBf16}) {
    for (int64_t length : {1024, 8192}) {
      for (int32_t batch : {3, 5, 7, 11, 13, 18, 24, 40, 50, 100, 200}) {
        cases.push_back(Uniform(batch, length, kv));
        if (batch <= 50) cases.push_back(Block(batch, length, kv, 16));
      }
    }
  }
  return cases;
}

// Drafts' blocks of 16 rows over contexts of many lengths.
std::vector<Case> DraftCases() {
  std::vector<Case> cases;
  for (int32_t batch : {1, 2, 4, 8}) {
    for (int64_t length = 2048; length <= 131072; length *= 2) {
      cases.push_back(Block(batch, length, DType::kFp8E4M3, 16));
    }
  }
  return cases;
}

// Batch x length, as decode backends are usually compared.
std::vector<Case> GridCases() {
  std::vector<Case> cases;
  for (DType kv : {DType::kFp8E4M3, DType::kBf16}) {
    for (int32_t batch : {1, 4, 8, 16, 32, 64, 128, 256}) {
      for (int64_t length = 1024; length <= 131072; length *= 2) {
        cases.push_back(Uniform(batch, length, kv));
      }
    }
  }
  return cases;
}

int Main(int argc, char** argv) {
  std::string set = "field";
  std::string only;
  std::string json;
  KernelOptions options;
  int32_t cluster_size = 0;
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
    else if (flag == "--cluster")
      cluster_size = std::atoi(value), ++i;
    else {
      std::fprintf(stderr, "unknown flag %s\n", argv[i]);
      return 2;
    }
  }
  std::vector<Case> cases;
  const auto add = [&](const char* name, std::vector<Case> more) {
    if (set == name || set == "all") cases.insert(cases.end(), more.begin(), more.end());
  };
  add("field", FieldCases());
  add("shapes", ShapeCases());
  add("dims", DimsCases());
  add("spread", SpreadCases());
  add("batches", BatchCases());
  add("drafts", DraftCases());
  add("grid", GridCases());

  Bench bench(options, cluster_size);
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
