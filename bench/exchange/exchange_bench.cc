// The exchange and merge of partials between GPUs, strategy beside strategy. See README.md.
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "collective/group/device_group.h"
#include "collective/rendezvous/memory_rendezvous.h"
#include "kernels/element.h"
#include "kernels/reference.h"

namespace tributary::collective {
namespace {

constexpr int kExchangesOfAGraph = 50;
constexpr int kReplays = 21;

void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}
void Check(const Status& status, const char* what) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s: %s\n", what, status.message().c_str());
  std::exit(1);
}

Deadline Soon() { return std::chrono::steady_clock::now() + std::chrono::seconds(40); }

struct Flags {
  int ranks = 0;
  std::vector<int32_t> rows = {1, 8, 32, 128, 512};
  int32_t heads = 32;
  int32_t head_dim = 128;
  DType wire = DType::kBf16;
  DType input = DType::kBf16;  // of a rank's own partial
  bool sweep = false;
  std::string json;
};

DType ParseType(const std::string& text) {
  for (const DType t : {DType::kF32, DType::kBf16, DType::kF16}) {
    if (text == Name(t)) return t;
  }
  std::fprintf(stderr, "'%s' is not f32, bf16 or f16\n", text.c_str());
  std::exit(2);
}

Flags ParseFlags(int argc, char** argv) {
  Flags f;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const auto value = [&]() -> std::string {
      if (i + 1 == argc) {
        std::fprintf(stderr, "%s wants a value\n", flag.c_str());
        std::exit(2);
      }
      return argv[++i];
    };
    if (flag == "--ranks") {
      f.ranks = std::stoi(value());
    } else if (flag == "--rows") {
      f.rows.clear();
      std::istringstream list(value());
      for (std::string item; std::getline(list, item, ',');) f.rows.push_back(std::stoi(item));
    } else if (flag == "--heads") {
      f.heads = std::stoi(value());
    } else if (flag == "--head_dim") {
      f.head_dim = std::stoi(value());
    } else if (flag == "--wire") {
      f.wire = f.input = ParseType(value());
    } else if (flag == "--input") {
      f.input = ParseType(value());
    } else if (flag == "--sweep") {
      f.sweep = true;
    } else if (flag == "--json") {
      f.json = value();
    } else {
      std::fprintf(stderr, "unknown flag %s\n", flag.c_str());
      std::exit(2);
    }
  }
  return f;
}

// Ranks as threads that stay, each on its GPU; work is given to all at once.
class Ranks {
 public:
  explicit Ranks(int size) : size_(size) {
    for (int r = 0; r < size; ++r) {
      Check(cudaSetDevice(r), "cudaSetDevice");
      cudaStream_t stream;
      Check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
      streams_.push_back(stream);
    }
  }
  int size() const { return size_; }
  cudaStream_t stream(int rank) const { return streams_[rank]; }

  void Run(const std::function<void(int)>& body) const {
    std::vector<std::thread> threads;
    for (int r = 0; r < size_; ++r) {
      threads.emplace_back([&body, r] {
        Check(cudaSetDevice(r), "cudaSetDevice");
        body(r);
      });
    }
    for (std::thread& t : threads) t.join();
  }

 private:
  const int size_;
  std::vector<cudaStream_t> streams_;
};

template <typename T>
T* Upload(const std::vector<T>& from) {
  void* p = nullptr;
  Check(cudaMalloc(&p, from.size() * sizeof(T)), "cudaMalloc");
  Check(cudaMemcpy(p, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice), "upload");
  return static_cast<T*>(p);
}

// Partials of the largest call on every rank; smaller calls use their first rows. The values are
// bf16's, so that every wire carries them exactly.
struct Data {
  std::vector<std::vector<float>> o;
  std::vector<std::vector<float>> lse;
  std::vector<std::byte*> device_o;
  std::vector<float*> device_lse;
  std::vector<uint16_t*> device_out;

  Data(const Ranks& ranks, const Flags& f) {
    const size_t pairs =
        static_cast<size_t>(*std::max_element(f.rows.begin(), f.rows.end())) * f.heads;
    for (int r = 0; r < ranks.size(); ++r) {
      std::mt19937 random(r);
      std::normal_distribution<float> normal;
      std::vector<float> partial(pairs * f.head_dim);
      std::vector<std::byte> encoded(partial.size() * SizeOf(f.input));
      for (size_t i = 0; i < partial.size(); ++i) {
        partial[i] = FloatFromBf16(Bf16FromFloat(normal(random)));
        if (f.wire == DType::kF16) partial[i] = FloatFromF16(F16FromFloat(partial[i]));
        StoreElement(f.input, encoded.data(), i, partial[i]);
      }
      std::vector<float> lses(pairs);
      for (float& x : lses) x = 3 * normal(random);
      Check(cudaSetDevice(r), "cudaSetDevice");
      device_o.push_back(Upload(encoded));
      device_lse.push_back(Upload(lses));
      device_out.push_back(Upload(std::vector<uint16_t>(partial.size())));
      o.push_back(std::move(partial));
      lse.push_back(std::move(lses));
    }
  }
};

