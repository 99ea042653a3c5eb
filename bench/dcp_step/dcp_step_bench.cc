// A whole decode step of a group of GPU workers, way to exchange beside way to exchange. See
// README.md.
#include <algorithm>
#include <barrier>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bench/dcp_step/timing_backend.h"
#include "collective/in_process.h"
#include "collective/rendezvous/memory_rendezvous.h"
#include "kernels/element.h"
#include "kernels/key_range.h"
#include "worker/choose_path.h"
#include "worker/cuda_backend.h"
#include "worker/executor.h"

namespace tributary::worker {
namespace {

using Clock = std::chrono::steady_clock;
using collective::Strategy;

constexpr CacheId kCache = 1;
constexpr int kWarmSteps = 20;
// What the layers of a cache hold together, at least, on the rank that holds the least: several
// times the L2.
constexpr double kColdBytes = 320e6;
// Tokens of one append, and how far into the pool of values it may begin.
constexpr int64_t kChunk = 4096;
constexpr int64_t kSlack = 1024;

[[noreturn]] void Fail(const std::string& why) {
  std::fprintf(stderr, "dcp_step_bench: %s\n", why.c_str());
  std::exit(1);
}
void Check(const absl::Status& status, const std::string& what) {
  if (!status.ok()) Fail(what + ": " + status.ToString());
}

struct Case {
  int32_t batch = 1;
  int64_t tokens = 0;  // of each sequence, before the step
  std::string Describe() const { return std::to_string(batch) + "x" + std::to_string(tokens); }
};

struct Flags {
  std::vector<int> ranks = {1, 2, 4};
  std::vector<Case> cases = {{1, 65'536}, {1, 1'048'576}, {32, 32'768}};
  std::vector<std::string> ways = {"host", "direct", "a2a", "all_gather", "ag_rs"};
  std::vector<int> replicas = {0};  // of groups of several ranks
  int steps = 200;
  int32_t q_heads = 32;
  int32_t kv_heads = 4;
  int32_t head_dim = 128;
  int32_t page_size = 64;
  int32_t query_rows = 1;   // of each sequence, causal: a few verify a draft, many are a prompt
  int32_t block = 0;        // rows of a draft's block instead; 0: none
  int64_t window = -1;      // tokens ahead of its own that a row sees; -1: all
  bool f32_output = false;  // else the result is for bf16
  std::string json;

  int32_t rows() const { return block > 0 ? block : query_rows; }  // of a sequence
  StepKind kind() const {
    return block > 0 ? StepKind::kDflash : ChoosePath(query_rows, query_rows);
  }
  // Whether rows see the step's own tokens as they came, and not as the cache keeps them.
  bool sees_tokens_as_they_came() const { return kind() != StepKind::kDecode; }
};

std::vector<std::string> Split(const std::string& list) {
  std::vector<std::string> items;
  std::istringstream stream(list);
  for (std::string item; std::getline(stream, item, ',');) items.push_back(item);
  return items;
}

Flags ParseFlags(int argc, char** argv) {
  Flags f;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (i + 1 == argc) Fail(flag + " wants a value");
    const std::string value = argv[++i];
    if (flag == "--ranks") {
      f.ranks.clear();
      for (const std::string& item : Split(value)) f.ranks.push_back(std::stoi(item));
    } else if (flag == "--cases") {
      f.cases.clear();
      for (const std::string& item : Split(value)) {
        const size_t x = item.find('x');
        if (x == std::string::npos) Fail("--cases wants BATCHxTOKENS, not " + item);
        f.cases.push_back({std::stoi(item.substr(0, x)), std::stoll(item.substr(x + 1))});
      }
    } else if (flag == "--ways") {
      f.ways = Split(value);
    } else if (flag == "--replicas") {
      f.replicas.clear();
      for (const std::string& item : Split(value)) f.replicas.push_back(std::stoi(item));
    } else if (flag == "--steps") {
      f.steps = std::max(1, std::stoi(value));
    } else if (flag == "--q_heads") {
      f.q_heads = std::stoi(value);
    } else if (flag == "--kv_heads") {
      f.kv_heads = std::stoi(value);
    } else if (flag == "--head_dim") {
      f.head_dim = std::stoi(value);
    } else if (flag == "--output") {
      if (value != "bf16" && value != "f32") Fail("--output wants bf16 or f32, not " + value);
      f.f32_output = value == "f32";
    } else if (flag == "--page_size") {
      f.page_size = std::stoi(value);
    } else if (flag == "--rows") {
      f.query_rows = std::max(1, std::stoi(value));
    } else if (flag == "--block") {
      f.block = std::stoi(value);
    } else if (flag == "--window") {
      f.window = std::stoll(value);
    } else if (flag == "--json") {
      f.json = value;
    } else {
      Fail("unknown flag " + flag);
    }
  }
  return f;
}

// Random bf16 values, as given and as numbers.
struct Values {
  std::vector<uint16_t> bits;
  Values(size_t count, uint32_t seed) : bits(count) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (uint16_t& b : bits) b = Bf16FromFloat(normal(random));
  }
  TensorView View(size_t from, size_t count) const {
    return {reinterpret_cast<const std::byte*>(bits.data() + from), DType::kBf16, count * 2};
  }
  double At(size_t index) const { return FloatFromBf16(bits[index]); }
};

