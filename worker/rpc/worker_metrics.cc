#include "worker/rpc/worker_metrics.h"

#include <variant>

#include "base/telemetry/families.h"

namespace tributary::worker {

void WorkerMetrics::OnJoined(uint64_t epoch, const absl::Status& status) {
  if (!status.ok()) return not_joined_.Add();
  epoch_ = epoch;
  joined_.Add();
}

void WorkerMetrics::OnExecuted(const Command& command, const Reply& reply, Clock::time_point begin,
                               Clock::time_point end) {
  if (!std::holds_alternative<StepCommand>(command.body)) return;
  if (command.trace.sampled && spans_ != nullptr) Trace(command, reply, begin, end);
  if (!reply.status.ok()) return steps_failed_.Add();
  step_seconds_.Observe(std::chrono::duration<double>(end - begin).count());
  plan_.Observe(reply.times.plan);
  append_.Observe(reply.times.append);
  attend_.Observe(reply.times.attend);
  exchange_.Observe(reply.times.exchange);
  steps_done_.Add();
}

// A phase is shown as one span of its whole time, although passes over many rows alternate.
void WorkerMetrics::Trace(const Command& command, const Reply& reply, Clock::time_point begin,
                          Clock::time_point end) {
  telemetry::Span span;
  span.track = {telemetry::Track::kRank, rank_.load()};
  span.trace = command.trace;
  span.arguments = {{{"step", static_cast<int64_t>(command.number)},
                     {"epoch", static_cast<int64_t>(command.epoch)},
                     {"layer", std::get<StepCommand>(command.body).layer},
                     {"code", static_cast<int64_t>(reply.status.code())}}};
  const auto part = [&](const char* name, Clock::time_point from, Clock::time_point to) {
    span.name = name;
    span.span_id = spans_->NewSpanId();
    span.begin = from;
    span.end = to;
    spans_->Add(span);
  };
  part("step", begin, end);
  span.trace.span_id = span.span_id;
  for (const auto& [name, seconds] :
       {std::pair{"plan", reply.times.plan}, std::pair{"append", reply.times.append},
        std::pair{"attend", reply.times.attend}, std::pair{"exchange", reply.times.exchange}}) {
    const auto next =
        begin + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    part(name, begin, next);
    begin = next;
  }
}

std::vector<prometheus::MetricFamily> WorkerMetrics::Collect() const {
  telemetry::Families out;
  out.Gauge({"tributary_worker_rank", "This worker's rank; -1: it has none yet."}, rank_);
  out.Gauge({"tributary_worker_group_size", "Ranks of its group."}, size_);
  out.Gauge({"tributary_worker_epoch", "The epoch it joined last."}, static_cast<double>(epoch_));
  out.Gauge({"tributary_worker_ready", "1: part of a group that can execute."}, ready_);
  out.Counter({"tributary_worker_joins_total", "Groups joined, or not."});
  out.Add(static_cast<double>(joined_.value()), {{"outcome", "joined"}});
  out.Add(static_cast<double>(not_joined_.value()), {{"outcome", "failed"}});
  out.Counter({"tributary_worker_steps_total", "Steps this rank executed, or could not."});
  out.Add(static_cast<double>(steps_done_.value()), {{"outcome", "done"}});
  out.Add(static_cast<double>(steps_failed_.value()), {{"outcome", "failed"}});
  out.Histogram({"tributary_worker_step_duration_seconds", "A step on this rank."});
  out.Add(step_seconds_);
  out.Histogram({"tributary_worker_step_phase_duration_seconds",
                 "Where a step's time goes on this rank: plan, append, attend, exchange."});
  out.Add(plan_, {{"phase", "plan"}});
  out.Add(append_, {{"phase", "append"}});
  out.Add(attend_, {{"phase", "attend"}});
  out.Add(exchange_, {{"phase", "exchange"}});
  out.Gauge({"tributary_worker_shard_bytes", "Held by this rank's shards."},
            shard_bytes_ ? static_cast<double>(shard_bytes_()) : 0);
  return out.Take();
}

}  // namespace tributary::worker
