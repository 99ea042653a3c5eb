#include "worker/rpc/worker.h"

#include <algorithm>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/process/random_id.h"
#include "base/rpc/connection_failure.h"
#include "base/status/grpc_status.h"

namespace tributary::worker {

using telemetry::LogLevel;

namespace {

absl::StatusOr<std::shared_ptr<grpc::Channel>> Dial(const WorkerOptions& options) {
  grpc::ChannelArguments arguments;
  const int limit = static_cast<int>(std::min<size_t>(options.max_message_bytes, INT32_MAX));
  arguments.SetMaxReceiveMessageSize(limit);
  arguments.SetMaxSendMessageSize(limit);
  // Every attempt starts from nothing: the channel's own back-off would come on top of ours.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return DialSecurely(options.coordinator, options.security, arguments);
}

RankOptions RankOptionsOf(const WorkerOptions& worker,
                          std::function<void(const absl::Status&)> on_lost) {
  RankOptions options = worker.rank;
  options.observer = worker.session.observer;
  options.on_lost = std::move(on_lost);
  return options;
}

// What a session that was not closed by the coordinator ended with, for whoever reads the log.
std::string WhyOver(const WorkerOptions& options, const Session::End& end) {
  const grpc::Status& status = end.status;
  if (end.welcomed) return status.error_message();
  if (status.error_code() == grpc::StatusCode::UNAVAILABLE) {
    return ExplainConnectionFailure(options.coordinator, options.security, status.error_message());
  }
  if (status.error_code() == grpc::StatusCode::UNIMPLEMENTED) {
    return absl::StrCat("no workers register at ", options.coordinator,
                        ": --coordinator must be the coordinator's --worker_listen, not the "
                        "address that hosts connect to");
  }
  return FromGrpcStatus(status).ToString();
}

}  // namespace

std::chrono::milliseconds ReconnectPause(const WorkerOptions& options, int attempt, double random) {
  const double limit = static_cast<double>(options.reconnect_max.count());
  double pause = static_cast<double>(options.reconnect_min.count());
  for (int i = 0; i < attempt && pause < limit; ++i) pause *= 2;
  pause = std::min(pause, limit);
  return std::chrono::milliseconds(static_cast<int64_t>(pause * (0.5 + 0.5 * random)));
}

Worker::Worker(WorkerOptions options)
    : options_(std::move(options)),
      readiness_([this](bool ready) {
        options_.session.observer->OnReady(ready);
        if (options_.on_ready) options_.on_ready(ready);
      }),
      rank_(RankOptionsOf(options_, [this](const absl::Status& why) { Lose(why); })) {
  identity_.instance_id = RandomId();
}

void Worker::LogEnd(const Session::End& end, bool refused) const {
  if (refused) return Log(LogLevel::kError, absl::StrCat("refused: ", end.status.error_message()));
  if (end.status.ok()) return Log(LogLevel::kInfo, "session over: closed by the coordinator");
  Log(LogLevel::kWarning, absl::StrCat("session over: ", WhyOver(options_, end)));
}

absl::Status Worker::Run() {
  std::mt19937_64 random(identity_.instance_id);
  std::uniform_real_distribution<double> uniform(0, 1);
  int attempt = 0;
  bool dialled = false;
  std::chrono::steady_clock::time_point last_welcome = std::chrono::steady_clock::now();
  while (const std::shared_ptr<Session> session = BeginSession()) {
    const absl::StatusOr<std::shared_ptr<grpc::Channel>> channel = Dial(options_);
    if (!channel.ok()) {
      // Files that were good at the start may be on their way to be replaced.
      Log(LogLevel::kWarning, absl::StrCat("cannot dial: ", channel.status().message()));
      if (attempt == 0 && !dialled) return channel.status();
      Pause(ReconnectPause(options_, attempt++, uniform(random)));
      continue;
    }
    dialled = true;
    const Session::End end = session->Run(*channel);
    if (end.welcomed) {
      attempt = 0;
      last_welcome = std::chrono::steady_clock::now();
    }
    ForgetOrphans(last_welcome);
    const bool refused = end.status.error_code() == grpc::StatusCode::FAILED_PRECONDITION;
    LogEnd(end, refused);
    if (refused && end.field == "epoch") {
      // Shards of a group that is no more: nobody knows what they mean.
      ForgetShards();
      continue;
    }
    // A rank that is held may fall free; this worker then stands by for it.
    if (refused && end.field != "rank") {
      return absl::FailedPreconditionError(end.status.error_message());
    }
    Pause(ReconnectPause(options_, attempt++, uniform(random)));
  }
  const MutexLock lock(mutex_);
  return lost_;
}

// The coordinator is told by the end of the session; there is nothing to wait for.
void Worker::Lose(const absl::Status& why) {
  Log(LogLevel::kError, absl::StrCat("leaving: ", why.message()));
  const MutexLock lock(mutex_);
  if (draining_) return;
  lost_ = why;
  draining_ = true;
  changed_.NotifyAll();
  if (session_ != nullptr) session_->Drain(std::chrono::steady_clock::now());
}

void Worker::Drain() {
  const MutexLock lock(mutex_);
  if (draining_) return;
  draining_ = true;
  readiness_.Close();  // before anything else is done about it
  changed_.NotifyAll();
  if (session_ != nullptr) {
    session_->Drain(std::chrono::steady_clock::now() + options_.drain_timeout);
  }
}

std::shared_ptr<Session> Worker::BeginSession() {
  const MutexLock lock(mutex_);
  session_ = draining_ ? nullptr
                       : std::make_shared<Session>(options_.session, identity_, rank_, readiness_);
  return session_;
}

void Worker::ForgetShards() {
  identity_ = Identity{.instance_id = RandomId()};
  rank_.Reset();
}

void Worker::ForgetOrphans(std::chrono::steady_clock::time_point last_welcome) {
  if (identity_.group_id == 0) return;
  if (std::chrono::steady_clock::now() < last_welcome + options_.orphan_timeout) return;
  Log(LogLevel::kWarning, "the coordinator has been away for --orphan_timeout: shards are dropped");
  ForgetShards();
}

void Worker::Pause(std::chrono::milliseconds duration) {
  const auto end = std::chrono::steady_clock::now() + duration;
  const MutexLock lock(mutex_);
  while (!draining_) {
    if (!changed_.WaitUntil(mutex_, end)) break;
  }
}

void Worker::Log(LogLevel level, const std::string& event) const {
  if (options_.session.log != nullptr) options_.session.log->Write(level, event);
}

}  // namespace tributary::worker
