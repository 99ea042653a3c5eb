// The coordinator's observer in a running service: metrics, the flight recorder, spans of sampled
// calls, a log line for calls that fail through our own fault (at level debug: for all).
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/telemetry/log.h"
#include "base/telemetry/trace.h"
#include "service/observe/flight_recorder.h"
#include "service/observe/metrics.h"
#include "service/observe/observer.h"

namespace tributary::service {

class Telemetry final : public Observer {
 public:
  // `spans` may be null: nothing is traced.
  Telemetry(int ranks, std::shared_ptr<const telemetry::Logger> log,
            std::shared_ptr<telemetry::TraceBuffer> spans);

  std::shared_ptr<const Metrics> metrics() const { return metrics_; }
  const FlightRecorder& flight() const { return flight_; }
  const telemetry::TraceBuffer* spans() const { return spans_.get(); }

  bool traces() const override { return spans_ != nullptr; }
  CallRecord OnCallBegun(Method method, absl::string_view traceparent, size_t bytes) override;
  void OnCallEnded(const CallRecord& call, const absl::Status& status, size_t bytes) override;
  telemetry::TraceContext OnStepSubmitted(const StepRecord& step) override;
  void OnStepEnded(const StepRecord& step, const absl::Status& status,
                   const std::vector<worker::Reply>& replies) override;
  void OnLimitReached(ClientLimit limit) override { metrics_->LimitReached(limit); }
  void OnGroupBroken(uint64_t epoch, const std::string& reason) override;
  void Fill(v1::Statistics* statistics) const override { metrics_->Fill(statistics); }

 private:
  void LogCall(const CallRecord& call, const absl::Status& status, double seconds) const;
  void TraceStep(const StepRecord& step, const std::vector<worker::Reply>& replies);

  const std::shared_ptr<const telemetry::Logger> log_;
  const std::shared_ptr<Metrics> metrics_;
  const std::shared_ptr<telemetry::TraceBuffer> spans_;
  FlightRecorder flight_;
};

}  // namespace tributary::service
