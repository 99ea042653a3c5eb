#include "service/schedule/batcher.h"

#include <algorithm>

namespace tributary::service {
namespace {

// Sums of the same numbers in another order differ by less.
constexpr double kRounding = 1e-9;

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

Batcher::Places Batcher::Fitting(std::span<const Candidate> oldest_first, const BatchLimits& limits,
                                 double most_of_one, PassOver waits) {
  Fill fill(limits);
  absl::flat_hash_map<absl::string_view, double> turns;  // taken of each caller
  Places places;
  for (size_t i = 0; i < oldest_first.size(); ++i) {
    const Candidate& c = oldest_first[i];
    if (waits(c)) continue;
    if (most_of_one < CallerShare::kNoLimit && c.counted) {
      double& of_caller = turns[c.caller];
      of_caller += c.turns;
      if (of_caller > most_of_one && of_caller > c.turns) continue;
    }
    if (!fill.Add(c) && !places.empty()) break;
    places.push_back(i);
  }
  return places;
}

void Batcher::Add(const BatchKey& key, Candidate candidate) {
  // Whoever finds nobody here, as most do, need not be counted.
  candidate.counted = !queues_.empty() && !candidate.caller.empty();
  double turns = candidate.turns;
  if (candidate.counted) {
    Waiting& waiting = waiting_[candidate.caller];
    candidate.behind = kApart * waiting.requests++;
    turns = waiting.turns += candidate.turns;
  }
  if (!candidate.caller.empty()) callers_.OnCall(candidate.arrival, candidate.caller, turns);
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
  found->second.turns -= candidate.turns;
  if (--found->second.requests == 0) waiting_.erase(found);
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
  const double most_of_one = callers_.MostOfOne(now) * (1 + kRounding);
  // Whether it is of a caller that has more than that. Neighbours are often of one caller.
  absl::string_view asked;
  bool has_more = false;
  const auto of_many = [&](const Candidate& c) {
    if (most_of_one == CallerShare::kNoLimit || c.caller == asked) return has_more;
    asked = c.caller;
    return has_more = callers_.PeakOf(c.caller, now) > most_of_one;
  };
  const auto waits = [&](const Candidate& c) { return !turns && (c.in_turns || of_many(c)); };
  auto oldest = queues_.end();
  const Candidate* first = nullptr;  // of `oldest`
  for (auto it = queues_.begin(); it != queues_.end(); ++it) {
    const Queue& queue = it->second;
    if (DueAt(queue) > now || pass_over(queue.front().request)) continue;
    const auto next = std::find_if_not(queue.begin(), queue.end(), waits);
    if (next == queue.end()) continue;
    if (first == nullptr || next->turn() < first->turn()) {
      oldest = it;
      first = &*next;
    }
  }
  if (first == nullptr) return std::nullopt;
  Queue& queue = oldest->second;
  const Places places = Fitting(queue, limits_, most_of_one, waits);
  Batch batch{.key = oldest->first, .requests = {}, .is_turn = of_many(*first)};
  batch.requests.reserve(places.size());
  for (const size_t place : places) {
    Forget(queue[place]);
    batch.requests.push_back(queue[place].request);
  }
  auto next = places.begin();
  size_t kept = 0;
  for (size_t i = 0; i < queue.size(); ++i) {
    if (next != places.end() && *next == i) {
      ++next;
    } else {
      queue[kept++] = queue[i];
    }
  }
  queue.resize(kept);
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
