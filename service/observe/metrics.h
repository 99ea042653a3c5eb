// The coordinator's metrics: counted as calls and steps end, read when Prometheus asks. Names and
// meanings: docs/metrics.md.
#pragma once

#include <prometheus/collectable.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "base/telemetry/histogram.h"
#include "service/observe/observer.h"
#include "service/observe/snapshot.h"

namespace tributary::service {

// Where the time of a step goes. Queue: from acceptance to the start of the step, of each call.
// Build: of the command. Plan to exchange: the slowest rank's. Reply: from the last rank's answer
// to the callers' replies.
enum class Phase : uint8_t { kQueue, kBuild, kPlan, kAppend, kAttend, kExchange, kReply };
inline constexpr int kPhases = 7;
const char* Name(Phase phase);

// How long each rank was busy before the exchange, which is where they wait for each other. Nothing
// where that is not told apart (StepTimes::exchange_in_attend): there who waits looks busy.
struct RankSkew {
  double seconds = 0;  // slowest less fastest
  int slowest = 0;     // rank
};
std::optional<RankSkew> SkewOf(const std::vector<worker::Reply>& replies);

class Metrics {
 public:
  // `ranks`: to begin with. Steps of more ranks than kMostRanks are counted without their slowest.
  explicit Metrics(int ranks);

  void CallBegun(Method method, size_t bytes);
  void CallEnded(Method method, absl::StatusCode code, double seconds, size_t bytes);
  void StepEnded(const StepRecord& step, const absl::Status& status,
                 const std::vector<worker::Reply>& replies);
  void GroupBroken() { group_breaks_.Add(); }
  void LimitReached(ClientLimit limit) { limits_reached_[static_cast<int>(limit)].Add(); }

  // What Statistics says of them.
  void Fill(v1::Statistics* statistics) const;
  // What Prometheus gets.
  std::vector<prometheus::MetricFamily> Collect(const Snapshot& now) const;

 private:
  static constexpr int kMostRanks = 256;
  static constexpr int kCodes = 17;  // absl::StatusCode, kOk to kUnauthenticated

  struct OfMethod {
    std::array<telemetry::Counter, kCodes> ended;
    telemetry::Histogram seconds{telemetry::LatencyBounds()};
    telemetry::Counter begun;
    telemetry::Counter bytes_received;
    telemetry::Counter bytes_sent;
  };

  size_t ranks() const {
    return std::min(slowest_.size(), static_cast<size_t>(ranks_.load(std::memory_order_relaxed)));
  }

  std::array<OfMethod, kMethods> methods_;
  telemetry::Histogram data_call_seconds_{telemetry::LatencyBounds()};  // Attend and Append

  telemetry::Counter steps_done_;
  telemetry::Counter steps_failed_;   // refused by the ranks
  telemetry::Counter steps_aborted_;  // the group broke
  telemetry::Counter tensor_bytes_;
  telemetry::Histogram step_seconds_{telemetry::LatencyBounds()};
  telemetry::Histogram step_calls_{telemetry::CountBounds()};
  telemetry::Histogram step_rows_{telemetry::CountBounds()};
  telemetry::Histogram skew_seconds_{telemetry::LatencyBounds()};
  std::vector<std::unique_ptr<telemetry::Histogram>> phase_seconds_;  // by Phase
  std::vector<telemetry::Counter> slowest_;  // by rank, with room for a group that grows
  std::atomic<int> ranks_;                   // as many as the last step had
  telemetry::Counter group_breaks_;
  std::array<telemetry::Counter, kClientLimits> limits_reached_;
};

// A scrape's view of metrics and of what `snapshot` says at that moment.
std::shared_ptr<prometheus::Collectable> MakeCollectable(std::shared_ptr<const Metrics> metrics,
                                                         std::function<Snapshot()> snapshot);

}  // namespace tributary::service
