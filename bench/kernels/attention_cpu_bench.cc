// Decode attention on CPUs: one query row (--rows: several, as in verify) over a paged cache, in
// every type of cache, beside a loop that only reads the bytes of the bf16 cache with the same
// threads. Prints one JSON object per line.
//
//   attention_cpu_bench [--threads=N] [--rows=1] [--q-heads=32] [--kv-heads=8] [--head-dim=128]
//                       [--page-size=64] [--tokens=4096,...] [--types=bf16,fp8_e4m3,nvfp4,f32]
//                       [--seconds=1.0] [--instruction-set=AVX2] [--serve]
//
// "resident" is the same attention with every page of the table the same one: nothing comes from
// memory, and what is left is arithmetic. It tells whether memory or arithmetic bounds a machine.
//
// With --serve it answers one line of standard input with one line, so that another program can
// interleave measurements of its own on the same tensors:
//   tensors TOKENS FILE   reads q [rows, q_heads, head_dim], k and v [tokens, kv_heads, head_dim],
//                         bf16, one after another; "ok"
//   output TYPE FILE      writes the output [rows, q_heads, head_dim] in float; "ok"
//   time TYPE WHERE       seconds that one attention takes; WHERE is scattered or resident
//   time read scattered   seconds that reading the bf16 cache takes
//   append TYPE ROUNDS    seconds that appending 128 tokens takes, the least of so many times
//   error TYPE QUERIES    how far outputs are from float64 attention, queries being of type
//   QUERIES:
//                         over the tensors as given, the largest error and the root mean square as
//                         a share of the output's; then the largest over the cache as it rounds
//                         them
// TYPE is bf16, f16, fp8_e4m3, fp8_e5m2, nvfp4 or f32. Without "tensors", numbers are random.
//
// What is timed scattered finds the threads awake and the processor's caches full of other data,
// the loop that reads like the attention: whichever came second would otherwise find what the first
// had left there.
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iostream>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "bench/kernels/streaming_read.h"
#include "hwy/highway.h"
#include "kernels/cpu/backend.h"
#include "kernels/half.h"
#include "kernels/reference.h"

namespace tributary {
namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  int threads = static_cast<int>(std::thread::hardware_concurrency());
  int rows = 1;
  int q_heads = 32;
  int kv_heads = 8;
  int head_dim = 128;
  int page_size = 64;
  std::vector<int64_t> tokens = {4096, 8192, 16384, 32768, 65536, 131072};
  std::vector<DType> types = {DType::kBf16, DType::kFp8E4M3, DType::kNvfp4, DType::kF32};
  double seconds = 1.0;
  std::string instruction_set;  // empty: the best
  bool serve = false;
};

// False if no type has the name.
bool TypeNamed(const std::string& name, DType& dtype) {
  for (const DType named :
       {DType::kBf16, DType::kF16, DType::kFp8E4M3, DType::kFp8E5M2, DType::kNvfp4, DType::kF32}) {
    if (name != Name(named)) continue;
    dtype = named;
    return true;
  }
  return false;
}

bool ParseTypes(const std::string& names, std::vector<DType>& types) {
  types.clear();
  std::stringstream list(names);
  for (std::string item; std::getline(list, item, ',');) {
    if (!TypeNamed(item, types.emplace_back())) {
      std::fprintf(stderr, "unknown type %s\n", item.c_str());
      return false;
    }
  }
  return !types.empty();
}

bool Parse(int argc, char** argv, Options& options) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view arg = argv[i];
    const size_t equals = arg.find('=');
    const std::string_view name = arg.substr(0, equals);
    const std::string value(equals == std::string_view::npos ? "" : arg.substr(equals + 1));
    if (name == "--threads") {
      options.threads = std::atoi(value.c_str());
    } else if (name == "--rows") {
      options.rows = std::atoi(value.c_str());
    } else if (name == "--types") {
      if (!ParseTypes(value, options.types)) return false;
    } else if (name == "--q-heads") {
      options.q_heads = std::atoi(value.c_str());
    } else if (name == "--kv-heads") {
      options.kv_heads = std::atoi(value.c_str());
    } else if (name == "--head-dim") {
      options.head_dim = std::atoi(value.c_str());
    } else if (name == "--page-size") {
      options.page_size = std::atoi(value.c_str());
    } else if (name == "--seconds") {
      options.seconds = std::atof(value.c_str());
    } else if (name == "--instruction-set") {
      options.instruction_set = value;
    } else if (name == "--serve") {
      options.serve = true;
    } else if (name == "--tokens") {
      options.tokens.clear();
      std::stringstream list(value);
      for (std::string item; std::getline(list, item, ',');) {
        options.tokens.push_back(std::atoll(item.c_str()));
      }
    } else {
      std::fprintf(stderr, "unknown flag %s\n", argv[i]);
      return false;
    }
  }
  return options.threads > 0 && options.rows > 0 && !options.tokens.empty();
}

