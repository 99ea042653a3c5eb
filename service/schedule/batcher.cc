#include "service/schedule/batcher.h"

#include <algorithm>

namespace tributary::service {
namespace {

// The sums a prefix of candidates makes, and whether they stay inside the limits.
class Fill {
 public:
  explicit Fill(const BatchLimits& limits) : limits_(limits) {}

  bool Add(const Batcher::Candidate& c) {
    rows_ += c.rows;
    entries_ += c.entries;
    share_ += c.share;
    return rows_ <= limits_.max_rows && entries_ <= limits_.max_entries && share_ <= 1;
  }
  bool full() const { return rows_ >= limits_.max_rows || entries_ >= limits_.max_entries; }

 private:
  const BatchLimits& limits_;
  int64_t rows_ = 0;
  int64_t entries_ = 0;
  double share_ = 0;
};

}  // namespace

size_t Batcher::FittingPrefix(std::span<const Candidate> oldest_first, const BatchLimits& limits) {
  Fill fill(limits);
  size_t count = 0;
  while (count < oldest_first.size() && (fill.Add(oldest_first[count]) || count == 0)) ++count;
  return count;
}

void Batcher::Add(const BatchKey& key, Candidate candidate) {
  // Whoever finds nobody here, as most do, need not be counted.
  candidate.counted = !queues_.empty() && !candidate.caller.empty();
  if (candidate.counted) candidate.behind = kApart * waiting_[candidate.caller]++;
  Queue& queue = queues_[key];
  const auto later = [](const Candidate& a, const Candidate& b) { return a.turn() < b.turn(); };
  queue.insert(std::upper_bound(queue.begin(), queue.end(), candidate, later), candidate);
}

bool Batcher::Remove(const BatchKey& key, const void* request) {
  const auto it = queues_.find(key);
  if (it == queues_.end()) return false;
  Queue& queue = it->second;
  const auto found = std::find_if(queue.begin(), queue.end(),
                                  [&](const Candidate& c) { return c.request == request; });
  if (found == queue.end()) return false;
  Forget(*found);
  queue.erase(found);
  if (queue.empty()) queues_.erase(it);
  return true;
}

void Batcher::Forget(const Candidate& candidate) {
  if (!candidate.counted) return;
  const auto found = waiting_.find(candidate.caller);
  if (--found->second == 0) waiting_.erase(found);
}

Batcher::Clock::time_point Batcher::DueAt(const Queue& queue) const {
  if (limits_.window.count() == 0) return queue.front().arrival;
  Fill fill(limits_);
  for (const Candidate& c : queue) {
    if (!fill.Add(c) || fill.full()) return queue.front().arrival;
  }
  return queue.front().arrival + limits_.window;
}

std::optional<Batcher::Batch> Batcher::Take(
    Clock::time_point now, bool turns, absl::FunctionRef<bool(const void* request)> pass_over) {
  auto oldest = queues_.end();
  for (auto it = queues_.begin(); it != queues_.end(); ++it) {
    const Candidate& first = it->second.front();
    if (DueAt(it->second) > now || (!turns && first.in_turns) || pass_over(first.request)) continue;
    if (oldest == queues_.end() || first.turn() < oldest->second.front().turn()) {
      oldest = it;
    }
  }
  if (oldest == queues_.end()) return std::nullopt;
  Queue& queue = oldest->second;
  const size_t count = FittingPrefix(queue, limits_);
  Batch batch{oldest->first, {}};
  batch.requests.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    Forget(queue[i]);
    batch.requests.push_back(queue[i].request);
  }
  queue.erase(queue.begin(), queue.begin() + count);
  if (queue.empty()) queues_.erase(oldest);
  return batch;
}

std::optional<Batcher::Clock::time_point> Batcher::NextDue() const {
  std::optional<Clock::time_point> next;
  for (const auto& [key, queue] : queues_) {
    const Clock::time_point due = DueAt(queue);
    if (!next.has_value() || due < *next) next = due;
  }
  return next;
}

}  // namespace tributary::service
