// How long the host takes to plan a decode step. Usage: plan_bench [REPEATS]
//
// Lengths are log-normal (median 3K), as in the uneven batch of attention_grid; every repeat plans
// lengths one token longer than the last, into the same plan. Prints the median and the 99th
// percentile of the repeats.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "kernels/cuda/plan/plan.h"

namespace tributary::cuda {
namespace {

struct Case {
  const char* name;
  int32_t sequences;
  int32_t rows;
  int32_t tile_rows;  // packed rows of a query tile
  int32_t share_strips;
  int32_t blocks;
  bool even;  // all lengths alike
};

void Run(const Case& c, int repeats) {
  DecodePlanShape shape;
  shape.gqa_ratio = 8;
  shape.kv_heads = 4;
  shape.tile_rows = c.tile_rows;
  shape.share_strips = c.share_strips;
  shape.blocks = c.blocks;
  shape.split_cost = 10;
  shape.lone_splits = c.tile_rows == 64;
  std::mt19937 random(5);
  std::lognormal_distribution<double> lengths(8.0, 1.0);
  std::vector<PlanEntry> entries;
  std::vector<KeyRange> keys;
  int32_t pages = 0;
  for (int32_t i = 0; i < c.sequences; ++i) {
    const int64_t length = c.even ? 4096 : c.rows + static_cast<int64_t>(lengths(random));
    entries.push_back({i * c.rows, c.rows, pages});
    for (int32_t row = 0; row < c.rows; ++row) keys.push_back({0, length - c.rows + row + 1});
    pages += static_cast<int32_t>(length / 16 + 1);
  }
  Plan plan;
  std::vector<double> times;
  for (int i = 0; i < repeats; ++i) {
    for (KeyRange& range : keys) ++range.hi;
    const auto begin = std::chrono::steady_clock::now();
    PlanAttention(shape, entries, keys, &plan);
    const auto end = std::chrono::steady_clock::now();
    times.push_back(std::chrono::duration<double, std::micro>(end - begin).count());
  }
  std::sort(times.begin(), times.end());
  std::printf("%-44s %8.1f %8.1f %8zu\n", c.name, times[times.size() / 2],
              times[times.size() * 99 / 100], plan.items.size());
}

int Main(int argc, char** argv) {
  const int repeats = argc > 1 ? std::max(1, std::atoi(argv[1])) : 2000;
  std::printf("%-44s %8s %8s %8s\n", "plan, 4 KV heads", "us", "p99 us", "items");
  for (const Case& c : {
           Case{"1 sequence", 1, 1, 8, 16, 132, false},
           Case{"32 sequences", 32, 1, 8, 16, 132, false},
           Case{"256 sequences", 256, 1, 8, 8, 264, false},
           Case{"256 sequences of one length", 256, 1, 8, 8, 264, true},
           Case{"256 sequences, 8 rows", 256, 8, 64, 8, 132, false},
       }) {
    Run(c, repeats);
  }
  return 0;
}

}  // namespace
}  // namespace tributary::cuda

int main(int argc, char** argv) { return tributary::cuda::Main(argc, argv); }