// Holds the kernels to one of the instruction sets they are compiled for.
bool ForceInstructionSet(const std::string& name) {
  for (int64_t rest = hwy::SupportedTargets() & HWY_TARGETS; rest != 0; rest &= rest - 1) {
    if (name != hwy::TargetName(rest & -rest)) continue;
    hwy::SetSupportedTargetsForTest(rest & -rest);
    return true;
  }
  std::fprintf(stderr, "no instruction set %s here\n", name.c_str());
  return false;
}

// The tensors of one sequence, in bf16. The tokens that are held may be fewer than the sequence
// has: they are repeated, for what the numbers are does not change the speed.
struct Tensors {
  int64_t tokens = 0;
  int32_t held = 0;
  std::vector<uint16_t> q;     // [rows, q_heads, head_dim]
  std::vector<uint16_t> k, v;  // [held, kv_heads, head_dim]
};

Tensors RandomTensors(const Options& o, int64_t tokens) {
  Tensors t{.tokens = tokens, .held = static_cast<int32_t>(std::min<int64_t>(tokens, 4096))};
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  const auto fill = [&](std::vector<uint16_t>& x, size_t n) {
    x.resize(n);
    for (uint16_t& element : x) element = Bf16FromFloat(normal(generator));
  };
  fill(t.q, size_t(o.rows) * o.q_heads * o.head_dim);
  fill(t.k, size_t(t.held) * o.kv_heads * o.head_dim);
  fill(t.v, t.k.size());
  return t;
}

Tensors ReadTensors(const Options& o, int64_t tokens, const std::string& path) {
  Tensors t{.tokens = tokens, .held = static_cast<int32_t>(tokens)};
  t.q.resize(size_t(o.rows) * o.q_heads * o.head_dim);
  t.k.resize(size_t(tokens) * o.kv_heads * o.head_dim);
  t.v.resize(t.k.size());
  std::ifstream file(path, std::ios::binary);
  for (std::vector<uint16_t>* x : {&t.q, &t.k, &t.v}) {
    file.read(reinterpret_cast<char*>(x->data()), x->size() * sizeof(uint16_t));
  }
  if (!file) {
    std::fprintf(stderr, "%s: too short or not there\n", path.c_str());
    std::exit(1);
  }
  return t;
}

// Where the pages of a sequence lie.
enum class Placement {
  kScattered,  // anywhere in the cache, each in a place of its own
  kResident,   // all in the place of one: nothing comes from memory, what is left is arithmetic
};

// Memory in huge pages, as a worker's shard holds its cache.
class HugeMemory {
 public:
  explicit HugeMemory(size_t bytes)
      : mapped_((bytes + kHugePage - 1) / kHugePage * kHugePage + kHugePage),
        mapping_(
            mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    if (mapping_ == MAP_FAILED) {
      std::perror("mmap");
      std::exit(1);
    }
    madvise(data(), mapped_ - kHugePage, MADV_HUGEPAGE);  // advice: may be refused
  }
  ~HugeMemory() { munmap(mapping_, mapped_); }
  HugeMemory(const HugeMemory&) = delete;
  HugeMemory& operator=(const HugeMemory&) = delete;

  std::byte* data() const {
    const auto address = reinterpret_cast<uintptr_t>(mapping_);
    return static_cast<std::byte*>(mapping_) + (kHugePage - address % kHugePage) % kHugePage;
  }

 private:
  static constexpr size_t kHugePage = size_t{2} << 20;
  size_t mapped_;
  void* mapping_;
};

void ExitUnless(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}

