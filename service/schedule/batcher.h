// Which ready requests make up the next step.
//
// Requests for the same layer of the same cache share a step if they take the same path and have
// the same dtypes; they may come from several hosts. A request waits here only while the pipeline
// of steps is full or its batch window is open. Older requests go first. A request may be counted
// as younger than it is, by a bounded time, so that others go first. While callers are there who
// have few requests at a time, a step takes only so many of each (CallerShare).
//
// StepRunner owns it and holds the coordinator's lock. Not thread safe.
#pragma once

#include <chrono>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/string_view.h"
#include "service/schedule/caller_share.h"
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
    double turns = 0;                    // what it takes, in turns (CallerShare)
    bool in_turns = false;               // it is a turn of a long call, or is going to be cut
    std::chrono::milliseconds yield{0};  // it lets requests that came this much later go first
    // Who sent it, as long as it is here. It counts as younger by kApart for every other request of
    // its caller that waits: so who has many does not go ahead of all others. Empty: nobody.
    absl::string_view caller = {};
    std::chrono::microseconds behind{0};  // set by Add
    bool counted = false;                 // set by Add

    Clock::time_point turn() const { return arrival + yield + behind; }
  };

  // The candidates that make up one step, by their places: the oldest of those that need not wait,
  // so that none waits for ever, and one of them at least, so that a request above the limits runs
  // alone. Who has `most_of_one` among them is passed over from there on (CallerShare::MostOfOne).
  using Places = absl::InlinedVector<size_t, 4>;
  using PassOver = absl::FunctionRef<bool(const Candidate&)>;
  static Places Fitting(
      std::span<const Candidate> oldest_first, const BatchLimits& limits,
      double most_of_one = CallerShare::kNoLimit,
      PassOver waits = [](const Candidate&) { return false; });

  // `memory`: for how long it remembers who calls (CallerShare).
  explicit Batcher(const BatchLimits& limits, Clock::duration memory = Clock::duration(0))
      : limits_(limits), callers_(memory) {}

  void Add(const BatchKey& key, Candidate candidate);
  // False when the request is not here.
  bool Remove(const BatchKey& key, const void* request);

  struct Batch {
    BatchKey key;
    absl::InlinedVector<void*, 4> requests;
    // It is a turn: its oldest request is of a caller that has more than a step takes of it.
    bool is_turn = false;
  };
  // Takes the batch that has waited longest among those that are due. A batch is due when it is
  // full or its window has passed. Without turns, requests in turns wait, and so do those of
  // callers who have more at a time than a step takes of them. Batches whose oldest request is one
  // to `pass_over` wait, too.
  std::optional<Batch> Take(
      Clock::time_point now, bool turns = true,
      absl::FunctionRef<bool(const void* request)> pass_over = [](const void*) { return false; });
  // When the next batch becomes due; nullopt when there is none.
  std::optional<Clock::time_point> NextDue() const;

  bool empty() const { return queues_.empty(); }

 private:
  using Queue = absl::InlinedVector<Candidate, 2>;

  // What a caller has here.
  struct Waiting {
    int32_t requests = 0;
    double turns = 0;
  };

  Clock::time_point DueAt(const Queue& queue) const;
  // The candidate is not here any more.
  void Forget(const Candidate& candidate);

  const BatchLimits limits_;
  CallerShare callers_;
  std::map<BatchKey, Queue> queues_;                   // none is empty; by turn
  absl::flat_hash_map<std::string, Waiting> waiting_;  // of each caller; none has no requests
};

}  // namespace tributary::service