// What the cache gives back for a value: rounded to FP8.
double AsCached(double value) {
  unsigned char stored = 0;
  StoreElement(DType::kFp8E4M3, &stored, 0, static_cast<float>(value));
  return LoadElement(DType::kFp8E4M3, &stored, 0);
}

// The data of a case. Token t of a sequence before the step lies in the pool, where the chunk that
// appended it began.
class Problem {
 public:
  Problem(const Flags& f, const Case& c)
      : flags_(f),
        case_(c),
        pool_k_(static_cast<size_t>(kChunk + kSlack) * Row(), 1),
        pool_v_(static_cast<size_t>(kChunk + kSlack) * Row(), 2),
        q_(static_cast<size_t>(c.batch) * f.rows() * f.q_heads * f.head_dim, 3),
        k_(static_cast<size_t>(c.batch) * f.rows() * Row(), 4),
        v_(static_cast<size_t>(c.batch) * f.rows() * Row(), 5) {}

  size_t Row() const { return static_cast<size_t>(flags_.kv_heads) * flags_.head_dim; }
  const Case& size() const { return case_; }

  StepCommand Append(int32_t layer, int32_t sequence, int64_t begin) const {
    const auto tokens = static_cast<int32_t>(std::min(kChunk, case_.tokens - begin));
    StepCommand step;
    step.layer = layer;
    step.kind = StepKind::kAppend;
    step.entries = {{.sequence = Id(sequence), .first_position = begin, .new_tokens = tokens}};
    const size_t from = PoolToken(sequence, begin) * Row();
    step.k = pool_k_.View(from, static_cast<size_t>(tokens) * Row());
    step.v = pool_v_.View(from, static_cast<size_t>(tokens) * Row());
    return step;
  }

  // The step that is timed.
  StepCommand Step() const {
    StepCommand step;
    step.kind = flags_.kind();
    for (int32_t s = 0; s < case_.batch; ++s) {
      step.entries.push_back({.sequence = Id(s),
                              .first_position = case_.tokens,
                              .query_rows = flags_.rows(),
                              .new_tokens = flags_.rows()});
    }
    step.bf16_partials = !flags_.f32_output;
    step.q = q_.View(0, q_.bits.size());
    step.k = k_.View(0, k_.bits.size());
    step.v = v_.View(0, v_.bits.size());
    return step;
  }

