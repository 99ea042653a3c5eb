// How fast new K/V is quantised and written into pages on one GPU.
//
// Bytes count what is read and what is written. Cold L2: consecutive calls use different copies of
// the input and of the cache. Each case is checked against the host's encoder on sampled elements
// before it is timed. Usage: append_bench [--unlisted] [--json FILE]; --unlisted takes tokens in
// their own order everywhere.
#include <cstring>
#include <numeric>
#include <random>
#include <string>

#include "bench/kernels/cuda/gpu_bench.h"
#include "kernels/cuda/append/append.h"
#include "kernels/cuda/append/append_list.h"
#include "kernels/cuda/layout/page_layout.h"
#include "kernels/element.h"

namespace tributary::cuda {
namespace {

constexpr size_t kRotatedBytes = size_t{256} << 20;

struct Case {
  DType kv = DType::kFp8E4M3;
  int32_t tokens = 8192;
  int32_t kv_heads = 8;
  int32_t head_dim = 128;
  int32_t page_size = 16;
  // Every rank's tokens come in turns of this many; 0: all tokens are ours.
  int32_t interleave = 0;
  int32_t ranks = 1;
  int32_t first_position = 0;  // of the tokens, in their sequence
};

std::string NameOf(const Case& c) {
  std::string name = std::string(Name(c.kv)) + " " + std::to_string(c.tokens) + " tokens, " +
                     std::to_string(c.kv_heads) + " heads, D " + std::to_string(c.head_dim);
  if (c.ranks > 1) {
    name += ", 1 of " + std::to_string(c.ranks) + " in turns of " + std::to_string(c.interleave);
  }
  if (c.first_position > 0) name += ", from position " + std::to_string(c.first_position);
  return name;
}

struct Result {
  double microseconds = 0;
  double bytes = 0;
  int wrong = 0;
};

// Slots in shuffled pages of the tokens of rank 0.
std::vector<int64_t> SlotsOf(const Case& c, std::vector<int32_t>* pages) {
  pages->resize((c.first_position + c.tokens + c.page_size - 1) / c.page_size);
  std::iota(pages->begin(), pages->end(), 0);
  std::shuffle(pages->begin(), pages->end(), std::mt19937(3));
  const DcpLayout layout{0, c.ranks, std::max(1, c.interleave)};
  std::vector<int64_t> slots(c.tokens, -1);
  for (int64_t token = 0; token < c.tokens; ++token) {
    const int64_t position = c.first_position + token;
    if (OwnerOf(layout, position) != 0) continue;
    const int64_t slot = LocalSlot(layout, position);
    slots[token] = int64_t{(*pages)[slot / c.page_size]} * c.page_size + slot % c.page_size;
  }
  return slots;
}

Result Run(const Case& c, bool unlisted, GraphTimer& timer) {
  const size_t elements = size_t(c.tokens) * c.kv_heads * c.head_dim;
  std::vector<int32_t> pages;
  const std::vector<int64_t> host_slots = SlotsOf(c, &pages);
  const auto own =
      std::count_if(host_slots.begin(), host_slots.end(), [](int64_t slot) { return slot >= 0; });
  const size_t cache_bytes =
      pages.size() * 2 * c.kv_heads * c.page_size * c.head_dim * SizeOf(c.kv);
  Result result;
  result.bytes = 2.0 * double(own) * c.kv_heads * c.head_dim * double(2 + SizeOf(c.kv));
  const auto copies = static_cast<int>(std::max<double>(2, kRotatedBytes / result.bytes + 1));
  std::vector<GpuArray<std::byte>> k, v, cache;
  for (int i = 0; i < copies; ++i) {
    k.emplace_back(elements * 2);
    v.emplace_back(elements * 2);
    cache.emplace_back(cache_bytes);
    FillRandom(k.back(), DType::kBf16, 2 * i);
    FillRandom(v.back(), DType::kBf16, 2 * i + 1);
    cache.back().Poison();
  }
  AppendList list;
  const bool listed = !unlisted && ListIfThatPays(host_slots, &list);
  const GpuArray<int64_t> slots(listed ? list.slots : host_slots);
  const GpuArray<int32_t> listed_tokens(listed ? list.tokens : std::vector<int32_t>(1));
  const GpuArray<float> scales(std::vector<float>(c.kv_heads, 0.75f));
  const auto launch = [&](int call) {
    AppendArgs args;
    args.cache = cache[call % copies].data();
    args.geometry = SquareGeometry(c.kv_heads, c.head_dim, c.kv);
    args.page_size = c.page_size;
    if (IsFp8(c.kv)) args.k_scale = args.v_scale = scales.data();
    args.k = k[call % copies].data();
    args.v = v[call % copies].data();
    args.tokens = static_cast<int32_t>(listed ? list.slots.size() : host_slots.size());
    args.slots = slots.data();
    args.listed = listed ? listed_tokens.data() : nullptr;
    Check(LaunchAppend(args, timer.stream()));
  };
  launch(0);
  Check(cudaStreamSynchronize(timer.stream()), "append");

  std::vector<uint16_t> inputs[2];
  for (int values = 0; values < 2; ++values) {
    inputs[values].resize(elements);
    Check(cudaMemcpy(inputs[values].data(), (values ? v : k)[0].data(), elements * 2,
                     cudaMemcpyDeviceToHost),
          "download");
  }
  std::vector<std::byte> written(cache_bytes);
  Check(cudaMemcpy(written.data(), cache[0].data(), cache_bytes, cudaMemcpyDeviceToHost),
        "download");
  const int bytes = static_cast<int>(SizeOf(c.kv));
  for (size_t at = 0; at < elements; at += 97) {
    const size_t token = at / c.head_dim / c.kv_heads;
    const size_t head = at / c.head_dim % c.kv_heads;
    const int d = static_cast<int>(at % c.head_dim);
    const int64_t slot = host_slots[token];
    if (slot < 0) continue;
    for (int values = 0; values < 2; ++values) {
      float x = FloatFromBf16(inputs[values][at]);
      if (IsFp8(c.kv)) x /= 0.75f;
      std::byte expected[4];
      StoreElement(c.kv, expected, 0, x);
      const size_t plane = (size_t(slot / c.page_size) * 2 + values) * c.kv_heads + head;
      const int in_page = static_cast<int>(slot % c.page_size);
      const size_t offset = plane * c.page_size * c.head_dim * bytes +
                            (values ? ValueOffset : KeyOffset)(in_page, d, c.head_dim, bytes);
      result.wrong += std::memcmp(expected, &written[offset], bytes) != 0;
    }
  }
  result.microseconds = timer.MicrosecondsOf(std::max(copies, 16), launch);
  return result;
}

int Main(int argc, char** argv) {
  const bool unlisted = argc > 1 && std::strcmp(argv[1], "--unlisted") == 0;
  const int rest = argc - unlisted;
  const bool has_json = rest == 3 && std::strcmp(argv[argc - 2], "--json") == 0;
  const char* json = has_json ? argv[argc - 1] : nullptr;
  if (rest > 1 && !has_json) {
    std::fprintf(stderr, "usage: append_bench [--unlisted] [--json FILE]\n");
    return 2;
  }
  std::vector<Case> cases;
  for (DType kv : {DType::kFp8E4M3, DType::kFp8E5M2, DType::kBf16, DType::kF16}) {
    cases.push_back({.kv = kv});
    cases.push_back({.kv = kv, .page_size = 64});
    cases.push_back({.kv = kv, .head_dim = 64});
    cases.push_back({.kv = kv, .head_dim = 256});
    cases.push_back({.kv = kv, .tokens = 65536});
    cases.push_back({.kv = kv, .tokens = 32768, .interleave = 16, .ranks = 4});
    cases.push_back({.kv = kv, .tokens = 32768, .interleave = 1, .ranks = 4});
    cases.push_back({.kv = kv, .first_position = 5});
  }
  GraphTimer timer;
  FILE* out = json == nullptr ? nullptr : std::fopen(json, "w");
  if (out != nullptr) std::fprintf(out, "{\"cases\": [");
  std::printf("%-60s %8s %7s\n", "case", "us", "TB/s");
  int wrong = 0;
  bool first = true;
  for (const Case& c : cases) {
    const Result r = Run(c, unlisted, timer);
    const double rate = r.bytes / (r.microseconds * 1e-6);
    std::printf("%-60s %8.1f %7.2f%s\n",
                (NameOf(c) + ", page " + std::to_string(c.page_size)).c_str(), r.microseconds,
                rate * 1e-12, r.wrong > 0 ? "  WRONG" : "");
    wrong += r.wrong;
    if (out != nullptr) {
      std::fprintf(out, "%s\n{\"case\": \"%s\", \"us\": %.3f, \"bytes\": %.0f}", first ? "" : ",",
                   NameOf(c).c_str(), r.microseconds, r.bytes);
    }
    first = false;
  }
  if (out != nullptr) {
    std::fprintf(out, "\n]}\n");
    std::fclose(out);
  }
  if (wrong > 0) std::fprintf(stderr, "%d elements differ from the host's\n", wrong);
  return wrong > 0 ? 1 : 0;
}

}  // namespace
}  // namespace tributary::cuda

int main(int argc, char** argv) { return tributary::cuda::Main(argc, argv); }