// How an exchange is done, beyond its strategy.
struct Variant {
  std::string name;
  Strategy strategy = Strategy::kDirect;
  DirectTuning tuning;
};

struct Result {
  std::string variant;
  Placement placement;
  int32_t rows;
  double microseconds;
  size_t bytes;
};

class Group {
 public:
  Group(const Ranks& ranks, const Flags& f, const DirectTuning& tuning, Wanted nccl, uint64_t epoch)
      : groups_(ranks.size()) {
    MemoryRendezvous rendezvous;
    ranks.Run([&](int r) {
      DeviceGroupOptions options{.rank = r, .size = ranks.size(), .epoch = epoch, .device = r};
      options.limits = {.rows = *std::max_element(f.rows.begin(), f.rows.end()),
                        .heads = f.heads,
                        .value_dim = f.head_dim,
                        .widest = f.wire};
      options.nccl = nccl;
      options.direct = Wanted::kIfPossible;
      options.direct_tuning = tuning;
      Check(CreateDeviceGroup(options, rendezvous, Soon(), &groups_[r]), "forming the group");
    });
    ranks_ = &ranks;
  }
  ~Group() {
    ranks_->Run([&](int r) { groups_[r].reset(); });
  }
  DeviceGroup& of(int rank) const { return *groups_[rank]; }

 private:
  const Ranks* ranks_ = nullptr;
  std::vector<std::unique_ptr<DeviceGroup>> groups_;
};

class Bench {
 public:
  explicit Bench(const Flags& flags, int ranks)
      : flags_(flags), ranks_(ranks), data_(ranks_, flags) {}

  void RunVariant(const Group& group, const Variant& v, Placement placement) {
    for (const int32_t rows : flags_.rows) {
      Verify(group, v, placement, rows);
      const double us = Time(group, v, placement, rows);
      if (rows == flags_.rows.front()) enqueue_us_ = TimeEnqueue(group, v, placement, rows);
      const size_t bytes =
          DeviceBytesSent(Params(0, v, placement, rows), ranks_.size(), v.strategy);
      results_.push_back({v.name, placement, rows, us, bytes});
    }
    PrintRow(v.name, placement);
  }

  void PrintHeader() const {
    std::printf("%-9s %-34s", "heads", "strategy");
    for (const int32_t rows : flags_.rows) std::printf(" %9d", rows);
    std::printf("   us at this batch; host us to enqueue the smallest; KiB sent\n");
  }

  void WriteJson() const {
    if (flags_.json.empty()) return;
    std::FILE* file = std::fopen(flags_.json.c_str(), "w");
    if (file == nullptr) return;
    std::fprintf(file, "{\"ranks\": %d, \"heads\": %d, \"head_dim\": %d, \"results\": [\n",
                 ranks_.size(), flags_.heads, flags_.head_dim);
    for (size_t i = 0; i < results_.size(); ++i) {
      const Result& r = results_[i];
      std::fprintf(file,
                   "  {\"variant\": \"%s\", \"placement\": \"%s\", \"rows\": %d, \"us\": %.3f, "
                   "\"bytes\": %zu}%s\n",
                   r.variant.c_str(), Name(r.placement), r.rows, r.microseconds, r.bytes,
                   i + 1 == results_.size() ? "" : ",");
    }
    std::fprintf(file, "]}\n");
    std::fclose(file);
  }

  const Ranks& ranks() const { return ranks_; }

 private:
  DeviceExchangeParams Params(int rank, const Variant& v, Placement placement, int32_t rows) const {
    return {.o = data_.device_o[rank],
            .o_dtype = flags_.input,
            .lse = data_.device_lse[rank],
            .rows = rows,
            .heads = flags_.heads,
            .value_dim = flags_.head_dim,
            .placement = placement,
            .strategy = v.strategy,
            .wire = flags_.wire,
            .out = data_.device_out[rank],
            .out_dtype = DType::kBf16};
  }

