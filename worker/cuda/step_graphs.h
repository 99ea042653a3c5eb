// Steps that were seen before, as CUDA graphs.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace tributary::worker {

// Rows or tokens of a step. Longer ones take so long that launching them costs nothing beside it.
inline constexpr int32_t kMostGraphRows = 1024;

// Of one rank. A signature holds everything that the launches of a step depend on, addresses
// included: forget all before memory is given back, and before a group goes whose exchange they
// captured.
class StepGraphs {
 public:
  StepGraphs() = default;
  ~StepGraphs() { Forget(); }
  StepGraphs(const StepGraphs&) = delete;
  StepGraphs& operator=(const StepGraphs&) = delete;

  // The place for the graph of a step that was seen before, null until it is captured. No place for
  // a step that is seen for the first time, which is then noted. Valid until the next call.
  cudaGraphExec_t* Seen(std::vector<uint64_t> signature) {
    const auto [it, first] = graphs_.try_emplace(std::move(signature), nullptr);
    if (!first) return &it->second;
    if (graphs_.size() > kMost) MakeRoom();
    return nullptr;
  }

  void Forget() {
    for (auto& [signature, graph] : graphs_) {
      if (graph != nullptr) cudaGraphExecDestroy(graph);
    }
    graphs_.clear();
  }

  size_t size() const { return graphs_.size(); }

 private:
  // A graph of a step takes a few tens of kilobytes.
  static constexpr size_t kMost = 4096;

  // What came only once goes first. Of steps whose tensors lie elsewhere every time there is no
  // end, and the graphs of other steps are not to go for them. Where graphs are many all go: by
  // then most are of lengths and batches gone by.
  void MakeRoom() {
    absl::erase_if(graphs_, [](const auto& seen) { return seen.second == nullptr; });
    if (graphs_.size() > kMost / 2) Forget();
  }

  absl::flat_hash_map<std::vector<uint64_t>, cudaGraphExec_t> graphs_;
};

}  // namespace tributary::worker