  // Of the first row and the last one, the first and last head, against float64.
  void Expect(const Reply& reply, const std::string& what) const {
    for (const int32_t row : {0, case_.batch * flags_.rows() - 1}) {
      for (const int32_t head : {0, flags_.q_heads - 1}) {
        const Expected& want = Want(row, head);
        const size_t pair = static_cast<size_t>(row) * flags_.q_heads + head;
        const double lse = reply.lse.at(pair);
        if (!(std::abs(lse - want.lse) <= 2e-3)) {
          Fail(what + ": LSE " + std::to_string(lse) + " instead of " + std::to_string(want.lse));
        }
        double largest = 0;
        for (const double o : want.o) largest = std::max(largest, std::abs(o));
        for (int32_t d = 0; d < flags_.head_dim; ++d) {
          const double o = reply.o.at(pair * flags_.head_dim + d);
          if (!(std::abs(o - want.o[d]) <= 0.03 * largest)) {
            Fail(what + ": " + std::to_string(o) + " instead of " + std::to_string(want.o[d]));
          }
        }
      }
    }
  }

  static SequenceId Id(int32_t sequence) { return static_cast<SequenceId>(sequence) + 1; }

 private:
  struct Expected {
    std::vector<double> o;
    double lse = 0;
  };

  static size_t PoolToken(int32_t sequence, int64_t token) {
    const int64_t chunk = token / kChunk;
    return static_cast<size_t>((chunk * 37 + sequence * 11) % kSlack + token % kChunk);
  }

  const Expected& Want(int32_t row, int32_t head) const {
    const auto [it, first] = expected_.try_emplace({row, head});
    if (first) it->second = Compute(row, head);
    return it->second;
  }

  Expected Compute(int32_t row, int32_t head) const {
    const int32_t dim = flags_.head_dim;
    const int32_t sequence = row / flags_.rows();
    const size_t kv_head = static_cast<size_t>(head / (flags_.q_heads / flags_.kv_heads));
    const size_t q = (static_cast<size_t>(row) * flags_.q_heads + head) * dim;
    const auto cached = [&](const Values& values, size_t at) {
      const bool of_step = &values == &k_ || &values == &v_;
      const bool kept = !of_step || !flags_.sees_tokens_as_they_came();
      return kept ? AsCached(values.At(at)) : values.At(at);
    };
    std::vector<double> scores;
    double largest = -std::numeric_limits<double>::infinity();
    const int64_t tokens = case_.tokens + flags_.rows();
    const KeyRange seen = VisibleKeys(case_.tokens + row % flags_.rows(),
                                      {flags_.window, flags_.block > 0 ? -1 : 0}, tokens);
    const auto each = [&](const auto& visit) {
      for (int64_t t = seen.lo; t < std::min(seen.hi, case_.tokens); ++t) {
        visit(pool_k_, pool_v_, PoolToken(sequence, t) * Row() + kv_head * dim);
      }
      for (int64_t t = std::max(seen.lo, case_.tokens); t < seen.hi; ++t) {
        const int64_t token = int64_t{sequence} * flags_.rows() + t - case_.tokens;
        visit(k_, v_, static_cast<size_t>(token) * Row() + kv_head * dim);
      }
    };
    each([&](const Values& k, const Values&, size_t at) {
      double dot = 0;
      for (int32_t d = 0; d < dim; ++d) dot += q_.At(q + d) * cached(k, at + d);
      scores.push_back(dot / std::sqrt(static_cast<double>(dim)));
      largest = std::max(largest, scores.back());
    });
    Expected want{.o = std::vector<double>(dim)};
    double sum = 0;
    size_t token = 0;
    each([&](const Values&, const Values& v, size_t at) {
      const double weight = std::exp(scores[token++] - largest);
      sum += weight;
      for (int32_t d = 0; d < dim; ++d) want.o[d] += weight * cached(v, at + d);
    });
    for (double& o : want.o) o /= sum;
    want.lse = largest + std::log(sum);
    return want;
  }

  const Flags& flags_;
  const Case case_;
  const Values pool_k_, pool_v_, q_, k_, v_;
  mutable std::map<std::pair<int32_t, int32_t>, Expected> expected_;
};

