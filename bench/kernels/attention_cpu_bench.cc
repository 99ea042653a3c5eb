// Decode attention on CPUs: one query row over a paged cache, in bf16 and FP8, beside a loop that
// only reads the same bytes with the same threads. Prints one JSON object a line.
//
//   attention_cpu_bench [--threads=N] [--q-heads=32] [--kv-heads=8] [--head-dim=128]
//                       [--page-size=64] [--tokens=4096,...] [--seconds=1.0] [--serve]
//
// "resident" is the same attention with every page of the table the same one: nothing comes from
// memory, and what is left is arithmetic. It tells whether memory or arithmetic bounds a machine.
//
// With --serve it reads lines "<tokens> <bf16|fp8_e4m3|fp8_e5m2|f16|read> <scattered|resident>"
// from standard input and answers each with one measurement in seconds, so that another program can
// interleave its own.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
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
#include "kernels/cpu/backend.h"
#include "kernels/element.h"

namespace tributary {
namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  int threads = static_cast<int>(std::thread::hardware_concurrency());
  int q_heads = 32;
  int kv_heads = 8;
  int head_dim = 128;
  int page_size = 64;
  std::vector<int64_t> tokens = {4096, 8192, 16384, 32768, 65536, 131072};
  double seconds = 1.0;
  bool serve = false;
};

