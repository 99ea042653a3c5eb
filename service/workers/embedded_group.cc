#include "service/workers/embedded_group.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/process/random_id.h"
#include "base/status/status_macros.h"
#include "base/sync/mutex.h"
#include "base/sync/spin.h"
#include "collective/in_process.h"
#include "collective/rendezvous/memory_rendezvous.h"
#include "kernels/cpu/thread_pool.h"
#include "service/workers/completions.h"
#include "worker/cpu_backend.h"
#include "worker/cuda_backend.h"
#include "worker/executor.h"
#include "worker/self_test.h"

namespace tributary::service {
namespace {

using Clock = std::chrono::steady_clock;

// One command on its way through all ranks. Guarded by the group's mutex.
struct Submission {
  std::shared_ptr<const worker::Command> command;
  WorkerGroup::Done done;  // empty once called
  std::vector<worker::Reply> replies;
  int unfinished = 0;  // ranks that have not executed or dropped it
};

absl::Status FirstError(const std::vector<worker::Reply>& replies) {
  for (const worker::Reply& reply : replies) {
    if (!reply.status.ok()) return reply.status;
  }
  return absl::OkStatus();
}

class EmbeddedGroup : public WorkerGroup {
 public:
  explicit EmbeddedGroup(const EmbeddedGroupOptions& options);
  ~EmbeddedGroup() override { Stop(); }

  uint64_t id() const override { return id_; }
  int size() const override { return options_.workers; }
  worker::Device device() const override { return options_.device; }
  absl::Status CheckRegions() const override {
    if (options_.device == worker::Device::kCuda) return absl::OkStatus();
    return NoRegions(absl::StrCat("the workers compute on the ", Name(options_.device)));
  }
  absl::Status CheckDeviceSessions() const override {
    if (options_.device != worker::Device::kCuda) {
      return NoDeviceSessions(absl::StrCat("the workers compute on the ", Name(options_.device)));
    }
    return absl::OkStatus();
  }
  std::shared_ptr<const void> PinMemory(std::byte* data, size_t bytes) const override {
    if (options_.device != worker::Device::kCuda) return nullptr;
    return worker::PinHostMemory(options_.first_gpu, data, bytes);
  }
  absl::Status Start(GroupObserver* observer) override;
  void Submit(std::shared_ptr<const worker::Command> command, Done done) override;
  // A GPU's rank keeps to its own thread, whose present device is its GPU.
  bool borrows() const override { return options_.device == worker::Device::kCpu; }
  void Lend(const std::function<bool()>& over) override;
  void LendOnce() override;
  std::vector<Member> members() const override;
  std::string exchange() const override;
  void Stop() override;

 private:
  using SubmissionPtr = std::shared_ptr<Submission>;

  struct Rank {
    // Made by Start. Used by whoever has set RankWork::busy while a group serves, and by the
    // control thread, which forms groups, while none does. Replaced under the lock.
    std::unique_ptr<worker::Executor> executor;
    CondVar wake;                       // the queue has changed, or the thread is to end
    std::atomic<uint64_t> commands{0};  // that were put into the queue so far
    std::thread thread;
  };
  struct RankWork {
    std::deque<SubmissionPtr> queue;
    bool busy = false;  // a thread, the rank's or one that was lent, executes a command
    double busy_seconds = 0;
  };

  // `alone`: to test the device with; without a way to exchange.
  absl::StatusOr<std::unique_ptr<worker::Backend>> MakeBackend(int rank, bool alone);
  absl::Status TestDevices();
  void RunRank(int rank);
  // Executes the first command of a rank that is not busy. Releases the lock meanwhile.
  void RunFirst(int rank) TRIBUTARY_REQUIRES(mutex_);
  // Keeps deadlines and forms groups.
  void RunControl();
  // Releases the lock while it calls out. Tries until it is done or the group is stopping.
  void Form() TRIBUTARY_REQUIRES(mutex_);
  // Brings all executors into the group of an epoch.
  absl::Status JoinAll(uint64_t epoch);
  // Completes what is in flight, waits until no rank is busy with it, and forms the next group.
  // Releases the lock while it calls out.
  void Recover() TRIBUTARY_REQUIRES(mutex_);
  // Tells that a device is lost, and waits for the end.
  void WaitLost() TRIBUTARY_REQUIRES(mutex_);
  // Whether the calling thread, which submits the command, is going to carry it out (Lend).
  bool IsLent(const worker::Command& command) const;
  void FinishOnRank(const SubmissionPtr& submission, worker::Reply reply, double seconds);
  // Ranks that wait in a collective wake up with an error.
  void Break(const std::string& reason) TRIBUTARY_REQUIRES(mutex_);
  // max() when nothing is in flight.
  Clock::time_point EarliestDeadline() const TRIBUTARY_REQUIRES(mutex_);

