// How an operation runs, and how it ends when it cannot:
//
// - Every operation sends at most one message to each peer and receives at most one, all at once,
//   straight between the two ranks. Gloo's own collectives are not used: their rings multiply the
//   latency, and their waits cannot be ended from outside.
// - A message's slot is a hash of the epoch, the operation's number, kind and size. Ranks that part
//   ways therefore never meet, and run into their deadline. If sizes could differ within a slot,
//   Gloo would throw on its own thread and end the process.
// - Gloo tells a waiting thread that a connection broke, except in the midst of a message. A
// watcher
//   thread holds a receive open on every connection, one that nothing ever answers, learns of every
//   break, and ends the waits for that peer. So a lost peer is noticed at once, in any phase.
// - A failed operation closes all connections: peers that still wait for this rank learn of it
//   without waiting for their deadline.
#include "collective/gloo/gloo.h"

#include <gloo/transport/unbound_buffer.h>

#include <csignal>
#include <cstring>
#include <map>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "collective/gloo/gloo_mesh.h"
#include "collective/in_process.h"
#include "collective/op.h"
#include "kernels/mutex.h"

namespace tributary::collective {
namespace {

using Buffer = std::unique_ptr<gloo::transport::UnboundBuffer>;

// splitmix64 (Steele, Lea and Flood, OOPSLA 2014), used to fold one more value into a hash.
uint64_t Fold(uint64_t hash, uint64_t value) {
  uint64_t z = hash + value + 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// What goes to and comes from one peer. Both of the operation's size; nullptr also for no bytes.
struct Transfer {
  int peer = 0;
  bool sends = false;
  bool receives = false;
  const std::byte* send = nullptr;
  std::byte* recv = nullptr;
};

// A transfer under way. The memory belongs to the caller of the operation; when these buffers are
// gone Gloo no longer touches it.
struct Pending {
  int peer;
  Buffer send;  // nullptr when nothing is sent
  Buffer recv;
  bool received = false;
};

// Whether what `wait` waits for has happened. A wait that Abort or the watcher ended does not tell,
// so it is asked again, without waiting; both may have ended one. Takes the communicator down when
// the answer is no: to Gloo every wait that runs out is fatal.
template <typename Wait>
bool HasHappened(const Wait& wait) {
  constexpr int kAsks = 3;
  try {
    for (int i = 0; i < kAsks; ++i) {
      if (wait(std::chrono::milliseconds(0))) return true;
    }
  } catch (const std::exception&) {
  }
  return false;
}

bool Received(Pending& p) {
  return p.received ||
         HasHappened([&p](std::chrono::milliseconds t) { return p.recv->waitRecv(nullptr, t); });
}

bool Sent(Pending& p) {
  return HasHappened([&p](std::chrono::milliseconds t) { return p.send->waitSend(nullptr, t); });
}

class GlooCommunicator final : public Communicator {
 public:
  GlooCommunicator(const GlooOptions& options, GlooMesh mesh)
      : rank_(options.rank),
        size_(options.size),
        epoch_(options.epoch),
        mesh_(std::move(mesh)),
        watcher_([this] { Watch(); }) {}

  ~GlooCommunicator() override {
    {
      const MutexLock lock(mutex_);
      leaving_ = true;
      if (watch_ != nullptr) watch_->abortWaitRecv();
    }
    watcher_.join();
    // The connections are closed softly: what this rank sent in its last operation still arrives.
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  uint64_t epoch() const override { return epoch_; }

  Status AllGather(const void* send, void* recv, size_t bytes, Deadline deadline) override {
    std::vector<Transfer> transfers = TransfersWithAll();
    for (Transfer& t : transfers) {
      t.send = Part(send, 0, bytes);
      t.recv = Part(recv, t.peer, bytes);
    }
    CopyOwn(send, 0, recv, bytes);
    return Run(Op::kAllGather, bytes, 0, transfers, deadline);
  }

  Status AllToAll(const void* send, void* recv, size_t bytes, Deadline deadline) override {
    CopyOwn(send, rank_, recv, bytes);
    return SwapParts(Op::kAllToAll, send, recv, bytes, deadline);
  }

  Status ReduceScatter(const float* send, float* recv, size_t count, Deadline deadline) override {
    parts_.resize(size_ * count);
    const size_t bytes = count * sizeof(float);
    CopyOwn(send, rank_, parts_.data(), bytes);
    if (Status s = SwapParts(Op::kReduceScatter, send, parts_.data(), bytes, deadline); !s.ok()) {
      return s;
    }
    if (count > 0) std::memcpy(recv, parts_.data(), bytes);
    for (int r = 1; r < size_; ++r) {
      const float* part = parts_.data() + r * count;
      for (size_t i = 0; i < count; ++i) recv[i] += part[i];
    }
    return Status::Ok();
  }

  Status Gather(const void* send, void* recv, size_t bytes, int root, Deadline deadline) override {
    if (root < 0 || root >= size_) return InvalidArgument("gather: root is not a rank");
    std::vector<Transfer> transfers;
    if (rank_ == root) {
      transfers = TransfersWithAll();
      for (Transfer& t : transfers) {
        t.sends = false;
        t.recv = Part(recv, t.peer, bytes);
      }
      CopyOwn(send, 0, recv, bytes);
    } else {
      transfers.push_back({.peer = root, .sends = true, .send = Part(send, 0, bytes)});
    }
    return Run(Op::kGather, bytes, root, transfers, deadline);
  }

  Status Barrier(Deadline deadline) override {
    return Run(Op::kBarrier, 0, 0, TransfersWithAll(), deadline);
  }

  void Abort(const std::string& reason) override {
    const MutexLock lock(mutex_);
    if (!error_.ok()) return;
    error_ = {StatusCode::kAborted, "aborted by rank " + std::to_string(rank_) + ": " + reason};
    if (pending_ == nullptr) {
      CloseMesh(mesh_);
      return;
    }
    // The thread in the operation closes the connections, once it has its buffers back.
    for (Pending& p : *pending_) EndWaits(p);
  }

 private:
  // -------------------------------------------------------------------------------------------
  // Shapes of operations

  static const std::byte* Part(const void* data, int part, size_t bytes) {
    return bytes == 0 ? nullptr : static_cast<const std::byte*>(data) + part * bytes;
  }
  static std::byte* Part(void* data, int part, size_t bytes) {
    return bytes == 0 ? nullptr : static_cast<std::byte*>(data) + part * bytes;
  }

  void CopyOwn(const void* send, int part, void* recv, size_t bytes) const {
    if (bytes > 0) std::memcpy(Part(recv, rank_, bytes), Part(send, part, bytes), bytes);
  }

  // Peers in the order of a rotation that starts after this rank, so that not all ranks begin with
  // the same one.
  std::vector<Transfer> TransfersWithAll() const {
    std::vector<Transfer> transfers;
    for (int i = 1; i < size_; ++i) {
      transfers.push_back({.peer = (rank_ + i) % size_, .sends = true, .receives = true});
    }
    return transfers;
  }

  Status SwapParts(Op op, const void* send, void* recv, size_t bytes, Deadline deadline) {
    std::vector<Transfer> transfers = TransfersWithAll();
    for (Transfer& t : transfers) {
      t.send = Part(send, t.peer, bytes);
      t.recv = Part(recv, t.peer, bytes);
    }
    return Run(op, bytes, 0, transfers, deadline);
  }

  // -------------------------------------------------------------------------------------------
  // An operation

  Status Run(Op op, size_t bytes, int root, const std::vector<Transfer>& transfers,
             Deadline deadline) {
    uint64_t slot = 0;
    for (const uint64_t value : {epoch_, sequence_++, static_cast<uint64_t>(op),
                                 static_cast<uint64_t>(bytes), static_cast<uint64_t>(root)}) {
      slot = Fold(slot, value);
    }
    std::vector<Pending> pending = CreateBuffers(transfers, bytes);
    if (Status s = Begin(&pending); !s.ok()) return s;
    int waited_for = -1;
    Status status;
    try {
      Post(pending, slot, &waited_for);
      status = AwaitAll(pending, deadline, &waited_for);
    } catch (const std::exception& e) {
      status = StatusOf(e);
      if (status.code() == StatusCode::kUnavailable) {
        status = LostPeersOf({{waited_for, status.message()}});
      }
    }
    return End(op, pending, waited_for, status, deadline);
  }

  std::vector<Pending> CreateBuffers(const std::vector<Transfer>& transfers, size_t bytes) {
    std::vector<Pending> pending;
    pending.reserve(transfers.size());
    for (const Transfer& t : transfers) {
      // Gloo only reads a buffer that it sends from.
      std::byte* send = const_cast<std::byte*>(t.send);
      pending.push_back({t.peer,
                         t.sends ? mesh_.context->createUnboundBuffer(send, bytes) : nullptr,
                         t.receives ? mesh_.context->createUnboundBuffer(t.recv, bytes) : nullptr});
    }
    return pending;
  }

  Status Begin(std::vector<Pending>* pending) {
    const MutexLock lock(mutex_);
    if (error_.ok() && !lost_.empty()) error_ = LostPeersOf(lost_);
    if (!error_.ok()) {
      CloseMesh(mesh_);  // does nothing the second time
      return error_;
    }
    pending_ = pending;
    return Status::Ok();
  }

  // Receives first: a message is sent when its receiver has said that it is ready.
  static void Post(std::vector<Pending>& pending, uint64_t slot, int* waited_for) {
    for (Pending& p : pending) {
      *waited_for = p.peer;
      if (p.recv != nullptr) p.recv->recv(p.peer, slot);
    }
    for (Pending& p : pending) {
      *waited_for = p.peer;
      if (p.send != nullptr) p.send->send(p.peer, slot);
    }
  }

  Status AwaitAll(std::vector<Pending>& pending, Deadline deadline, int* waited_for) {
    for (Pending& p : pending) {
      if (p.recv == nullptr) continue;
      *waited_for = p.peer;
      p.received = p.recv->waitRecv(nullptr, TimeoutOf(deadline));
      if (p.received) continue;
      const Status why = LostPeers();  // before the question, which breaks what was still whole
      if (!Received(p)) return why;
      p.received = true;
    }
    for (Pending& p : pending) {
      if (p.send == nullptr) continue;
      *waited_for = p.peer;
      if (p.send->waitSend(nullptr, TimeoutOf(deadline))) continue;
      const Status why = LostPeers();
      if (!Sent(p)) return why;
    }
    return Status::Ok();
  }

  Status End(Op op, std::vector<Pending>& pending, int waited_for, Status status,
             Deadline deadline) {
    {
      const MutexLock lock(mutex_);
      pending_ = nullptr;
      if (status.ok() && error_.ok()) return status;
      if (error_.ok()) error_ = Explain(op, pending, waited_for, status, deadline);
      status = error_;
    }
    pending.clear();  // from here on Gloo leaves the caller's memory alone
    CloseMesh(mesh_);
    return status;
  }

  // An operation that ends after its deadline ran out of time, whatever
  // broke the connection in the end: Gloo itself closes all connections when a wait runs out.
  Status Explain(Op op, std::vector<Pending>& pending, int waited_for, const Status& status,
                 Deadline deadline) const {
    const std::string name = std::string(Name(op)) + ": ";
    if (std::chrono::steady_clock::now() >= deadline) {
      std::set<int> missing;
      for (Pending& p : pending) {
        if (p.recv == nullptr || !Received(p)) missing.insert(p.peer);
      }
      if (missing.empty()) missing.insert(waited_for);  // it came, and did not take our message
      std::string who;
      for (const int peer : missing) who += (who.empty() ? "rank " : ", ") + std::to_string(peer);
      return {StatusCode::kDeadlineExceeded,
              name + who + " did not come before the deadline of rank " + std::to_string(rank_)};
    }
    return {status.code(), name + status.message()};
  }

  // -------------------------------------------------------------------------------------------
  // The watcher

  void Watch() {
    const uint64_t slot = Fold(epoch_, static_cast<uint64_t>(Op::kWatch));
    while (true) {
      Buffer watch = mesh_.context->createUnboundBuffer(nullptr, 0);
      bool any = false;
      for (int peer = 0; peer < size_; ++peer) {
        if (peer == rank_ || IsLost(peer)) continue;
        try {
          watch->recv(peer, slot);
          any = true;
        } catch (const std::exception& e) {  // a broken connection refuses the receive
          Lose(peer, StatusOf(e).message());
        }
      }
      if (!any || !SetWatch(watch.get())) return;
      try {
        if (!watch->waitRecv(nullptr, TimeoutOf(Deadline::max()))) {
          SetWatch(nullptr);
          return;
        }
      } catch (const std::exception&) {
        // A connection broke; the next round finds out which.
      }
      SetWatch(nullptr);
    }
  }

  // False when this communicator is going away.
  bool SetWatch(gloo::transport::UnboundBuffer* watch) {
    const MutexLock lock(mutex_);
    watch_ = leaving_ ? nullptr : watch;
    return !leaving_;
  }

  bool IsLost(int peer) {
    const MutexLock lock(mutex_);
    return lost_.count(peer) > 0;
  }

  // The operation under way may still succeed, when all that it wants of this peer has come. No
  // later one begins.
  void Lose(int peer, std::string why) {
    const MutexLock lock(mutex_);
    lost_[peer] = std::move(why);
    if (pending_ == nullptr) return;
    for (Pending& p : *pending_) {
      if (p.peer == peer) EndWaits(p);
    }
  }

  static void EndWaits(Pending& p) {
    if (p.recv != nullptr) p.recv->abortWaitRecv();
    if (p.send != nullptr) p.send->abortWaitSend();
  }

  Status LostPeers() {
    const MutexLock lock(mutex_);
    return LostPeersOf(lost_);
  }

  static Status LostPeersOf(const std::map<int, std::string>& lost) {
    std::string text;
    for (const auto& [peer, why] : lost) {
      text += (text.empty() ? "lost rank " : ", rank ") + std::to_string(peer) + " (" + why + ")";
    }
    return {StatusCode::kUnavailable, std::move(text)};
  }

  const int rank_;
  const int size_;
  const uint64_t epoch_;
  GlooMesh mesh_;
  uint64_t sequence_ = 0;     // of the next operation
  std::vector<float> parts_;  // what ReduceScatter receives

  Mutex mutex_;
  Status error_ TRIBUTARY_GUARDED_BY(mutex_);  // the first one
  // Peers whose connection broke, and why.
  std::map<int, std::string> lost_ TRIBUTARY_GUARDED_BY(mutex_);
  // Of the operation under way, or null.
  std::vector<Pending>* pending_ TRIBUTARY_GUARDED_BY(mutex_) = nullptr;
  // What the watcher waits in, or null.
  gloo::transport::UnboundBuffer* watch_ TRIBUTARY_GUARDED_BY(mutex_) = nullptr;
  bool leaving_ TRIBUTARY_GUARDED_BY(mutex_) = false;

  std::thread watcher_;  // last: it uses all of the above
};

// Gloo writes to sockets whose peer may be gone. A process that has not chosen otherwise would be
// ended by the signal instead of getting the error.
void IgnoreBrokenPipes() {
  struct sigaction current = {};
  if (sigaction(SIGPIPE, nullptr, &current) == 0 && current.sa_handler == SIG_DFL) {
    current.sa_handler = SIG_IGN;
    sigaction(SIGPIPE, &current, nullptr);
  }
}

}  // namespace

Status CreateGlooCommunicator(const GlooOptions& options, Rendezvous& rendezvous, Deadline deadline,
                              std::unique_ptr<Communicator>* out) {
  if (options.size < 1) return InvalidArgument("size is below 1: " + std::to_string(options.size));
  if (options.rank < 0 || options.rank >= options.size) {
    return InvalidArgument("rank " + std::to_string(options.rank) + " is not in a group of " +
                           std::to_string(options.size));
  }
  if (options.size == 1) {  // no peers, no network
    *out = std::move(CreateInProcessGroup(1, options.epoch)[0]);
    return Status::Ok();
  }
  IgnoreBrokenPipes();
  GlooMesh mesh;
  if (Status s = ConnectMesh(options, rendezvous, deadline, &mesh); !s.ok()) return s;
  auto communicator = std::make_unique<GlooCommunicator>(options, std::move(mesh));
  // Our connections stand; those among the peers may not.
  if (Status s = communicator->Barrier(deadline); !s.ok()) return s;
  *out = std::move(communicator);
  return Status::Ok();
}

}  // namespace tributary::collective
