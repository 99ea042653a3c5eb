#include "collective/in_process.h"

#include <atomic>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include "base/sync/mutex.h"
#include "collective/op.h"

namespace tributary::collective {
namespace {

// What a rank brings to an operation. `send` is read by peers until the operation is over.
struct Call {
  Op op = Op::kBarrier;
  const std::byte* send = nullptr;
  size_t bytes = 0;  // of the part that one rank receives from one rank
  int root = 0;
};

bool SameShape(const Call& a, const Call& b) {
  return a.op == b.op && a.bytes == b.bytes && a.root == b.root;
}

std::string Describe(const Call& c) {
  return std::string(Name(c.op)) + " of " + std::to_string(c.bytes) + " bytes, root " +
         std::to_string(c.root);
}

// How often a waiting rank looks at the step counter before it sleeps. A wake-up through the kernel
// costs several microseconds, about as long as this many looks.
constexpr int kSpins = 200;

inline void Relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The meeting point of all ranks. An operation has two halves: all ranks arrive and publish where
// their data lies, then each copies what it needs straight from its peers. Nothing is staged.
//
// The last arrival decides, under the lock, that the operation takes place; a deadline or an abort
// decides, under the same lock, that it does not. So an operation succeeds on every rank or on
// none, and a rank that gave up never has its buffer read. In the second half a rank waits only for
// threads that are copying, never for one that may not come: that wait needs no deadline.
class Group {
 public:
  explicit Group(int size)
      : calls_(size),
        present_(size, false),
        // Spinning pays only when every rank can have a core.
        spins_(std::thread::hardware_concurrency() >= static_cast<unsigned>(size) ? kSpins : 0) {}

  int size() const { return static_cast<int>(calls_.size()); }

  // `copy(calls)` moves the data of this rank.
  template <typename Copy>
  Status Run(int rank, const Call& call, Deadline deadline, const Copy& copy) {
    MutexLock lock(mutex_);
    if (!error_.ok()) return error_;
    calls_[rank] = call;
    present_[rank] = true;
    const uint64_t entered = step_.load(std::memory_order_relaxed);
    if (++arrived_ == size()) {
      if (Status s = CheckAgreement(); !s.ok()) return Break(std::move(s));
      arrived_ = 0;
      present_.assign(present_.size(), false);
      copying_ = size();
      Advance();
    } else {
      AwaitStep(entered, deadline);
      if (step_.load(std::memory_order_relaxed) == entered) {
        if (!error_.ok()) return error_;
        return Break({StatusCode::kDeadlineExceeded,
                      std::string(Name(call.op)) + ": " + Missing() +
                          " did not come before the deadline of rank " + std::to_string(rank)});
      }
    }

    lock.Unlock();
    copy(calls_);
    lock.Lock();
    if (--copying_ == 0) {
      Advance();
    } else {
      while (step_.load(std::memory_order_relaxed) <= entered + 1) done_.Wait(mutex_);
    }
    return Status::Ok();
  }

  void Abort(Status reason) {
    const MutexLock lock(mutex_);
    (void)Break(std::move(reason));
  }

 private:
  // The first error stays.
  Status Break(Status error) TRIBUTARY_REQUIRES(mutex_) {
    if (error_.ok()) {
      error_ = std::move(error);
      broken_.store(true, std::memory_order_release);
      done_.NotifyAll();
    }
    return error_;
  }

  void Advance() TRIBUTARY_REQUIRES(mutex_) {
    step_.fetch_add(1, std::memory_order_release);
    done_.NotifyAll();
  }

  // Returns when the step is past `entered`, the group is broken or time is up. Gives the lock up
  // while it waits.
  void AwaitStep(uint64_t entered, Deadline deadline) TRIBUTARY_REQUIRES(mutex_) {
    if (spins_ > 0) {
      mutex_.Unlock();
      for (int i = 0; i < spins_ && step_.load(std::memory_order_acquire) == entered &&
                      !broken_.load(std::memory_order_acquire);
           ++i) {
        Relax();
      }
      mutex_.Lock();
    }
    while (step_.load(std::memory_order_relaxed) == entered && error_.ok()) {
      if (!done_.WaitUntil(mutex_, deadline)) return;
    }
  }

  // Ranks that part ways are a bug above us; without this check they would read out of bounds.
  Status CheckAgreement() const TRIBUTARY_REQUIRES(mutex_) {
    for (int r = 1; r < size(); ++r) {
      if (SameShape(calls_[0], calls_[r])) continue;
      return {StatusCode::kInternal, "ranks entered different operations: rank 0 " +
                                         Describe(calls_[0]) + "; rank " + std::to_string(r) + " " +
                                         Describe(calls_[r])};
    }
    return Status::Ok();
  }

  std::string Missing() const TRIBUTARY_REQUIRES(mutex_) {
    std::string text;
    for (int r = 0; r < size(); ++r) {
      if (!present_[r]) text += (text.empty() ? "rank " : ", ") + std::to_string(r);
    }
    return text;
  }