// Executors with a GPU each, in one group.
class Group {
 public:
  Group(int size, const std::string& way) : executors_(size), timings_(size) {
    CudaBackendOptions options;
    if (way != "host") {
      options.exchange = ExchangePlace::kAuto;
      if (!collective::Parse(way, &options.strategy)) Fail("no such way to exchange: " + way);
    }
    auto comms = collective::CreateInProcessGroup(size, 1);
    collective::MemoryRendezvous rendezvous;
    OnEveryRank([&](int rank) {
      CudaBackendOptions own = options;
      own.gpu = rank % *CountGpus();
      if (rank == 0) own.on_exchange = [this](const std::string& how) { how_ = how; };
      timings_[rank] = std::make_shared<LayerTiming*>(nullptr);
      absl::StatusOr<std::unique_ptr<Backend>> backend = CreateTimingBackend(own, timings_[rank]);
      Check(backend.status(), "GPU " + std::to_string(rank));
      executors_[rank] = std::make_unique<Executor>(ExecutorOptions{}, *std::move(backend));
      const absl::Status joined =
          executors_[rank]->Join(std::move(comms[rank]), rendezvous, Soon());
      if (rank == 0 && !joined.ok()) how_ = joined.ToString();
    });
  }

  int size() const { return static_cast<int>(executors_.size()); }
  const std::string& how() const { return how_; }
  bool Exchanges(const std::string& way) const {
    return size() == 1 || way == "host" || how_.find("device memory") != std::string::npos;
  }

  // Rank 0's reply; all succeed.
  Reply Execute(decltype(Command::body) body, const std::string& what) {
    const Command command = Make(std::move(body));
    std::vector<Reply> replies(executors_.size());
    OnEveryRank([&](int rank) { replies[rank] = executors_[rank]->Execute(command); });
    for (const Reply& reply : replies) Check(reply.status, what);
    return std::move(replies[0]);
  }

  // Microseconds of each step: from the first rank's begin to the last one's end. `last` is rank
  // 0's reply to the last one.
  std::vector<double> Time(const StepCommand& step, int steps, Reply* last) {
    const Command command = Make(step);
    std::vector<std::vector<Clock::time_point>> begins(executors_.size()), ends(executors_.size());
    std::barrier<> together(size());
    OnEveryRank([&](int rank) {
      for (int i = 0; i < steps; ++i) {
        together.arrive_and_wait();
        begins[rank].push_back(Clock::now());
        Reply reply = executors_[rank]->Execute(command);
        ends[rank].push_back(Clock::now());
        Check(reply.status, "a timed step");
        if (rank == 0 && i + 1 == steps) *last = std::move(reply);
      }
    });
    std::vector<double> times;
    for (int i = 0; i < steps; ++i) {
      Clock::time_point begin = begins[0][i];
      Clock::time_point end = ends[0][i];
      for (int rank = 1; rank < size(); ++rank) {
        begin = std::min(begin, begins[rank][i]);
        end = std::max(end, ends[rank][i]);
      }
      times.push_back(std::chrono::duration<double, std::micro>(end - begin).count());
    }
    return times;
  }

  // Microseconds of a layer of `step` on the slowest GPU, by replay; empty where the way to
  // exchange is not one for graphs.
  std::vector<double> TimeLayers(const StepCommand& step, bool context_only) {
    const Command command = Make(step);
    std::vector<LayerTiming> timings(executors_.size(), {.context_only = context_only});
    OnEveryRank([&](int rank) {
      *timings_[rank] = &timings[rank];
      Check(executors_[rank]->Execute(command).status, "timing layers");
      *timings_[rank] = nullptr;
    });
    std::vector<double> slowest;
    for (size_t i = 0; i < timings[0].us.size(); ++i) {
      slowest.push_back(0);
      for (const LayerTiming& t : timings) slowest.back() = std::max(slowest.back(), t.us[i]);
    }
    return slowest;
  }

 private:
  static Clock::time_point Soon() { return Clock::now() + std::chrono::seconds(60); }

  Command Make(decltype(Command::body) body) {
    Command command;
    command.epoch = 1;
    command.number = ++number_;
    command.cache = kCache;
    command.deadline = Soon();
    command.body = std::move(body);
    return command;
  }