void ReadEvenly(const std::byte* data, size_t bytes, cpu::ThreadPool& pool) {
  const int parts = pool.threads();
  const size_t lines = bytes / bench::kReadUnit;
  pool.Run(parts, [&](int part) {
    const size_t begin = lines * part / parts * bench::kReadUnit;
    const size_t end = lines * (part + 1) / parts * bench::kReadUnit;
    bench::StreamingRead(data + begin, end - begin);
  });
}

// Other data than what is measured, several times what a processor's last cache holds.
class OtherData {
 public:
  OtherData() : memory_(kBytes) { std::memset(memory_.data(), 1, kBytes); }

  // Fills the processor's caches with it.
  void Evict(cpu::ThreadPool& pool) const { ReadEvenly(memory_.data(), kBytes, pool); }

 private:
  static constexpr size_t kBytes = size_t{256} << 20;
  HugeMemory memory_;
};

// A cache of one layer and one sequence, its pages in a shuffled order, and the query rows of its
// last tokens.
class Decode {
 public:
  Decode(const Options& o, const Tensors& tensors, DType dtype, Placement placement,
         cpu::ThreadPool& pool)
      : q_(tensors.q) {
    const int64_t tokens = tensors.tokens;
    const auto pages = static_cast<int32_t>((tokens + o.page_size - 1) / o.page_size);
    kv_.num_pages = placement == Placement::kScattered ? pages : 1;
    kv_.page_size = o.page_size;
    kv_.geometry = SquareGeometry(o.kv_heads, o.head_dim, dtype);
    memory_ = std::make_unique<HugeMemory>(bytes());
    kv_.base = memory_->data();
    pages_.resize(pages);
    if (placement == Placement::kScattered) std::iota(pages_.begin(), pages_.end(), 0);
    std::mt19937 generator(1);
    std::shuffle(pages_.begin(), pages_.end(), generator);
    Append(tensors, pool);
    o_.resize(q_.size());
    lse_.resize(size_t(o.rows) * o.q_heads);
    entry_ = {0, o.rows, pages_};
    for (int64_t row = 0; row < o.rows; ++row) keys_.push_back({0, tokens - o.rows + 1 + row});
    params_.kv = kv_;
    params_.q = q_.data();
    params_.rows = o.rows;
    params_.q_heads = o.q_heads;
    params_.entries = std::span(&entry_, 1);
    params_.keys = keys_.data();
    params_.sm_scale = 1.0f / std::sqrt(static_cast<float>(o.head_dim));
    params_.o = o_.data();
    params_.lse = lse_.data();
  }
  Decode(const Decode&) = delete;
  Decode& operator=(const Decode&) = delete;

  size_t bytes() const { return size_t(kv_.num_pages) * PageBytes(kv_); }

  const std::vector<float>& output() const { return o_; }

  // The step with queries of another type; `queries` has them and is used until the next call.
  const std::vector<float>& AttendWith(DType q_dtype, const void* queries, cpu::ThreadPool& pool) {
    AttentionParams params = params_;
    params.q_dtype = q_dtype;
    params.q = queries;
    ExitUnless(cpu::Attention(params, pool));
    return o_;
  }

  // Float64 attention over a cache of `dtype` that holds the tensors, in the order of the
  // reference.
  std::vector<double> Exact(const Tensors& tensors, DType dtype) const {
    AttentionParams params = params_;
    params.kv.geometry.dtype = dtype;
    std::vector<std::byte> memory(static_cast<size_t>(kv_.num_pages) * PageBytes(params.kv));
    params.kv.base = memory.data();
    ForEachAppend(tensors, [&](AppendParams append) {
      append.kv = params.kv;
      ReferenceAppend(append);
    });
    return ReferenceAttention(params).o;
  }

  // Writes the first 128 tokens again. Which numbers they are does not matter.
  void AppendAgain(const Tensors& tensors, cpu::ThreadPool& pool) {
    Tensors first = tensors;
    first.tokens = std::min<int64_t>(128, tensors.held);
    Append(first, pool);
  }

  void Attend(cpu::ThreadPool& pool) { ExitUnless(cpu::Attention(params_, pool)); }

  // Reads every byte of the cache once, cut evenly over the threads, in the order of memory.
  void Read(cpu::ThreadPool& pool) { ReadEvenly(kv_.base, bytes(), pool); }