  // Also the first call, which a graph must not capture.
  void Verify(const Group& group, const Variant& v, Placement placement, int32_t rows) const {
    const size_t elements = static_cast<size_t>(rows) * flags_.heads * flags_.head_dim;
    const ReferenceResult want = Reference(rows);
    ranks_.Run([&](int r) {
      Check(cudaMemset(data_.device_out[r], 0xff, elements * 2), "poisoning");
      for (int i = 0; i < 3; ++i) {
        Check(group.of(r).Exchange(Params(r, v, placement, rows), ranks_.stream(r)), "exchange");
      }
      Check(group.of(r).Await(ranks_.stream(r), Soon()), "waiting for the exchange");
      const bool gathered = placement == Placement::kGathered;
      if (gathered && r != 0) return;
      const HeadSlice slice =
          gathered ? HeadSlice{0, flags_.heads} : SliceOfRank(flags_.heads, ranks_.size(), r);
      std::vector<uint16_t> got(static_cast<size_t>(rows) * slice.count * flags_.head_dim);
      Check(cudaMemcpy(got.data(), data_.device_out[r], got.size() * 2, cudaMemcpyDeviceToHost),
            "download");
      for (size_t i = 0; i < got.size(); ++i) {
        const size_t d = i % flags_.head_dim;
        const size_t unit = i / flags_.head_dim;
        const size_t pair = unit / slice.count * flags_.heads + slice.begin + unit % slice.count;
        const double expected = want.o[pair * flags_.head_dim + d];
        const double value = FloatFromBf16(got[i]);
        // ag_rs adds in bf16.
        const double bound =
            (v.strategy == Strategy::kAgRs ? 0.02 : 0.004) * (1 + std::abs(expected));
        if (!(std::abs(value - expected) <= bound)) {
          std::fprintf(stderr, "%s %s, %d rows, rank %d: %f at %zu instead of %f\n", v.name.c_str(),
                       Name(placement), rows, r, value, i, expected);
          std::exit(1);
        }
      }
    });
  }

  ReferenceResult Reference(int32_t rows) const {
    std::vector<const float*> o, lse;
    for (int r = 0; r < ranks_.size(); ++r) {
      o.push_back(data_.o[r].data());
      lse.push_back(data_.lse[r].data());
    }
    return ReferenceMerge(
        {.o = o, .lse = lse, .rows = rows, .heads = flags_.heads, .value_dim = flags_.head_dim});
  }

