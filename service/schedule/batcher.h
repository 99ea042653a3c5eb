// Which ready requests make up the next step.
//
// Requests of several hosts for the same layer of the same cache, by the same path and of the same
// dtypes, share a step. Requests wait here only while all step slots are taken or while their batch
// window is open; there is no preference but age.
//
// Not thread safe.
#pragma once

#include <chrono>
#include <compare>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "worker/command.h"

namespace tributary::service {

// What requests of one step have in common.
struct BatchKey {
  worker::CacheId cache = 0;
  int32_t layer = 0;
  worker::StepKind kind = worker::StepKind::kDecode;
  DType q_dtype = DType::kBf16;   // kBf16 when there is no q
  DType kv_dtype = DType::kBf16;  // kBf16 when there is no K/V
  // Which of q, k, v, output and lse lie in memory of GPUs, a bit each: a tensor of a step comes
  // from the host or from there.
  uint8_t on_device = 0;
  friend auto operator<=>(const BatchKey&, const BatchKey&) = default;
};

struct BatchLimits {
  int32_t max_rows = 4096;  // query rows, or new tokens where there are more of them
  int32_t max_entries = 256;
  // How long a request may wait for others although a step could begin.
  std::chrono::microseconds window{0};
};

class Batcher {
 public:
  using Clock = std::chrono::steady_clock;

  struct Candidate {
    void* request = nullptr;
    int32_t rows = 0;
    int32_t entries = 0;
    Clock::time_point arrival;
  };

  // How many of the oldest candidates fit one step: a prefix, so that nobody is overtaken for ever;
  // at least one, so that a request above the limits runs alone.
  static size_t FittingPrefix(std::span<const Candidate> oldest_first, const BatchLimits& limits);

  explicit Batcher(const BatchLimits& limits) : limits_(limits) {}

  void Add(const BatchKey& key, const Candidate& candidate);
  // False when it is not here.
  bool Remove(const BatchKey& key, const void* request);

  struct Batch {
    BatchKey key;
    std::vector<void*> requests;
  };
  // The batch that has waited longest of those that are due: full, or its window has passed.
  std::optional<Batch> Take(Clock::time_point now);
  // When the next batch becomes due; nothing when there is none.
  std::optional<Clock::time_point> NextDue() const;

  bool empty() const { return queues_.empty(); }

 private:
  Clock::time_point DueAt(const std::deque<Candidate>& queue) const;

  const BatchLimits limits_;
  std::map<BatchKey, std::deque<Candidate>> queues_;  // none is empty; by arrival
};

}  // namespace tributary::service
