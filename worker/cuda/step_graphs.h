// Steps that were seen before, as CUDA graphs.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace tributary::worker {

// Steps of more rows or tokens than this do not become graphs: they take so long that launching
// them costs nothing beside it.
inline constexpr int32_t kMostGraphRows = 1024;

// The graphs of one rank, or of one session. A signature holds everything that the launches of a
// step depend on, addresses included. So the owner calls Forget before it gives back memory that
// graphs use, and before a group ends whose exchange they captured.
class StepGraphs {
 public:
  StepGraphs() = default;
  ~StepGraphs() { Forget(); }
  StepGraphs(const StepGraphs&) = delete;
  StepGraphs& operator=(const StepGraphs&) = delete;

  // For a step that was seen before: the place of its graph, which is null until it is captured.
  // For a step that is seen for the first time: null, and the step is noted. The place is valid
  // until the next call.
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

  // Steps that came only once go first: a host whose tensors lie elsewhere every time brings new
  // ones without end, and they must not drive out the graphs of other steps. Where graphs are still
  // many, all go: most of them are then of lengths and batches that will not come again.
  void MakeRoom() {
    absl::erase_if(graphs_, [](const auto& seen) { return seen.second == nullptr; });
    if (graphs_.size() > kMost / 2) Forget();
  }

  absl::flat_hash_map<std::vector<uint64_t>, cudaGraphExec_t> graphs_;
};

}  // namespace tributary::worker