 private:
  void Append(const Tensors& tensors, cpu::ThreadPool& pool) {
    ForEachAppend(tensors, [&](const AppendParams& p) { ExitUnless(cpu::Append(p, pool)); });
  }

  template <typename Body>
  void ForEachAppend(const Tensors& tensors, const Body& body) const {
    std::vector<int64_t> slots;
    for (int64_t begin = 0; begin < tensors.tokens; begin += tensors.held) {
      slots.clear();
      for (int64_t t = begin; t < std::min(tensors.tokens, begin + tensors.held); ++t) {
        slots.push_back(int64_t{pages_[t / kv_.page_size]} * kv_.page_size + t % kv_.page_size);
      }
      AppendParams p;
      p.kv = kv_;
      p.k = tensors.k.data();
      p.v = tensors.v.data();
      p.tokens = static_cast<int32_t>(slots.size());
      p.slots = slots.data();
      body(p);
    }
  }

  PagedKv kv_;
  std::unique_ptr<HugeMemory> memory_;
  std::vector<int32_t> pages_;
  std::vector<uint16_t> q_;
  std::vector<float> o_, lse_;
  AttentionEntry entry_;
  std::vector<KeyRange> keys_;
  AttentionParams params_;
};

// Gives every thread of the pool a core of its own, as far as there are cores. Otherwise two may
// share one while another is idle, and a measurement says more of the scheduler than of the code.
void PinThreads(cpu::ThreadPool& pool) {
  std::atomic<int> started{0};
  pool.Run(pool.threads(), [&](int part) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(part % std::max(1u, std::thread::hardware_concurrency()), &cores);
    sched_setaffinity(0, sizeof(cores), &cores);  // advice: may be refused
    // Until every part has a thread, this one must not take another.
    ++started;
    while (started < pool.threads()) std::this_thread::yield();
  });
}

