#include "worker/rpc/rank_thread.h"

#include <utility>

#include "kernels/cpu/thread_pool.h"
#include "worker/status_conversion.h"
#include "worker/status_macros.h"

namespace tributary::worker {

RankThread::RankThread(int threads, size_t memory_limit)
    : pool_(std::make_shared<cpu::ThreadPool>(threads)), memory_limit_(memory_limit) {
  thread_ = std::thread([this] { Loop(); });
}

RankThread::~RankThread() {
  Abort("the worker is leaving");
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

void RankThread::Form(Formation formation, std::function<void(absl::Status)> done) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
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
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin;
    busy_seconds_ = busy_seconds_ + spent.count();
    memory_bytes_ = executor_->memory_used();
    done(std::move(reply));
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
    std::lock_guard<std::mutex> lock(mutex_);
    forgotten.swap(work_);
    if (rendezvous_ != nullptr) rendezvous_->Cancel(reason);
    communicator = communicator_;
  }
  if (communicator != nullptr) communicator->Abort(reason);
}

void RankThread::Post(std::function<void()> work) {
  std::lock_guard<std::mutex> lock(mutex_);
  work_.push_back(std::move(work));
  changed_.notify_one();
}

void RankThread::Loop() {
  for (;;) {
    std::function<void()> work;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return stopping_ || !work_.empty(); });
      if (stopping_) return;
      work = std::move(work_.front());
      work_.pop_front();
    }
    work();
  }
}

absl::Status RankThread::FormNow(const Formation& formation) {
  if (formation.fresh || executor_ == nullptr) {
    executor_ = std::make_unique<Executor>(
        ExecutorOptions{.strategy = formation.strategy, .memory_limit = memory_limit_}, pool_);
    memory_bytes_ = 0;
  }
  std::unique_ptr<collective::Communicator> communicator;
  TRIBUTARY_RETURN_IF_ERROR(ToAbsl(collective::CreateGlooCommunicator(
      formation.place, *formation.rendezvous, formation.deadline, &communicator)));
  executor_->Join(std::move(communicator));
  memory_bytes_ = executor_->memory_used();
  std::lock_guard<std::mutex> lock(mutex_);
  communicator_ = executor_->communicator();
  return absl::OkStatus();
}

}  // namespace tributary::worker
