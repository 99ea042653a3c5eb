#include "service/observe/metrics.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/telemetry/families.h"
#include "service/workers/builds.h"
#include "service/workers/embedded_group.h"

namespace tributary::service {
namespace {

double SecondsBetween(Observer::Clock::time_point begin, Observer::Clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

worker::StepTimes Slowest(const std::vector<worker::Reply>& replies) {
  worker::StepTimes slowest;
  for (const worker::Reply& reply : replies) {
    slowest.plan = std::max(slowest.plan, reply.times.plan);
    slowest.append = std::max(slowest.append, reply.times.append);
    slowest.attend = std::max(slowest.attend, reply.times.attend);
    slowest.exchange = std::max(slowest.exchange, reply.times.exchange);
  }
  return slowest;
}

// As gRPC spells it: "OK", "NOT_FOUND".
std::string CodeName(int code) {
  return absl::StatusCodeToString(static_cast<absl::StatusCode>(code));
}

double Of(const telemetry::Counter& counter) { return static_cast<double>(counter.value()); }

class Scrape final : public prometheus::Collectable {
 public:
  Scrape(std::shared_ptr<const Metrics> metrics, std::function<Snapshot()> snapshot)
      : metrics_(std::move(metrics)), snapshot_(std::move(snapshot)) {}
  std::vector<prometheus::MetricFamily> Collect() const override {
    return metrics_->Collect(snapshot_());
  }

 private:
  const std::shared_ptr<const Metrics> metrics_;
  const std::function<Snapshot()> snapshot_;
};

void AddGroup(const Snapshot& now, telemetry::Families* out) {
  out->Gauge({"tributary_group_epoch", "Generation of the group of workers."},
             static_cast<double>(now.epoch));
  out->Gauge({"tributary_group_ready", "1: all workers serve in the current epoch."}, now.ready);
  out->Gauge({"tributary_draining", "1: the coordinator is shutting down."}, now.draining);
  out->Counter({"tributary_group_formations_total", "Groups formed, the first included."},
               static_cast<double>(now.statistics.group_formations()));
  out->Gauge({"tributary_worker_up", "1: the rank's worker is connected."});
  for (const Member& member : now.members) {
    out->Add(member.connected, {{"rank", absl::StrCat(member.rank)}});
  }
  out->Gauge({"tributary_worker_other_build",
              "1: the rank's worker is of another build than the coordinator."});
  for (const Member& member : now.members) {
    out->Add(IsOfAnotherBuild(member, now.build_version), {{"rank", absl::StrCat(member.rank)}});
  }
  out->Gauge({"tributary_worker_memory_bytes", "Held by the rank's shards."});
  for (const Member& member : now.members) {
    out->Add(static_cast<double>(member.memory_bytes), {{"rank", absl::StrCat(member.rank)}});
  }
  out->Counter({"tributary_worker_busy_seconds_total", "Spent by the rank executing commands."});
  for (const Member& member : now.members) {
    out->Add(member.busy_seconds, {{"rank", absl::StrCat(member.rank)}});
  }
}

void AddCaches(const Snapshot& now, telemetry::Families* out) {
  out->Gauge({"tributary_kv_caches", "Caches."}, static_cast<double>(now.caches));
  out->Gauge({"tributary_kv_pages", "Virtual pages of all caches."});
  out->Add(static_cast<double>(now.pages_used), {{"state", "used"}});
  out->Add(static_cast<double>(now.pages_total - now.pages_used), {{"state", "free"}});
  out->Gauge({"tributary_kv_pages_shared", "Used pages that more than one sequence holds."},
             static_cast<double>(now.pages_shared));
  out->Gauge({"tributary_kv_fullest_cache_ratio", "Used pages of the cache that is fullest."},
             now.fullest_cache);
  out->Gauge({"tributary_kv_sequences", "Open sequences."}, static_cast<double>(now.sequences));
  out->Gauge({"tributary_kv_sequences_lost", "Open sequences that lost tokens with a worker."},
             static_cast<double>(now.sequences_lost));
  out->Gauge({"tributary_leases", "Leases of hosts that are held or have sequences."},
             static_cast<double>(now.leases));
  out->Counter({"tributary_lease_sequences_closed_total",
                "Sequences closed because the lease that they belonged to had ended."},
               static_cast<double>(now.closed_by_leases));
  out->Gauge({"tributary_kv_pages_restoring",
              "Pages that workers have yet to take from replicas; their sequences wait."},
             static_cast<double>(now.pages_restoring));
  out->Gauge({"tributary_kv_pages_without_replica", "Pages whose replica is being made again."},
             static_cast<double>(now.pages_without_replica));
  out->Counter({"tributary_kv_restored_bytes_total", "Taken from replicas by workers."},
               static_cast<double>(now.bytes_restored));
  out->Counter({"tributary_kv_replicated_bytes_total",
                "Brought to replicas that were made again; what steps write is not counted."},
               static_cast<double>(now.bytes_replicated));
}

void AddTotals(const Snapshot& now, telemetry::Families* out) {
  const v1::Statistics& totals = now.statistics;
  out->Counter({"tributary_query_rows_total", "Rows attended."},
               static_cast<double>(totals.query_rows()));
  out->Counter({"tributary_tokens_appended_total", "Tokens written."},
               static_cast<double>(totals.tokens_appended()));
  out->Counter({"tributary_append_duplicates_total", "Entries whose tokens were held already."},
               static_cast<double>(totals.replays()));
  out->Gauge({"tributary_calls_open", "Calls accepted and not yet answered."},
             static_cast<double>(now.calls_open));
  out->Gauge({"tributary_calls_queued", "Calls that no step has taken yet."},
             static_cast<double>(now.calls_queued));
  out->Gauge({"tributary_steps_in_flight", "Steps handed to the workers."}, now.steps_in_flight);
}

}  // namespace

const char* Name(Phase phase) {
  constexpr const char* kNames[kPhases] = {"queue",  "build",    "plan", "append",
                                           "attend", "exchange", "reply"};
  return kNames[static_cast<int>(phase)];
}

std::optional<RankSkew> SkewOf(const std::vector<worker::Reply>& replies) {
  RankSkew skew;
  double least = 0, most = 0;
  for (size_t rank = 0; rank < replies.size(); ++rank) {
    const worker::StepTimes& times = replies[rank].times;
    if (times.exchange_in_attend) return std::nullopt;
    const double busy = times.plan + times.append + times.attend;
    if (rank == 0 || busy < least) least = busy;
    if (rank == 0 || busy > most) {
      most = busy;
      skew.slowest = static_cast<int>(rank);
    }
  }
  skew.seconds = most - least;
  return skew;
}

Metrics::Metrics(int ranks) : slowest_(std::max(ranks, kMostRanks)), ranks_(ranks) {
  for (int phase = 0; phase < kPhases; ++phase) {
    phase_seconds_.push_back(std::make_unique<telemetry::Histogram>(telemetry::LatencyBounds()));
  }
}

void Metrics::CallBegun(Method method, size_t bytes) {
  OfMethod& of = methods_[static_cast<int>(method)];
  of.begun.Add();
  of.bytes_received.Add(bytes);
}

void Metrics::CallEnded(Method method, absl::StatusCode code, double seconds, size_t bytes) {
  OfMethod& of = methods_[static_cast<int>(method)];
  of.seconds.Observe(seconds);
  of.bytes_sent.Add(bytes);
  if (method == Method::kAttend || method == Method::kAttendStream || method == Method::kAppend) {
    data_call_seconds_.Observe(seconds);
  }
  // Last: who sees the call as ended sees all of it.
  const auto index = std::min<size_t>(static_cast<size_t>(code), kCodes - 1);
  of.ended[index].Add();
}

void Metrics::StepEnded(const StepRecord& step, const absl::Status& status,
                        const std::vector<worker::Reply>& replies) {
  const auto observe = [this](Phase phase, double seconds) {
    phase_seconds_[static_cast<int>(phase)]->Observe(seconds);
  };
  for (const StepRecord::Call& call : step.calls) {
    observe(Phase::kQueue, SecondsBetween(call.accepted, step.begun));
  }
  if (!status.ok()) return (BreaksGroup(status) ? steps_aborted_ : steps_failed_).Add();

  observe(Phase::kBuild, SecondsBetween(step.begun, step.submitted));
  const worker::StepTimes slowest = Slowest(replies);
  observe(Phase::kPlan, slowest.plan);
  observe(Phase::kAppend, slowest.append);
  observe(Phase::kAttend, slowest.attend);
  observe(Phase::kExchange, slowest.exchange);
  observe(Phase::kReply, SecondsBetween(step.done, step.answered));
  step_seconds_.Observe(SecondsBetween(step.begun, step.answered));
  step_calls_.Observe(static_cast<double>(step.calls.size()));
  step_rows_.Observe(std::max(step.query_rows, step.new_tokens));
  tensor_bytes_.Add(step.bytes_in);
  if (const std::optional<RankSkew> skew = SkewOf(replies)) {
    skew_seconds_.Observe(skew->seconds);
    if (skew->slowest < static_cast<int>(slowest_.size())) slowest_[skew->slowest].Add();
    ranks_.store(static_cast<int>(replies.size()), std::memory_order_relaxed);
  }
  steps_done_.Add();
}

void Metrics::Fill(v1::Statistics* statistics) const {
  const telemetry::HistogramValues calls = data_call_seconds_.Read();
  for (const double bound : telemetry::LatencyBounds()) statistics->add_call_seconds_bound(bound);
  for (const uint64_t count : calls.counts) statistics->add_call_seconds_count(count);
  statistics->set_skew_seconds(skew_seconds_.Read().sum);
  for (size_t rank = 0; rank < ranks(); ++rank) {
    statistics->add_slowest_steps(slowest_[rank].value());
  }
}

std::vector<prometheus::MetricFamily> Metrics::Collect(const Snapshot& now) const {
  telemetry::Families out;
  const auto each_method = [&](const auto& add) {
    for (int m = 0; m < kMethods; ++m) {
      add(methods_[m], telemetry::Labels{{"method", Name(static_cast<Method>(m))}});
    }
  };
  out.Counter({"tributary_rpc_requests_total", "Calls answered; those on a stream one by one."});
  each_method([&](const OfMethod& of, const auto& labels) {
    for (int code = 0; code < kCodes; ++code) {
      // OK from the start, others once they occurred: rates need the first, and none all of them.
      if (code != 0 && of.ended[code].value() == 0) continue;
      out.Add(Of(of.ended[code]), telemetry::Labels{labels.front(), {"code", CodeName(code)}});
    }
  });
  out.Histogram({"tributary_rpc_duration_seconds", "From a request's arrival to its reply."});
  each_method([&](const OfMethod& of, const auto& labels) { out.Add(of.seconds, labels); });
  out.Gauge({"tributary_rpc_in_flight", "Calls being answered."});
  each_method([&](const OfMethod& of, const auto& labels) {
    double ended = 0;
    for (const telemetry::Counter& counter : of.ended) ended += Of(counter);
    out.Add(std::max(0.0, Of(of.begun) - ended), labels);
  });
  out.Counter({"tributary_rpc_received_bytes_total", "Request messages; not shared memory."});
  each_method(
      [&](const OfMethod& of, const auto& labels) { out.Add(Of(of.bytes_received), labels); });
  out.Counter({"tributary_rpc_sent_bytes_total", "Reply messages; not shared memory."});
  each_method([&](const OfMethod& of, const auto& labels) { out.Add(Of(of.bytes_sent), labels); });

  out.Counter({"tributary_steps_total", "Steps by what came of them."});
  out.Add(Of(steps_done_), {{"outcome", "done"}});
  out.Add(Of(steps_failed_), {{"outcome", "failed"}});
  out.Add(Of(steps_aborted_), {{"outcome", "aborted"}});
  out.Histogram(
      {"tributary_step_duration_seconds", "From fixing a step's calls to their replies."});
  out.Add(step_seconds_);
  out.Histogram({"tributary_step_phase_duration_seconds",
                 "Where a step's time goes: queue (of each call), build, plan, append, attend, "
                 "exchange (of the slowest rank), reply."});
  for (int phase = 0; phase < kPhases; ++phase) {
    out.Add(*phase_seconds_[phase], {{"phase", Name(static_cast<Phase>(phase))}});
  }
  out.Histogram({"tributary_step_calls", "Calls that share a step."});
  out.Add(step_calls_);
  out.Histogram(
      {"tributary_step_rows", "Query rows of a step, or new tokens where there are more."});
  out.Add(step_rows_);
  out.Counter({"tributary_step_tensor_bytes_total", "Q, K and V handed to the workers."},
              Of(tensor_bytes_));
  out.Histogram({"tributary_rank_skew_seconds",
                 "Busy time before the exchange: slowest rank less fastest, of a step."});
  out.Add(skew_seconds_);
  out.Counter(
      {"tributary_rank_slowest_steps_total", "Steps in which the others waited for the rank."});
  for (size_t rank = 0; rank < ranks(); ++rank) {
    out.Add(Of(slowest_[rank]), {{"rank", absl::StrCat(rank)}});
  }
  out.Counter({"tributary_group_breaks_total", "Groups that broke: a worker died, hung or left."},
              Of(group_breaks_));
  out.Counter({"tributary_client_limit_refusals_total",
               "Calls refused because their client had as much as it may."});
  for (int limit = 0; limit < kClientLimits; ++limit) {
    out.Add(Of(limits_reached_[limit]), {{"limit", Name(static_cast<ClientLimit>(limit))}});
  }
  AddGroup(now, &out);
  AddCaches(now, &out);
  AddTotals(now, &out);
  return out.Take();
}

std::shared_ptr<prometheus::Collectable> MakeCollectable(std::shared_ptr<const Metrics> metrics,
                                                         std::function<Snapshot()> snapshot) {
  return std::make_shared<Scrape>(std::move(metrics), std::move(snapshot));
}

}  // namespace tributary::service
