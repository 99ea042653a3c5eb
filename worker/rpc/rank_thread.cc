#include "worker/rpc/rank_thread.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status/status_macros.h"
#include "kernels/cpu/thread_pool.h"
#include "worker/cpu_backend.h"
#include "worker/cuda_backend.h"
#include "worker/rpc/peer_security.h"
#include "worker/self_test.h"
#include "worker/status_conversion.h"

namespace tributary::worker {

RankThread::RankThread(const RankOptions& options) : options_(options) {
  thread_ = std::thread([this] { Loop(); });
}

RankThread::~RankThread() {
  Abort("the worker is leaving");
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  thread_.join();
  executor_.reset();  // its sessions tell this object of themselves
}

void RankThread::Form(Formation formation, std::function<void(absl::StatusOr<std::string>)> done) {
  {
    const MutexLock lock(mutex_);
    rendezvous_ = formation.rendezvous;
  }
  Post([this, formation = std::move(formation), done = std::move(done)] {
    done(FormNow(formation));
  });
}

void RankThread::Execute(Command command, std::function<void(Reply)> done) {
  Post([this, command = std::move(command), done = std::move(done)] {
    if (executor_ == nullptr) {
      Reply reply{.epoch = command.epoch, .number = command.number};
      reply.status = absl::AbortedError("this worker has not joined a group");
      return done(std::move(reply));
    }
    const auto begin = std::chrono::steady_clock::now();
    Reply reply = executor_->Execute(command);
    const auto end = std::chrono::steady_clock::now();
    busy_seconds_ = busy_seconds_ + std::chrono::duration<double>(end - begin).count();
    memory_bytes_ = executor_->memory_used();
    options_.observer->OnExecuted(command, reply, begin, end);
    const absl::Status status = reply.status;
    done(std::move(reply));
    if (absl::IsDataLoss(status) && options_.on_lost) options_.on_lost(status);
  });
}

void RankThread::Report(std::function<void(Holdings)> done) {
  Post([this, done = std::move(done)] {
    done(executor_ == nullptr ? Holdings() : executor_->Report());
  });
}

void RankThread::Reset() {
  Post([this] {
    executor_.reset();
    memory_bytes_ = 0;
  });
}

void RankThread::Abort(const std::string& reason) {
  std::shared_ptr<collective::Communicator> communicator;
  std::deque<std::function<void()>> forgotten;
  {
    const MutexLock lock(mutex_);
    forgotten.swap(work_);
    if (rendezvous_ != nullptr) rendezvous_->Cancel(reason);
    communicator = communicator_;
  }
  if (communicator != nullptr) communicator->Abort(reason);
}

void RankThread::Post(std::function<void()> work) {
  const MutexLock lock(mutex_);
  work_.push_back(std::move(work));
  changed_.NotifyOne();
}

void RankThread::Loop() {
  for (;;) {
    std::function<void()> work;
    {
      const MutexLock lock(mutex_);
      while (!stopping_ && work_.empty()) changed_.Wait(mutex_);
      if (stopping_) return;
      work = std::move(work_.front());
      work_.pop_front();
    }
    work();
  }
}

absl::StatusOr<std::unique_ptr<Backend>> RankThread::MakeBackend(const Formation& formation) {
  if (options_.device == Device::kCpu) {
    return CreateCpuBackend(std::make_shared<cpu::ThreadPool>(options_.threads),
                            formation.strategy);
  }
  int gpu = options_.gpu;
  if (gpu < 0) {
    TRIBUTARY_ASSIGN_OR_RETURN(const int gpus, CountGpus());
    if (gpus == 0) return absl::FailedPreconditionError("this machine has no GPU");
    gpu = formation.place.rank % gpus;
  }
  return CreateCudaBackend({.gpu = gpu,
                            .strategy = formation.strategy,
                            .exchange = formation.exchange,
                            .on_exchange =
                                [this, tell = formation.on_exchange](const std::string& how) {
                                  device_exchange_ = how;
                                  if (tell) tell(how);
                                },
                            .batch_invariant = formation.deterministic,
                            .copy_threads = std::clamp(options_.threads / 2, 1, 8)});
}

absl::Status RankThread::TestDevice(const Formation& formation) {
  if (tested_) return absl::OkStatus();
  Formation alone = formation;
  alone.strategy = collective::Strategy::kAuto;
  alone.exchange = ExchangePlace::kHost;
  alone.on_exchange = nullptr;
  TRIBUTARY_ASSIGN_OR_RETURN(std::unique_ptr<Backend> backend, MakeBackend(alone));
  TRIBUTARY_RETURN_IF_ERROR(SelfTest(std::move(backend)));
  tested_ = true;
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<collective::Communicator>> RankThread::Connect(
    const Formation& formation) {
  collective::Rendezvous& rendezvous = *formation.rendezvous;
  if (formation.agrees_on_transport) {
    const absl::Status agreed = ToAbsl(collective::AgreeOnTransport(
        formation.transport, formation.place, rendezvous, formation.deadline));
    if (absl::IsFailedPrecondition(agreed)) {
      return absl::FailedPreconditionError(
          absl::StrCat(agreed.message(),
                       ": --peer_tls, and with auto TLS to the coordinator, must be the same "
                       "for all workers of a group"));
    }
    TRIBUTARY_RETURN_IF_ERROR(agreed);
  }
  std::unique_ptr<collective::Communicator> communicator;
  TRIBUTARY_RETURN_IF_ERROR(ToAbsl(collective::CreatePeerCommunicator(
      formation.transport, formation.place, rendezvous, formation.deadline, &communicator)));
  return communicator;
}

absl::StatusOr<std::string> RankThread::FormNow(const Formation& formation) {
  if (formation.fresh || executor_ == nullptr) {
    executor_.reset();  // first: the next one may need its memory
    memory_bytes_ = 0;
    TRIBUTARY_RETURN_IF_ERROR(TestDevice(formation));
    TRIBUTARY_ASSIGN_OR_RETURN(std::unique_ptr<Backend> backend, MakeBackend(formation));
    executor_ = std::make_unique<Executor>(
        ExecutorOptions{.memory_limit = options_.memory_limit,
                        .memory_slice = kMemorySlice,
                        .keeps_records = true,
                        .on_session_news = [this](const SessionNews& news) { OnNews(news); }},
        std::move(backend));
  }
  TRIBUTARY_ASSIGN_OR_RETURN(std::unique_ptr<collective::Communicator> communicator,
                             Connect(formation));
  TRIBUTARY_RETURN_IF_ERROR(executor_->Join(std::move(communicator), *formation.rendezvous,
                                            formation.deadline, formation.shard_ranks,
                                            formation.lanes));
  memory_bytes_ = executor_->memory_used();
  const MutexLock lock(mutex_);
  communicator_ = executor_->communicator();
  // Sessions of earlier epochs are gone by now, and tell nothing any more.
  on_session_news_ = formation.on_session_news;
  return DescribeExchange(formation.place.size, device_exchange_, formation.transport);
}

void RankThread::OnNews(const SessionNews& news) {
  OnSessionNews tell;
  {
    const MutexLock lock(mutex_);
    tell = on_session_news_;
  }
  if (tell) tell(news);
}

}  // namespace tributary::worker