double Seconds(const std::function<void()>& body) {
  const auto start = Clock::now();
  body();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double Median(std::vector<double> samples) {
  std::nth_element(samples.begin(), samples.begin() + samples.size() / 2, samples.end());
  return samples[samples.size() / 2];
}

// What is timed of one type.
struct Measured {
  Measured(const Options& o, const Tensors& tensors, DType type, cpu::ThreadPool& pool)
      : dtype(type),
        scattered(std::make_unique<Decode>(o, tensors, type, Placement::kScattered, pool)),
        in_cache(std::make_unique<Decode>(o, tensors, type, Placement::kResident, pool)) {
    scattered->Attend(pool);
  }

  DType dtype;
  std::unique_ptr<Decode> scattered, in_cache;
  std::vector<double> cold, resident;  // seconds
};

void Table(const Options& options) {
  cpu::ThreadPool pool(options.threads);
  PinThreads(pool);
  const OtherData other;
  const auto cold = [&](const std::function<void()>& body) {
    other.Evict(pool);
    return Seconds(body);
  };
  for (const int64_t tokens : options.tokens) {
    const Tensors tensors = RandomTensors(options, tokens);
    Decode read(options, tensors, DType::kBf16, Placement::kScattered, pool);
    std::vector<Measured> all;
    for (const DType dtype : options.types) all.emplace_back(options, tensors, dtype, pool);
    std::vector<double> read_s;
    for (const auto start = Clock::now();
         std::chrono::duration<double>(Clock::now() - start).count() < options.seconds ||
         read_s.size() < 5;) {
      read_s.push_back(cold([&] { read.Read(pool); }));
      for (Measured& of : all) {
        of.cold.push_back(cold([&] { of.scattered->Attend(pool); }));
        of.resident.push_back(Seconds([&] { of.in_cache->Attend(pool); }));
      }
    }
    std::printf(
        "{\"tokens\": %lld, \"rows\": %d, \"threads\": %d, \"instruction_set\": \"%s\", "
        "\"runs\": %zu, \"read_gb_per_s\": %.2f",
        static_cast<long long>(tokens), options.rows, options.threads, cpu::InstructionSet(),
        read_s.size(), 1e-9 * static_cast<double>(read.bytes()) / Median(read_s));
    for (const Measured& of : all) {
      const double seconds = Median(of.cold);
      std::printf(", \"%s\": {\"us\": %.1f, \"gb_per_s\": %.2f, \"resident_us\": %.1f}",
                  Name(of.dtype), seconds * 1e6,
                  1e-9 * static_cast<double>(of.scattered->bytes()) / seconds,
                  Median(of.resident) * 1e6);
    }
    std::printf("}\n");
    std::fflush(stdout);
  }
}

struct Errors {
  double largest = 0;
  double of_output = 0;  // root mean squares, as a share
};

Errors ErrorsOf(const std::vector<float>& output, const std::vector<double>& exact) {
  Errors errors;
  double wrong = 0, all = 0;
  for (size_t i = 0; i < output.size(); ++i) {
    const double error = output[i] - exact[i];
    errors.largest = std::max(errors.largest, std::abs(error));
    wrong += error * error;
    all += exact[i] * exact[i];
  }
  errors.of_output = std::sqrt(wrong / all);
  return errors;
}

void PrintErrors(Decode& decode, const Tensors& tensors, DType dtype, DType q_dtype,
                 cpu::ThreadPool& pool) {
  std::vector<std::byte> queries(BytesOf(q_dtype, std::ssize(tensors.q)));
  cpu::Convert(DType::kBf16, tensors.q.data(), q_dtype, queries.data(), tensors.q.size());
  const std::vector<float>& output = decode.AttendWith(q_dtype, queries.data(), pool);
  const Errors given = ErrorsOf(output, decode.Exact(tensors, DType::kF32));
  const Errors rounded = ErrorsOf(output, decode.Exact(tensors, dtype));
  std::printf("%.3g %.3g %.3g\n", given.largest, given.of_output, rounded.largest);
}

void Serve(const Options& options) {
  cpu::ThreadPool pool(options.threads);
  PinThreads(pool);
  const OtherData other;
  Tensors tensors = RandomTensors(options, options.tokens.front());
  std::map<std::pair<DType, Placement>, std::unique_ptr<Decode>> held;
  const auto find = [&](const std::string& type, const std::string& where) -> Decode& {
    DType dtype = DType::kBf16;
    TypeNamed(type, dtype);  // "read" is of the bf16 cache
    const Placement placement = where == "resident" ? Placement::kResident : Placement::kScattered;
    auto& decode = held[{dtype, placement}];
    if (decode == nullptr) {
      decode = std::make_unique<Decode>(options, tensors, dtype, placement, pool);
      decode->Attend(pool);
    }
    return *decode;
  };
  std::string command, first, second;
  while (std::cin >> command >> first >> second) {
    if (command == "tensors") {
      held.clear();
      tensors = ReadTensors(options, std::atoll(first.c_str()), second);
      std::printf("ok\n");
    } else if (command == "output") {
      const std::vector<float>& o = find(first, "scattered").output();
      std::ofstream(second, std::ios::binary)
          .write(reinterpret_cast<const char*>(o.data()), o.size() * sizeof(float));
      std::printf("ok\n");
    } else if (command == "append") {
      Decode& decode = find(first, "scattered");
      double least = std::numeric_limits<double>::infinity();
      for (int i = 0; i < std::atoi(second.c_str()); ++i) {
        least = std::min(least, Seconds([&] { decode.AppendAgain(tensors, pool); }));
      }
      std::printf("%.9f\n", least);
    } else if (command == "error") {
      DType dtype = DType::kBf16, q_dtype = DType::kBf16;
      TypeNamed(first, dtype);
      TypeNamed(second, q_dtype);
      PrintErrors(find(first, "scattered"), tensors, dtype, q_dtype, pool);
    } else {
      Decode& decode = find(first, second);
      if (second == "scattered") other.Evict(pool);
      std::printf("%.9f\n",
                  Seconds([&] { first == "read" ? decode.Read(pool) : decode.Attend(pool); }));
    }
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace tributary

int main(int argc, char** argv) {
  tributary::Options options;
  if (!tributary::Parse(argc, argv, options)) return 2;
  if (!options.instruction_set.empty() &&
      !tributary::ForceInstructionSet(options.instruction_set)) {
    return 2;
  }
  if (options.serve) {
    tributary::Serve(options);
  } else {
    tributary::Table(options);
  }
  return 0;
}
