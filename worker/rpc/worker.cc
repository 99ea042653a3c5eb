#include "worker/rpc/worker.h"

#include <algorithm>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"

namespace tributary::worker {

using telemetry::LogLevel;

namespace {

// Random devices are slow to open, and this is asked for once a life of the shards.
uint64_t RandomId() {
  std::random_device device;
  const uint64_t id = (uint64_t{device()} << 32) | device();
  return id == 0 ? 1 : id;
}

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

absl::Status Worker::Run() {
  std::mt19937_64 random(identity_.instance_id);
  std::uniform_real_distribution<double> uniform(0, 1);
  int attempt = 0;
  bool dialled = false;
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
    if (end.welcomed) attempt = 0;
    const bool refused = end.status.error_code() == grpc::StatusCode::FAILED_PRECONDITION;
    Log(refused ? LogLevel::kError : LogLevel::kWarning,
        absl::StrCat(refused ? "refused: " : "session over: ",
                     end.status.ok() ? "closed by the coordinator" : end.status.error_message()));
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