  double Time(const Group& group, const Variant& v, Placement placement, int32_t rows) const {
    std::vector<double> slowest(kReplays, 0.0);
    std::vector<std::vector<double>> times(ranks_.size(), std::vector<double>(kReplays));
    std::barrier<> together(ranks_.size());
    ranks_.Run([&](int r) {
      const cudaStream_t stream = ranks_.stream(r);
      cudaGraph_t graph;
      cudaGraphExec_t executable;
      Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
      for (int i = 0; i < kExchangesOfAGraph; ++i) {
        Check(group.of(r).Exchange(Params(r, v, placement, rows), stream), "exchange");
      }
      Check(cudaStreamEndCapture(stream, &graph), "capture");
      Check(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
      cudaEvent_t begin, end;
      Check(cudaEventCreate(&begin), "event");
      Check(cudaEventCreate(&end), "event");
      for (int replay = -2; replay < kReplays; ++replay) {
        together.arrive_and_wait();
        Check(cudaEventRecord(begin, stream), "event");
        Check(cudaGraphLaunch(executable, stream), "graph launch");
        Check(cudaEventRecord(end, stream), "event");
        Check(group.of(r).Await(stream, Soon()), "waiting for a graph");
        float milliseconds = 0;
        Check(cudaEventElapsedTime(&milliseconds, begin, end), "event");
        if (replay >= 0) times[r][replay] = 1e3 * milliseconds / kExchangesOfAGraph;
      }
      Check(cudaEventDestroy(begin), "event");
      Check(cudaEventDestroy(end), "event");
      Check(cudaGraphExecDestroy(executable), "graph");
      Check(cudaGraphDestroy(graph), "graph");
    });
    for (int i = 0; i < kReplays; ++i) {
      for (const auto& of_rank : times) slowest[i] = std::max(slowest[i], of_rank[i]);
    }
    std::sort(slowest.begin(), slowest.end());
    return slowest[kReplays / 2];
  }

  // What a call costs the host outside of a graph; the slowest rank.
  double TimeEnqueue(const Group& group, const Variant& v, Placement placement,
                     int32_t rows) const {
    constexpr int kCalls = 50;
    std::vector<double> of_rank(ranks_.size());
    ranks_.Run([&](int r) {
      const auto begin = std::chrono::steady_clock::now();
      for (int i = 0; i < kCalls; ++i) {
        Check(group.of(r).Exchange(Params(r, v, placement, rows), ranks_.stream(r)), "exchange");
      }
      const std::chrono::duration<double, std::micro> took =
          std::chrono::steady_clock::now() - begin;
      of_rank[r] = took.count() / kCalls;
      Check(group.of(r).Await(ranks_.stream(r), Soon()), "waiting for exchanges");
    });
    return *std::max_element(of_rank.begin(), of_rank.end());
  }

  void PrintRow(const std::string& name, Placement placement) const {
    std::printf("%-9s %-34s", Name(placement), name.c_str());
    const size_t first = results_.size() - flags_.rows.size();
    for (size_t i = first; i < results_.size(); ++i)
      std::printf(" %9.2f", results_[i].microseconds);
    std::printf(" %8.1f ", enqueue_us_);
    for (size_t i = first; i < results_.size(); ++i) {
      std::printf(" %.0f", static_cast<double>(results_[i].bytes) / 1024);
    }
    std::printf("\n");
    std::fflush(stdout);
  }

  const Flags flags_;
  const Ranks ranks_;
  const Data data_;
  double enqueue_us_ = 0;
  std::vector<Result> results_;
};

int Main(int argc, char** argv) {
  // Before any thread is there. NVLink multicast is nothing that this measures.
  setenv("NCCL_NVLS_ENABLE", "0", 0);
  const Flags flags = ParseFlags(argc, argv);
  int gpus = 0;
  if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus < 2 || gpus < flags.ranks) {
    std::printf("exchange_bench: skipped, it needs %d GPUs and this machine has %d\n",
                std::max(2, flags.ranks), gpus);
    return 0;
  }
  Bench bench(flags, flags.ranks > 0 ? flags.ranks : gpus);
  cudaDeviceProp device;
  Check(cudaGetDeviceProperties(&device, 0), "properties");
  std::printf(
      "%d x %s; %d heads of %d, O from %s over %s to bf16; exchange and merge, slowest rank, "
      "median of %d graphs of %d\n",
      bench.ranks().size(), device.name, flags.heads, flags.head_dim, Name(flags.input),
      Name(flags.wire), kReplays, kExchangesOfAGraph);
  bench.PrintHeader();
  constexpr Placement kPlacements[] = {Placement::kScattered, Placement::kGathered};
  uint64_t epoch = 0;
  {
    const Group group(bench.ranks(), flags, {}, Wanted::kIfPossible, ++epoch);
    const DeviceExchangeCapability& capability = group.of(0).capability();
    for (const Strategy s :
         {Strategy::kAllGather, Strategy::kAgRs, Strategy::kA2a, Strategy::kDirect}) {
      const std::string& why = s == Strategy::kDirect ? capability.no_direct : capability.no_nccl;
      for (const Placement p : kPlacements) {
        if (why.empty()) {
          bench.RunVariant(group, {.name = Name(s), .strategy = s}, p);
        } else {
          std::printf("%-9s %-34s cannot: %s\n", Name(p), Name(s), why.c_str());
        }
      }
    }
  }
  if (flags.sweep) {
    // Each beside the plan's own choice, which comes first.
    std::vector<std::pair<std::string, DirectTuning>> ways = {{"direct", {}}};
    ways.push_back({"direct, no overlap", {.overlap_launch = false}});
    for (const int blocks : {128, kDirectChannels}) {
      for (const int movers : {64, 128, 256, 512}) {
        ways.push_back({"direct, " + std::to_string(blocks) + " x " + std::to_string(movers),
                        {.movers = movers, .blocks = blocks}});
      }
    }
    for (const auto& [name, tuning] : ways) {
      const Group group(bench.ranks(), flags, tuning, Wanted::kNo, ++epoch);
      bench.RunVariant(group, {.name = name, .tuning = tuning}, Placement::kScattered);
    }
    for (const int one_hop : {1, 0}) {
      for (const int movers : {128, 256}) {
        const DirectTuning tuning{.movers = movers, .one_hop = one_hop};
        const Group group(bench.ranks(), flags, tuning, Wanted::kNo, ++epoch);
        bench.RunVariant(
            group,
            {.name = std::string("direct, ") + (one_hop == 1 ? "one hop" : "two hops") +
                     ", 256 x " + std::to_string(movers),
             .tuning = tuning},
            Placement::kGathered);
      }
    }
  }
  bench.WriteJson();
  return 0;
}

}  // namespace
}  // namespace tributary::collective

int main(int argc, char** argv) { return tributary::collective::Main(argc, argv); }
