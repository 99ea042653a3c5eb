// Which steps are remembered. Nothing is launched, so that any machine will do.
#include "worker/cuda/step_graphs.h"

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdint>

#include "tests/worker/cuda/gpu_ranks.h"

namespace tributary::worker::testing {
namespace {

// Owned by who remembers it. Without a GPU there are no graphs, and CUDA does not look at what it
// is told to destroy.
cudaGraphExec_t EmptyGraph() {
  if (!NoGpu().empty()) return reinterpret_cast<cudaGraphExec_t>(uintptr_t{0x1000});
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  EXPECT_EQ(cudaGraphCreate(&graph, 0), cudaSuccess);
  EXPECT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  return executable;
}

TEST(StepGraphsTest, AStepHasAPlaceFromItsSecondTimeOn) {
  StepGraphs graphs;
  EXPECT_EQ(graphs.Seen({1, 2}), nullptr);
  cudaGraphExec_t* const place = graphs.Seen({1, 2});
  ASSERT_NE(place, nullptr);
  EXPECT_EQ(*place, nullptr);
  const cudaGraphExec_t graph = *place = EmptyGraph();
  EXPECT_EQ(graphs.Seen({2, 1}), nullptr);
  ASSERT_NE(graphs.Seen({1, 2}), nullptr);
  EXPECT_EQ(*graphs.Seen({1, 2}), graph);
  graphs.Forget();
  EXPECT_EQ(graphs.Seen({1, 2}), nullptr);
}

// As of tensors that lie elsewhere in every step.
TEST(StepGraphsTest, StepsThatComeOnceDoNotCostOthersTheirGraphs) {
  StepGraphs graphs;
  (void)graphs.Seen({0});
  *graphs.Seen({0}) = EmptyGraph();
  for (uint64_t once = 1; once <= 20'000; ++once) {
    ASSERT_EQ(graphs.Seen({once}), nullptr);
    ASSERT_LE(graphs.size(), 5'000u);
  }
  ASSERT_NE(graphs.Seen({0}), nullptr);
  EXPECT_NE(*graphs.Seen({0}), nullptr);
}

TEST(StepGraphsTest, GraphsAreBoundedToo) {
  StepGraphs graphs;
  for (uint64_t step = 0; step < 10'000; ++step) {
    (void)graphs.Seen({step});
    if (cudaGraphExec_t* const place = graphs.Seen({step}); place != nullptr) *place = EmptyGraph();
    ASSERT_LE(graphs.size(), 5'000u);
  }
}

}  // namespace
}  // namespace tributary::worker::testing
