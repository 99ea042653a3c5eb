#include "service/observe/telemetry.h"

#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "service/workers/leaving.h"

namespace tributary::service {
namespace {

using telemetry::Span;
using telemetry::Track;

// Steps that were over already when the group broke, told for comparison.
constexpr size_t kStepsTold = 8;

// A fault of ours rather than of the caller or of the group.
bool IsFault(absl::StatusCode code) {
  return code == absl::StatusCode::kInternal || code == absl::StatusCode::kUnknown;
}

std::chrono::steady_clock::duration Duration(double seconds) {
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(
      std::chrono::duration<double>(seconds));
}

}  // namespace

Telemetry::Telemetry(int ranks, std::shared_ptr<const telemetry::Logger> log,
                     std::shared_ptr<telemetry::TraceBuffer> spans)
    : log_(std::move(log)),
      metrics_(std::make_shared<Metrics>(ranks)),
      spans_(std::move(spans)),
      flight_(ranks) {}

// ------------------------------------------------------------------------------------------ calls

CallRecord Telemetry::OnCallBegun(Method method, absl::string_view traceparent, size_t bytes) {
  metrics_->CallBegun(method, bytes);
  CallRecord call = {.begin = Clock::now(), .method = method};
  if (spans_ == nullptr) return call;
  call.trace = spans_->Begin(telemetry::ParseTraceparent(traceparent));
  if (call.trace.sampled) call.span_id = spans_->NewSpanId();
  return call;
}

void Telemetry::OnCallEnded(const CallRecord& call, const absl::Status& status, size_t bytes) {
  const Clock::time_point now = Clock::now();
  const double seconds = std::chrono::duration<double>(now - call.begin).count();
  metrics_->CallEnded(call.method, status.code(), seconds, bytes);
  LogCall(call, status, seconds);
  if (!call.trace.sampled || spans_ == nullptr) return;
  Span span;
  span.name = Name(call.method);
  span.track = {Track::kCalls};
  span.trace = call.trace;
  span.span_id = call.span_id;
  span.begin = call.begin;
  span.end = now;
  span.arguments[0] = {"request_id", static_cast<int64_t>(call.request_id)};
  span.arguments[1] = {"code", static_cast<int64_t>(status.code())};
  spans_->Add(span);
}

void Telemetry::LogCall(const CallRecord& call, const absl::Status& status, double seconds) const {
  const auto level =
      IsFault(status.code()) ? telemetry::LogLevel::kWarning : telemetry::LogLevel::kDebug;
  if (!log_->Logs(level)) return;
  log_->Write(level, "call",
              {{"method", Name(call.method)},
               {"request_id", call.request_id},
               {"trace_id", telemetry::TraceIdText(call.trace)},
               {"code", absl::StatusCodeToString(status.code())},
               {"duration_s", seconds},
               {"error", status.message()}});
}

// ------------------------------------------------------------------------------------------ steps

telemetry::TraceContext Telemetry::OnStepSubmitted(const StepRecord& step) {
  flight_.Submitted(step);
  if (spans_ == nullptr) return {};
  for (const StepRecord::Call& call : step.calls) {
    if (!call.trace.sampled) continue;
    // A step has one place in one trace: that of the first of its calls which is traced. The others
    // name the step.
    telemetry::TraceContext context = call.trace;
    context.span_id = spans_->NewSpanId();
    return context;
  }
  return {};
}

void Telemetry::OnStepEnded(const StepRecord& step, const absl::Status& status,
                            const std::vector<worker::Reply>& replies) {
  metrics_->StepEnded(step, status, replies);
  flight_.Ended(step, status, replies);
  if (step.trace.sampled && spans_ != nullptr) TraceStep(step, replies);
}

void Telemetry::TraceStep(const StepRecord& step, const std::vector<worker::Reply>& replies) {
  const auto number = static_cast<int64_t>(step.number);
  Span span;
  const auto part = [&](const char* name, Clock::time_point begin, Clock::time_point end) {
    span.name = name;
    span.span_id = spans_->NewSpanId();
    span.begin = begin;
    span.end = end;
    spans_->Add(span);
  };
  // Each traced call waited for the step.
  const StepRecord::Call* first = nullptr;
  span.track = {Track::kCalls};
  span.arguments[0] = {"step", number};
  for (const StepRecord::Call& call : step.calls) {
    if (!call.trace.sampled) continue;
    if (first == nullptr) first = &call;
    span.trace = call.trace;
    span.lane = call.trace.span_id;
    part("queue", call.accepted, step.begun);
  }
  span.track = {Track::kSteps};
  span.trace = step.trace;
  span.trace.span_id = first->trace.span_id;
  span.arguments = {{{"step", number},
                     {"epoch", static_cast<int64_t>(step.epoch)},
                     {"layer", step.layer},
                     {"rows", std::max(step.query_rows, step.new_tokens)}}};
  span.name = "step";
  span.span_id = span.lane = step.trace.span_id;
  span.begin = step.begun;
  span.end = step.answered;
  spans_->Add(span);
  span.trace.span_id = step.trace.span_id;
  part("build", step.begun, step.submitted);
  part("workers", step.submitted, step.done);
  part("reply", step.done, step.answered);
  // A rank says how long each phase took. They end when its reply came.
  for (const worker::Reply& reply : replies) {
    if (reply.arrived == Clock::time_point()) continue;
    const worker::StepTimes& times = reply.times;
    span.track = {Track::kRank, reply.rank};
    span.trace.span_id = step.trace.span_id;
    Clock::time_point at =
        reply.arrived - Duration(times.plan + times.append + times.attend + times.exchange);
    part("step", at, reply.arrived);
    span.trace.span_id = span.span_id;
    for (const auto& [name, seconds] :
         {std::pair{"plan", times.plan}, std::pair{"append", times.append},
          std::pair{"attend", times.attend}, std::pair{"exchange", times.exchange}}) {
      part(name, at, at + Duration(seconds));
      at += Duration(seconds);
    }
  }
}

// ------------------------------------------------------------------------------------------ group

// Whoever looks into it wants to know what ran, and what was normal.
void Telemetry::OnGroupBroken(uint64_t epoch, const std::string& reason) {
  metrics_->GroupBroken();
  if (BrokeInOrder(reason) || !log_->Logs(telemetry::LogLevel::kWarning)) return;
  const v1::FlightRecord record = flight_.Read();
  const int first_told = record.steps_size() - static_cast<int>(kStepsTold);
  for (int i = 0; i < record.steps_size(); ++i) {
    const v1::StepFlight& step = record.steps(i);
    if (i < first_told && step.state() != v1::StepFlight::IN_FLIGHT) continue;
    log_->Warning(absl::StrCat("flight record: ", Line(step)),
                  {{"epoch", step.epoch()}, {"step", step.number()}});
  }
}

}  // namespace tributary::service