  const EmbeddedGroupOptions options_;
  const uint64_t id_ = RandomId();
  // All ranks are on this machine.
  const std::shared_ptr<worker::HostMemoryLedger> host_memory_ = worker::HostMemoryLedger::Create();
  // Whether ranks that wait have processors to themselves, beside those that call them.
  const bool spin_ = std::thread::hardware_concurrency() >
                     2 * static_cast<unsigned>(options_.workers);
  std::vector<std::unique_ptr<Rank>> ranks_;  // none comes or goes
  GroupObserver* observer_ = nullptr;         // set by Start
  std::thread control_thread_;
  Completions completions_;  // of commands that all ranks carried out

  mutable Mutex mutex_;
  CondVar control_;                                          // wakes the control thread, and Stop
  std::vector<RankWork> work_ TRIBUTARY_GUARDED_BY(mutex_);  // by rank
  // Submissions stay here until every rank is finished with them.
  std::deque<SubmissionPtr> in_flight_ TRIBUTARY_GUARDED_BY(mutex_);
  // When the control thread next looks at deadlines.
  Clock::time_point next_look_ TRIBUTARY_GUARDED_BY(mutex_) = Clock::time_point::max();
  uint64_t epoch_ TRIBUTARY_GUARDED_BY(mutex_) = 0;
  bool formed_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  std::string exchange_ TRIBUTARY_GUARDED_BY(mutex_);     // what rank 0 said of it last; or empty
  bool has_formed_ TRIBUTARY_GUARDED_BY(mutex_) = false;  // ever
  // Why the group broke; empty while it can execute.
  std::string broken_ TRIBUTARY_GUARDED_BY(mutex_);
  bool stopping_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  // The control thread ends; and once it has, which may be forming a group, the ranks' threads.
  bool stopped_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  bool ranks_end_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  absl::Status lost_ TRIBUTARY_GUARDED_BY(mutex_);  // a device's; no group forms any more
};

EmbeddedGroup::EmbeddedGroup(const EmbeddedGroupOptions& options)
    : options_(options), work_(options.workers) {
  for (int i = 0; i < options.workers; ++i) ranks_.push_back(std::make_unique<Rank>());
}

absl::StatusOr<std::unique_ptr<worker::Backend>> EmbeddedGroup::MakeBackend(int rank, bool alone) {
  if (options_.make_backend) return options_.make_backend(rank);
  if (options_.device == worker::Device::kCuda) {
    if (alone) return worker::CreateCudaBackend({.gpu = options_.first_gpu + rank});
    worker::CudaBackendOptions cuda{.gpu = options_.first_gpu + rank,
                                    .strategy = options_.strategy,
                                    .exchange = options_.exchange_place,
                                    .batch_invariant = options_.deterministic};
    if (rank == 0) {  // all ranks agree
      cuda.on_exchange = [this](const std::string& how) {
        if (options_.on_exchange) options_.on_exchange(how);
        const MutexLock lock(mutex_);
        exchange_ = how;
      };
    }
    return worker::CreateCudaBackend(cuda);
  }
  const int machine = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  const int threads = options_.threads > 0 ? options_.threads : machine;
  return worker::CreateCpuBackend(
      std::make_shared<cpu::ThreadPool>(std::max(1, threads / options_.workers)), options_.strategy,
      host_memory_);
}

absl::Status EmbeddedGroup::TestDevices() {
  const int devices = options_.device == worker::Device::kCuda ? size() : 1;
  for (int i = 0; i < devices; ++i) {
    TRIBUTARY_ASSIGN_OR_RETURN(std::unique_ptr<worker::Backend> backend,
                               MakeBackend(i, /*alone=*/true));
    TRIBUTARY_RETURN_IF_ERROR(worker::SelfTest(std::move(backend)));
  }
  return absl::OkStatus();
}

absl::Status EmbeddedGroup::Start(GroupObserver* observer) {
  if (options_.device == worker::Device::kCuda) {
    TRIBUTARY_RETURN_IF_ERROR(worker::CheckGpus(options_.first_gpu, size()));
    TRIBUTARY_RETURN_IF_ERROR(
        worker::CheckGpuExchange(options_.strategy, options_.first_gpu, size()));
  }
  TRIBUTARY_RETURN_IF_ERROR(TestDevices());
  for (int i = 0; i < size(); ++i) {
    TRIBUTARY_ASSIGN_OR_RETURN(std::unique_ptr<worker::Backend> backend,
                               MakeBackend(i, /*alone=*/false));
    auto executor = std::make_unique<worker::Executor>(
        worker::ExecutorOptions{
            .memory_limit = options_.memory_limit / options_.workers,
            .memory_slice = worker::kMemorySlice,
            .on_session_news =
                [observer](const worker::SessionNews& news) { observer->OnSessionNews(news); }},
        std::move(backend));
    const MutexLock lock(mutex_);
    ranks_[i]->executor = std::move(executor);
  }
  observer_ = observer;
  control_thread_ = std::thread([this] { RunControl(); });
  for (int i = 0; i < size(); ++i) ranks_[i]->thread = std::thread([this, i] { RunRank(i); });
  return absl::OkStatus();
}

void EmbeddedGroup::Submit(std::shared_ptr<const worker::Command> command, Done done) {
  {
    const MutexLock lock(mutex_);
    if (formed_ && broken_.empty() && !stopping_ && command->epoch == epoch_) {
      auto submission = std::make_shared<Submission>();
      submission->command = std::move(command);
      submission->done = std::move(done);
      submission->replies.resize(size());
      submission->unfinished = size();
      // Deadlines mostly rise, so that the control thread is rarely woken for one.
      if (submission->command->deadline < next_look_) control_.NotifyAll();
      in_flight_.push_back(submission);
      const bool lent = IsLent(*submission->command);
      for (int i = 0; i < size(); ++i) {
        work_[i].queue.push_back(submission);
        if (i == 0 && lent) continue;  // this thread is about to see to it
        ranks_[i]->commands.fetch_add(1, std::memory_order_relaxed);
        ranks_[i]->wake.NotifyOne();
      }
      return;
    }
  }
  done({absl::AbortedError("the group of workers has changed"), {}});
}

bool EmbeddedGroup::IsLent(const worker::Command& command) const {
  return borrows() && command.waiter == std::this_thread::get_id();
}

void EmbeddedGroup::Lend(const std::function<bool()>& over) {
  if (!borrows()) return;
  const MutexLock lock(mutex_);
  RankWork& work = work_[0];
  while (!work.busy && !work.queue.empty() && !over()) RunFirst(0);
  // Of a group that broke meanwhile a command may be left, which the rank's thread drops.
  if (!work.busy && !work.queue.empty()) ranks_[0]->wake.NotifyOne();
}

void EmbeddedGroup::LendOnce() {
  if (!borrows()) return;
  const MutexLock lock(mutex_);
  RankWork& work = work_[0];
  if (!work.busy && !work.queue.empty() && IsLent(*work.queue.front()->command)) RunFirst(0);
  // Whatever is left there is the rank's thread's.
  if (!work.busy && !work.queue.empty()) ranks_[0]->wake.NotifyOne();
}

void EmbeddedGroup::RunRank(int index) {
  Rank& rank = *ranks_[index];
  MutexLock lock(mutex_);
  RankWork& work = work_[index];
  std::deque<SubmissionPtr>& queue = work.queue;
  while (true) {
    if (spin_ && !ranks_end_ && queue.empty()) {
      // The next layer's command usually comes sooner than a thread that sleeps could wake up.
      const uint64_t seen = rank.commands.load(std::memory_order_relaxed);
      lock.Unlock();
      SpinUntil([&] { return rank.commands.load(std::memory_order_relaxed) != seen; }, kSpin);
      lock.Lock();
    }
    while (work.busy || (!ranks_end_ && queue.empty())) rank.wake.Wait(mutex_);
    if (queue.empty()) {
      // All ranks let go at once: what peers reach of a GPU's memory goes when they are through.
      std::unique_ptr<worker::Executor> executor = std::move(rank.executor);
      lock.Unlock();
      executor.reset();
      return;
    }
    RunFirst(index);
  }
}

void EmbeddedGroup::RunFirst(int index) {
  RankWork& work = work_[index];
  const SubmissionPtr submission = std::move(work.queue.front());
  work.queue.pop_front();
  work.busy = true;
  const bool dropped = !submission->done;  // aborted before this rank began
  mutex_.Unlock();
  worker::Reply reply;
  const Clock::time_point begin = Clock::now();
  if (dropped) {
    reply.status = absl::AbortedError("dropped");
  } else {
    reply = ranks_[index]->executor->Execute(*submission->command);
  }
  reply.rank = index;
  reply.begun = begin;
  reply.arrived = Clock::now();
  const double seconds = std::chrono::duration<double>(reply.arrived - begin).count();
  FinishOnRank(submission, std::move(reply), seconds);
  mutex_.Lock();
}

void EmbeddedGroup::FinishOnRank(const SubmissionPtr& submission, worker::Reply reply,
                                 double seconds) {
  Done done;
  Outcome outcome;
  bool more_to_do = false;  // on this rank
  {
    const MutexLock lock(mutex_);
    RankWork& work = work_[reply.rank];
    more_to_do = !work.queue.empty();
    work.busy = false;
    work.busy_seconds += seconds;
    // If another thread was in its place, the rank's own goes on.
    if (more_to_do || ranks_end_) ranks_[reply.rank]->wake.NotifyOne();
    if (absl::IsDataLoss(reply.status)) lost_.Update(reply.status);
    const bool breaks = BreaksGroup(reply.status) && submission->done;
    if (breaks) Break(absl::StrCat("rank ", reply.rank, ": ", reply.status.message()));
    submission->replies[reply.rank] = std::move(reply);
    if (--submission->unfinished == 0) {
      in_flight_.erase(std::find(in_flight_.begin(), in_flight_.end(), submission));
      if (submission->done) {
        done = std::exchange(submission->done, nullptr);
        outcome = {FirstError(submission->replies), std::move(submission->replies)};
      }
      if (in_flight_.empty() && (!broken_.empty() || stopping_)) control_.NotifyAll();
    }
  }
  if (!done) return;
  // Another thread calls `done`, so that the rank's next command does not wait for it.
  if (more_to_do) return completions_.Add(std::move(done), std::move(outcome));
  completions_.CallOrAdd(std::move(done), std::move(outcome));
}

void EmbeddedGroup::Break(const std::string& reason) {
  if (!broken_.empty()) return;
  broken_ = reason;
  for (auto& rank : ranks_) {
    if (auto comm = rank->executor->communicator()) comm->Abort(reason);
  }
  control_.NotifyAll();
}

Clock::time_point EmbeddedGroup::EarliestDeadline() const {
  Clock::time_point earliest = Clock::time_point::max();
  for (const SubmissionPtr& s : in_flight_) {
    if (s->done) earliest = std::min(earliest, s->command->deadline);
  }
  return earliest;
}

void EmbeddedGroup::RunControl() {
  const MutexLock lock(mutex_);
  Form();
  while (!stopped_) {
    if (!broken_.empty()) {
      Recover();
      continue;
    }
    next_look_ = EarliestDeadline();
    if (next_look_ <= Clock::now()) {
      Break("a command did not end by its deadline");
    } else if (next_look_ == Clock::time_point::max()) {
      control_.Wait(mutex_);
    } else {
      control_.WaitUntil(mutex_, next_look_);
    }
  }
}

void EmbeddedGroup::Form() {
  const bool first = !has_formed_;
  while (!stopping_ && !stopped_) {
    const uint64_t epoch = ++epoch_;
    // No rank executes anything now, so that the executors are ours.
    mutex_.Unlock();
    const absl::Status joined = JoinAll(epoch);
    if (!joined.ok()) observer_->OnBroken(absl::StrCat("cannot form: ", joined.message()));
    mutex_.Lock();
    if (joined.ok()) {
      broken_.clear();
      formed_ = has_formed_ = true;
      mutex_.Unlock();
      observer_->OnFormed(epoch, std::vector<bool>(size(), first));
      return mutex_.Lock();
    }
    if (absl::IsDataLoss(joined)) {
      lost_.Update(joined);
      return WaitLost();
    }
    const Clock::time_point next_try = Clock::now() + options_.form_pause;
    while (!stopping_ && !stopped_ && control_.WaitUntil(mutex_, next_try)) {
    }
  }
  broken_ = "stopping";
}

absl::Status EmbeddedGroup::JoinAll(uint64_t epoch) {
  auto comms = collective::CreateInProcessGroup(size(), epoch);
  collective::MemoryRendezvous rendezvous;
  const Clock::time_point deadline = Clock::now() + options_.form_timeout;
  std::vector<absl::Status> joined(size());
  std::vector<std::thread> threads;
  for (int i = 0; i < size(); ++i) {
    threads.emplace_back([&, i] {
      joined[i] = ranks_[i]->executor->Join(std::move(comms[i]), rendezvous, deadline);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int i = 0; i < size(); ++i) {
    if (joined[i].ok()) continue;
    return absl::Status(joined[i].code(), absl::StrCat("rank ", i, ": ", joined[i].message()));
  }
  return absl::OkStatus();
}

void EmbeddedGroup::Recover() {
  formed_ = false;
  const std::string reason = broken_;
  std::vector<Done> aborted;
  for (const SubmissionPtr& s : in_flight_) {
    if (s->done) aborted.push_back(std::exchange(s->done, nullptr));
  }
  mutex_.Unlock();
  observer_->OnBroken(reason);
  for (Done& done : aborted) done({absl::AbortedError(reason), {}});
  mutex_.Lock();
  // Ranks leave collectives at once and computations when they are through.
  while (!in_flight_.empty() && !stopped_) control_.Wait(mutex_);
  if (!lost_.ok()) return WaitLost();
  if (!stopped_ && !stopping_) {
    Form();
  } else {
    while (!stopped_) control_.Wait(mutex_);
  }
}

void EmbeddedGroup::WaitLost() {
  const absl::Status lost = lost_;
  broken_ = std::string(lost.message());
  mutex_.Unlock();
  if (options_.on_lost) options_.on_lost(lost);
  mutex_.Lock();
  while (!stopped_) control_.Wait(mutex_);
}

std::vector<Member> EmbeddedGroup::members() const {
  const MutexLock lock(mutex_);
  std::vector<Member> members;
  for (int i = 0; i < size(); ++i) {
    members.push_back(
        {.rank = i,
         .address = "embedded",
         .backend = Name(device()),
         .connected = formed_,
         .memory_bytes = ranks_[i]->executor == nullptr ? 0 : ranks_[i]->executor->memory_used(),
         .busy_seconds = work_[i].busy_seconds});
  }
  return members;
}

std::string EmbeddedGroup::exchange() const {
  const MutexLock lock(mutex_);
  if (size() == 1 || !has_formed_ || !exchange_.empty()) return exchange_;
  return "partials meet in the memory of one process";
}

void EmbeddedGroup::Stop() {
  {
    const MutexLock lock(mutex_);
    if (stopping_ || !control_thread_.joinable()) return;
    stopping_ = true;
    // The control thread breaks the group when a deadline passes, so this ends.
    while (!in_flight_.empty()) control_.Wait(mutex_);
    stopped_ = true;
    control_.NotifyAll();
  }
  // It may be bringing the executors into a group: they stay until it is through.
  control_thread_.join();
  {
    const MutexLock lock(mutex_);
    ranks_end_ = true;
    for (auto& rank : ranks_) rank->wake.NotifyAll();
  }
  for (auto& rank : ranks_) rank->thread.join();
  completions_.Stop();
}

}  // namespace

std::unique_ptr<WorkerGroup> CreateEmbeddedGroup(const EmbeddedGroupOptions& options) {
  return std::make_unique<EmbeddedGroup>(options);
}

}  // namespace tributary::service
