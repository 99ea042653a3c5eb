// Which ready requests make up the next step.
//
// Requests for the same layer of the same cache share a step if they take the same path and have
// the same dtypes; they may come from several hosts. A request waits here only while the pipeline
// of steps is full or its batch window is open. Older requests go first. A request may be counted
// as younger than it is, by a bounded time, so that others go first.
//
// StepRunner owns it and holds the coordinator's lock. Not thread safe.
#pragma once

#include <chrono>
#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/string_view.h"
#include "worker/command.h"

namespace tributary::service {

// What requests of one step have in common.
struct BatchKey {
  worker::CacheId cache = 0;
  int32_t layer = 0;
  worker::StepKind kind = worker::StepKind::kDecode;
  DType q_dtype = DType::kBf16;   // kBf16 when there is no q
  DType kv_dtype = DType::kBf16;  // kBf16 when there is no K/V
  // One bit for each of q, k, v, output and lse: whether it lies in memory of a GPU. A tensor of a
  // step lies there as a whole or not at all.
  uint8_t on_device = 0;
  friend auto operator<=>(const BatchKey&, const BatchKey&) = default;
};

struct BatchLimits {
  int32_t max_rows = 4096;  // query rows, or new tokens where there are more of them
  int32_t max_entries = 256;
  // How long a request waits for others when a step could begin without them.
  std::chrono::microseconds window{0};
};

class Batcher {
 public:
  using Clock = std::chrono::steady_clock;

  // About what a short step takes.
  static constexpr std::chrono::microseconds kApart{100};

  struct Candidate {
    void* request = nullptr;
    int32_t rows = 0;
    int32_t entries = 0;
    Clock::time_point arrival;
    double share = 0;                    // of what a step may take (StepCost::Share)
    bool in_turns = false;               // it is a turn of a long call, or is going to be cut
    std::chrono::milliseconds yield{0};  // it lets requests that came this much later go first
    // Who sent it, as long as it is here. It counts as younger by kApart for every other request of
    // its caller that waits: so who has many does not go ahead of all others. Empty: nobody.
    absl::string_view caller = {};
    std::chrono::microseconds behind{0};  // set by Add
    bool counted = false;                 // set by Add

    Clock::time_point turn() const { return arrival + yield + behind; }
  };

  // How many of the oldest candidates fit into one step. They are a prefix, so that no request
  // waits for ever, and at least one, so that a request above the limits runs alone.
  static size_t FittingPrefix(std::span<const Candidate> oldest_first, const BatchLimits& limits);

  explicit Batcher(const BatchLimits& limits) : limits_(limits) {}

  void Add(const BatchKey& key, Candidate candidate);
  // False when the request is not here.
  bool Remove(const BatchKey& key, const void* request);

  struct Batch {
    BatchKey key;
    absl::InlinedVector<void*, 4> requests;
  };
  // Takes the batch that has waited longest among those that are due. A batch is due when it is
  // full or its window has passed. Without turns, batches whose oldest request is in turns wait,
  // and so do batches whose oldest request is one to `pass_over`.
  std::optional<Batch> Take(
      Clock::time_point now, bool turns = true,
      absl::FunctionRef<bool(const void* request)> pass_over = [](const void*) { return false; });
  // When the next batch becomes due; nullopt when there is none.
  std::optional<Clock::time_point> NextDue() const;

  bool empty() const { return queues_.empty(); }

 private:
  using Queue = absl::InlinedVector<Candidate, 2>;

  Clock::time_point DueAt(const Queue& queue) const;
  // The candidate is not here any more.
  void Forget(const Candidate& candidate);

  const BatchLimits limits_;
  std::map<BatchKey, Queue> queues_;                   // none is empty; by turn
  absl::flat_hash_map<std::string, int32_t> waiting_;  // requests of each caller; none is 0
};

}  // namespace tributary::service