  void OnEveryRank(const std::function<void(int)>& work) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size(); ++rank) threads.emplace_back([&, rank] { work(rank); });
    for (std::thread& thread : threads) thread.join();
  }

  std::vector<std::unique_ptr<Executor>> executors_;
  std::vector<TimingSlot> timings_;
  uint64_t number_ = 0;
  std::string how_;
};

CacheSpec SpecOf(const Flags& f, const Case& c, int ranks, int32_t* pages_each) {
  const int64_t virtual_page = int64_t{f.page_size} * ranks;
  *pages_each = static_cast<int32_t>((c.tokens + f.rows() + virtual_page - 1) / virtual_page);
  CacheSpec spec;
  spec.q_heads = f.q_heads;
  spec.kv_heads = f.kv_heads;
  spec.head_dim = f.head_dim;
  spec.page_size = spec.interleave = f.page_size;
  spec.kv_dtype = DType::kFp8E4M3;
  spec.sm_scale = 1.0f / std::sqrt(static_cast<float>(f.head_dim));
  spec.num_pages = *pages_each * c.batch;
  const int most_ranks = *std::max_element(f.ranks.begin(), f.ranks.end());
  const double layer_bytes =
      2.0 * f.kv_heads * f.head_dim * static_cast<double>(c.tokens) * c.batch / most_ranks;
  spec.layers.resize(static_cast<size_t>(std::clamp(kColdBytes / layer_bytes + 1, 2.0, 64.0)));
  for (LayerSpec& layer : spec.layers) layer.window.left = f.window;
  return spec;
}

// Pages of a long-lived cache are scattered.
std::vector<PageUpdate> Tables(const Case& c, int32_t pages_each) {
  std::vector<int32_t> pages(static_cast<size_t>(pages_each) * c.batch);
  for (size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<int32_t>(i);
  std::mt19937 random(9);
  std::shuffle(pages.begin(), pages.end(), random);
  std::vector<PageUpdate> tables;
  for (int32_t s = 0; s < c.batch; ++s) {
    const auto begin = pages.begin() + static_cast<ptrdiff_t>(s) * pages_each;
    tables.push_back({Problem::Id(s), 0, {begin, begin + pages_each}});
  }
  return tables;
}

struct Figure {
  std::string size;
  int ranks = 1;
  std::string way;
  double median_us = 0;
  double p90_us = 0;
  double gpu_us = 0;      // a layer, on the GPUs alone; 0: not measured
  double context_us = 0;  // the launch over the context, by itself
  // As fast as one rank.
  double times_one = 0;
  double gpu_times_one = 0;
};

double Quantile(std::vector<double> values, double q) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(q * static_cast<double>(values.size() - 1))];
}

// False when the machine does not have the way.
bool Measure(const Flags& f, const Problem& problem, int ranks, const std::string& way,
             int replicas, Figure* figure) {
  const Case& c = problem.size();
  const std::string what = c.Describe() + " on " + std::to_string(ranks) + ", " + way;
  Group group(ranks, way);
  if (!group.Exchanges(way)) {
    std::printf("%-12s %5d  %-10s not there: %s\n", c.Describe().c_str(), ranks, way.c_str(),
                group.how().c_str());
    return false;
  }
  int32_t pages_each = 0;
  CacheSpec spec = SpecOf(f, c, ranks, &pages_each);
  spec.replica_stride = replicas;
  group.Execute(CreateCacheCommand{spec}, what);
  group.Execute(SetTablesCommand{Tables(c, pages_each)}, what);
  for (int32_t layer = 0; layer < static_cast<int32_t>(spec.layers.size()); ++layer) {
    for (int32_t s = 0; s < c.batch; ++s) {
      for (int64_t token = 0; token < c.tokens; token += kChunk) {
        group.Execute(problem.Append(layer, s, token), what);
      }
    }
  }
  const StepCommand step = problem.Step();
  problem.Expect(group.Execute(step, what), what);
  Reply last;
  group.Time(step, kWarmSteps, &last);
  problem.Expect(last, what + ", warm");
  const std::vector<double> times = group.Time(step, f.steps, &last);
  problem.Expect(last, what + ", timed");
  const double gpu_us = Quantile(group.TimeLayers(step, /*context_only=*/false), 0.5);
  const double context_us = Quantile(group.TimeLayers(step, /*context_only=*/true), 0.5);
  problem.Expect(group.Execute(step, what), what + ", after layers were timed");
  *figure = {.size = c.Describe(),
             .ranks = ranks,
             .way = ranks == 1 ? "none" : way,
             .median_us = Quantile(times, 0.5),
             .p90_us = Quantile(times, 0.9),
             .gpu_us = gpu_us,
             .context_us = context_us};
  return true;
}