  Mutex mutex_;
  CondVar done_;
  // Two steps for each operation: all have arrived, all have copied. Written under the lock.
  std::atomic<uint64_t> step_{0};
  // !error_.ok(), for ranks that spin. Written under the lock.
  std::atomic<bool> broken_{false};
  Status error_ TRIBUTARY_GUARDED_BY(mutex_);  // the first one
  // Each rank writes its own under the lock before it arrives. Between the two steps nobody writes,
  // and all ranks read all of them without the lock.
  std::vector<Call> calls_;
  std::vector<bool> present_ TRIBUTARY_GUARDED_BY(mutex_);  // has arrived, for each rank
  int arrived_ TRIBUTARY_GUARDED_BY(mutex_) = 0;            // ranks
  int copying_ TRIBUTARY_GUARDED_BY(mutex_) = 0;            // ranks that have not copied yet
  const int spins_;
};

class InProcessCommunicator final : public Communicator {
 public:
  InProcessCommunicator(std::shared_ptr<Group> group, int rank, uint64_t epoch)
      : group_(std::move(group)), rank_(rank), epoch_(epoch) {}

  ~InProcessCommunicator() override {
    group_->Abort({StatusCode::kUnavailable, "rank " + std::to_string(rank_) + " left the group"});
  }

  int rank() const override { return rank_; }
  int size() const override { return group_->size(); }
  uint64_t epoch() const override { return epoch_; }

  Status AllGather(const void* send, void* recv, size_t bytes, Deadline deadline) override {
    return group_->Run(rank_, Published(Op::kAllGather, send, bytes), deadline,
                       [&](const std::vector<Call>& calls) {
                         for (int r = 0; r < size(); ++r) Copy(recv, r, calls[r].send, 0, bytes);
                       });
  }

  Status AllToAll(const void* send, void* recv, size_t bytes, Deadline deadline) override {
    return group_->Run(rank_, Published(Op::kAllToAll, send, bytes), deadline,
                       [&](const std::vector<Call>& calls) {
                         for (int r = 0; r < size(); ++r)
                           Copy(recv, r, calls[r].send, rank_, bytes);
                       });
  }

  Status ReduceScatter(const float* send, float* recv, size_t count, Deadline deadline) override {
    const size_t bytes = count * sizeof(float);
    return group_->Run(rank_, Published(Op::kReduceScatter, send, bytes), deadline,
                       [&](const std::vector<Call>& calls) {
                         Copy(recv, 0, calls[0].send, rank_, bytes);
                         for (int r = 1; r < size(); ++r) {
                           const float* part =
                               reinterpret_cast<const float*>(calls[r].send) + rank_ * count;
                           for (size_t i = 0; i < count; ++i) recv[i] += part[i];
                         }
                       });
  }

  Status Gather(const void* send, void* recv, size_t bytes, int root, Deadline deadline) override {
    if (root < 0 || root >= size()) return InvalidArgument("gather: root is not a rank");
    Call call = Published(Op::kGather, send, bytes);
    call.root = root;
    return group_->Run(rank_, call, deadline, [&](const std::vector<Call>& calls) {
      if (rank_ != root) return;
      for (int r = 0; r < size(); ++r) Copy(recv, r, calls[r].send, 0, bytes);
    });
  }

  Status Pass(const void* send, void* recv, size_t bytes, int from, int to,
              Deadline deadline) override {
    if (Status s = CheckPass(from, to, size()); !s.ok()) return s;
    Call call = Published(Op::kPass, send, bytes);
    call.root = from;
    return group_->Run(rank_, call, deadline, [&](const std::vector<Call>& calls) {
      if (rank_ == to) Copy(recv, 0, calls[from].send, 0, bytes);
    });
  }

  Status Barrier(Deadline deadline) override {
    return group_->Run(rank_, Published(Op::kBarrier, nullptr, 0), deadline,
                       [](const std::vector<Call>&) {});
  }

  void Abort(const std::string& reason) override {
    group_->Abort(
        {StatusCode::kAborted, "aborted by rank " + std::to_string(rank_) + ": " + reason});
  }

 private:
  static Call Published(Op op, const void* send, size_t bytes) {
    return {op, static_cast<const std::byte*>(send), bytes, 0};
  }

  // Part `to` of `recv` becomes part `from` of `send`.
  static void Copy(void* recv, int to, const std::byte* send, int from, size_t bytes) {
    if (bytes == 0) return;
    std::memcpy(static_cast<std::byte*>(recv) + to * bytes, send + from * bytes, bytes);
  }

  const std::shared_ptr<Group> group_;
  const int rank_;
  const uint64_t epoch_;
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> CreateInProcessGroup(int size, uint64_t epoch) {
  std::vector<std::unique_ptr<Communicator>> ranks;
  if (size < 1) return ranks;
  auto group = std::make_shared<Group>(size);
  for (int r = 0; r < size; ++r) {
    ranks.push_back(std::make_unique<InProcessCommunicator>(group, r, epoch));
  }
  return ranks;
}

}  // namespace tributary::collective