bool Parse(int argc, char** argv, Options& options) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view arg = argv[i];
    const size_t equals = arg.find('=');
    const std::string_view name = arg.substr(0, equals);
    const std::string value(equals == std::string_view::npos ? "" : arg.substr(equals + 1));
    if (name == "--threads") {
      options.threads = std::atoi(value.c_str());
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
  return options.threads > 0 && !options.tokens.empty();
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

// A cache of one layer and one sequence, its pages in a shuffled order, and one query row.
class Decode {
 public:
  Decode(const Options& o, int64_t tokens, DType dtype, Placement placement) {
    const auto pages = static_cast<int32_t>((tokens + o.page_size - 1) / o.page_size);
    kv_.num_pages = placement == Placement::kScattered ? pages : 1;
    kv_.page_size = o.page_size;
    kv_.kv_heads = o.kv_heads;
    kv_.head_dim = o.head_dim;
    kv_.dtype = dtype;
    memory_ = std::make_unique<HugeMemory>(bytes());
    kv_.base = memory_->data();
    // One page of normally distributed numbers, repeated: what they are does not change the speed.
    std::mt19937 generator(1);
    std::normal_distribution<float> normal;
    const size_t elements = PageBytes(kv_) / SizeOf(dtype);
    for (size_t i = 0; i < elements; ++i) StoreElement(dtype, kv_.base, i, normal(generator));
    for (int32_t page = 1; page < kv_.num_pages; ++page) {
      std::memcpy(kv_.base + page * PageBytes(kv_), kv_.base, PageBytes(kv_));
    }
    pages_.resize(pages);
    if (placement == Placement::kScattered) std::iota(pages_.begin(), pages_.end(), 0);
    std::shuffle(pages_.begin(), pages_.end(), generator);
    q_.resize(size_t(o.q_heads) * o.head_dim);
    for (size_t i = 0; i < q_.size(); ++i) q_[i] = Bf16FromFloat(normal(generator));
    o_.resize(q_.size());
    lse_.resize(o.q_heads);
    entry_ = {0, 1, pages_};
    keys_ = {0, tokens};
    params_.kv = kv_;
    params_.q = q_.data();
    params_.rows = 1;
    params_.q_heads = o.q_heads;
    params_.entries = std::span(&entry_, 1);
    params_.keys = &keys_;
    params_.sm_scale = 1.0f / std::sqrt(static_cast<float>(o.head_dim));
    params_.o = o_.data();
    params_.lse = lse_.data();
  }
  Decode(const Decode&) = delete;
  Decode& operator=(const Decode&) = delete;

  size_t bytes() const { return size_t(kv_.num_pages) * PageBytes(kv_); }

  void Attend(cpu::ThreadPool& pool) {
    const Status status = cpu::Attention(params_, pool);
    if (!status.ok()) {
      std::fprintf(stderr, "%s\n", status.message().c_str());
      std::exit(1);
    }
  }

  // Reads every byte of the cache once, cut evenly over the threads, in the order of memory.
  void Read(cpu::ThreadPool& pool) {
    const int parts = pool.threads();
    const size_t lines = bytes() / bench::kReadUnit;
    pool.Run(parts, [&](int part) {
      const size_t begin = lines * part / parts * bench::kReadUnit;
      const size_t end = lines * (part + 1) / parts * bench::kReadUnit;
      bench::StreamingRead(kv_.base + begin, end - begin);
    });
  }

 private:
  PagedKv kv_;
  std::unique_ptr<HugeMemory> memory_;
  std::vector<int32_t> pages_;
  std::vector<uint16_t> q_;
  std::vector<float> o_, lse_;
  AttentionEntry entry_;
  KeyRange keys_;
  AttentionParams params_;
};

double Seconds(const std::function<void()>& body) {
  const auto start = Clock::now();
  body();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double Median(std::vector<double> samples) {
  std::nth_element(samples.begin(), samples.begin() + samples.size() / 2, samples.end());
  return samples[samples.size() / 2];
}

void Table(const Options& options) {
  cpu::ThreadPool pool(options.threads);
  for (const int64_t tokens : options.tokens) {
    Decode bf16(options, tokens, DType::kBf16, Placement::kScattered);
    Decode fp8(options, tokens, DType::kFp8E4M3, Placement::kScattered);
    Decode bf16_resident(options, tokens, DType::kBf16, Placement::kResident);
    Decode fp8_resident(options, tokens, DType::kFp8E4M3, Placement::kResident);
    std::vector<double> bf16_s, fp8_s, read_s, bf16_resident_s, fp8_resident_s;
    bf16.Attend(pool);
    fp8.Attend(pool);
    for (const auto start = Clock::now();
         std::chrono::duration<double>(Clock::now() - start).count() < options.seconds ||
         read_s.size() < 5;) {
      bf16_s.push_back(Seconds([&] { bf16.Attend(pool); }));
      read_s.push_back(Seconds([&] { bf16.Read(pool); }));
      fp8_s.push_back(Seconds([&] { fp8.Attend(pool); }));
      bf16_resident_s.push_back(Seconds([&] { bf16_resident.Attend(pool); }));
      fp8_resident_s.push_back(Seconds([&] { fp8_resident.Attend(pool); }));
    }
    const double b = Median(bf16_s), f = Median(fp8_s), r = Median(read_s);
    const double gb = 1e-9 * static_cast<double>(bf16.bytes());
    std::printf(
        "{\"tokens\": %lld, \"threads\": %d, \"instruction_set\": \"%s\", \"runs\": %zu, "
        "\"bf16_us\": %.1f, \"fp8_us\": %.1f, \"bf16_gb_per_s\": %.2f, \"fp8_gb_per_s\": %.2f, "
        "\"read_gb_per_s\": %.2f, \"bf16_of_read\": %.3f, \"fp8_over_bf16\": %.3f, "
        "\"bf16_resident_us\": %.1f, \"fp8_resident_us\": %.1f}\n",
        static_cast<long long>(tokens), options.threads, cpu::InstructionSet(), read_s.size(),
        b * 1e6, f * 1e6, gb / b, gb / 2 / f, gb / r, r / b, b / f, Median(bf16_resident_s) * 1e6,
        Median(fp8_resident_s) * 1e6);
    std::fflush(stdout);
  }
}

void Serve(const Options& options) {
  cpu::ThreadPool pool(options.threads);
  int64_t held_tokens = 0;  // cases of one length are kept at a time
  std::map<std::pair<DType, Placement>, std::unique_ptr<Decode>> held;
  const auto find = [&](int64_t tokens, DType dtype, Placement placement) -> Decode& {
    if (tokens != held_tokens) held.clear();
    held_tokens = tokens;
    auto& decode = held[{dtype, placement}];
    if (decode == nullptr) {
      decode = std::make_unique<Decode>(options, tokens, dtype, placement);
      decode->Attend(pool);
    }
    return *decode;
  };
  std::string what, where;
  for (int64_t tokens; std::cin >> tokens >> what >> where;) {
    DType dtype = DType::kBf16;
    for (const DType type : {DType::kF16, DType::kFp8E4M3, DType::kFp8E5M2}) {
      if (what == Name(type)) dtype = type;
    }
    Decode& decode =
        find(tokens, dtype, where == "resident" ? Placement::kResident : Placement::kScattered);
    const double seconds =
        Seconds([&] { what == "read" ? decode.Read(pool) : decode.Attend(pool); });
    std::printf("%.9f\n", seconds);
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace tributary

int main(int argc, char** argv) {
  tributary::Options options;
  if (!tributary::Parse(argc, argv, options)) return 2;
  if (options.serve) {
    tributary::Serve(options);
  } else {
    tributary::Table(options);
  }
  return 0;
}