void WriteJson(const Flags& f, const std::vector<Figure>& figures) {
  if (f.json.empty()) return;
  std::FILE* file = std::fopen(f.json.c_str(), "w");
  if (file == nullptr) Fail("cannot write " + f.json);
  std::fprintf(file,
               "{\"q_heads\": %d, \"kv_heads\": %d, \"head_dim\": %d, \"kv_dtype\": \"fp8_e4m3\", "
               "\"steps\": %d, \"rows\": %d, \"block\": %d, \"output\": \"%s\", \"results\": [\n",
               f.q_heads, f.kv_heads, f.head_dim, f.steps, f.query_rows, f.block,
               f.f32_output ? "f32" : "bf16");
  for (size_t i = 0; i < figures.size(); ++i) {
    const Figure& r = figures[i];
    std::fprintf(file,
                 "  {\"case\": \"%s\", \"ranks\": %d, \"way\": \"%s\", \"median_us\": %.2f, "
                 "\"p90_us\": %.2f, \"times_one_rank\": %.3f, \"gpu_us\": %.2f, "
                 "\"gpu_times_one_rank\": %.3f, \"context_us\": %.2f}%s\n",
                 r.size.c_str(), r.ranks, r.way.c_str(), r.median_us, r.p90_us, r.times_one,
                 r.gpu_us, r.gpu_times_one, r.context_us, i + 1 == figures.size() ? "" : ",");
  }
  std::fprintf(file, "]}\n");
  std::fclose(file);
}

void Print(const Figure& figure) {
  std::printf("%-12s %5d  %-10s %10.1f %10.1f %10.2f", figure.size.c_str(), figure.ranks,
              figure.way.c_str(), figure.median_us, figure.p90_us, figure.times_one);
  if (figure.gpu_us > 0) {
    std::printf(" %10.1f %10.2f %10.1f", figure.gpu_us, figure.gpu_times_one, figure.context_us);
  }
  std::printf("\n");
  std::fflush(stdout);
}

void Run(const Flags& f) {
  Check(CheckGpus(0, 1), "--ranks");
  std::printf("%-12s %5s  %-10s %10s %10s %10s %10s %10s %10s\n", "batchxtokens", "ranks", "way",
              "median us", "p90 us", "x one rank", "GPU us", "x one rank", "context us");
  std::vector<Figure> figures;
  for (const Case& c : f.cases) {
    const Problem problem(f, c);
    double one = 0;
    double gpu_one = 0;
    for (const int ranks : f.ranks) {
      const std::vector<std::string> alone = {"host"};
      for (const std::string& way : ranks == 1 ? alone : f.ways) {
        for (const int replicas : ranks == 1 ? std::vector<int>{0} : f.replicas) {
          Figure figure;
          if (!Measure(f, problem, ranks, way, replicas, &figure)) continue;
          if (replicas > 0) figure.way += "+kept";
          if (ranks == 1) one = figure.median_us;
          if (ranks == 1) gpu_one = figure.gpu_us;
          figure.times_one = one / figure.median_us;
          figure.gpu_times_one = figure.gpu_us > 0 ? gpu_one / figure.gpu_us : 0;
          Print(figure);
          figures.push_back(figure);
        }
      }
    }
  }
  WriteJson(f, figures);
}

}  // namespace
}  // namespace tributary::worker

int main(int argc, char** argv) {
  tributary::worker::Run(tributary::worker::ParseFlags(argc, argv));
  return 0;
}
