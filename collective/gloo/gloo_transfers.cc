#include "collective/gloo/gloo_transfers.h"

#include <chrono>
#include <exception>
#include <set>
#include <utility>

#include "collective/gloo/gloo_slot.h"

namespace tributary::collective {
namespace {

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

}  // namespace

GlooTransfers::GlooTransfers(const GroupPlace& place, GlooMesh mesh)
    : rank_(place.rank),
      epoch_(place.epoch),
      mesh_(std::move(mesh)),
      watcher_(mesh_, place, [this](int peer) { EndWaitsFor(peer); }) {}

bool GlooTransfers::Received(Pending& p) {
  return p.received ||
         HasHappened([&p](std::chrono::milliseconds t) { return p.recv->waitRecv(nullptr, t); });
}

bool GlooTransfers::Sent(Pending& p) {
  return HasHappened([&p](std::chrono::milliseconds t) { return p.send->waitSend(nullptr, t); });
}

Status GlooTransfers::Run(Op op, size_t bytes, int root, const std::vector<Transfer>& transfers,
                          Deadline deadline) {
  const uint64_t slot = OperationSlot(epoch_, sequence_++, op, bytes, root);
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
      status = LostPeers({{waited_for, status.message()}});
    }
  }
  return End(op, pending, waited_for, status, deadline);
}

std::vector<GlooTransfers::Pending> GlooTransfers::CreateBuffers(
    const std::vector<Transfer>& transfers, size_t bytes) {
  std::vector<Pending> pending;
  pending.reserve(transfers.size());
  for (const Transfer& t : transfers) {
    // Gloo only reads a buffer that it sends from.
    std::byte* send = const_cast<std::byte*>(t.send);
    pending.push_back({t.peer, t.sends ? mesh_.context->createUnboundBuffer(send, bytes) : nullptr,
                       t.receives ? mesh_.context->createUnboundBuffer(t.recv, bytes) : nullptr});
  }
  return pending;
}

Status GlooTransfers::Begin(std::vector<Pending>* pending) {
  const MutexLock lock(mutex_);
  if (error_.ok()) error_ = watcher_.Health();
  if (!error_.ok()) {
    CloseMesh(mesh_);  // does nothing the second time
    return error_;
  }
  pending_ = pending;
  return Status::Ok();
}

// Receives first: a message is sent when its receiver has said that it is ready.
void GlooTransfers::Post(std::vector<Pending>& pending, uint64_t slot, int* waited_for) {
  for (Pending& p : pending) {
    *waited_for = p.peer;
    if (p.recv != nullptr) p.recv->recv(p.peer, slot);
  }
  for (Pending& p : pending) {
    *waited_for = p.peer;
    if (p.send != nullptr) p.send->send(p.peer, slot);
  }
}

Status GlooTransfers::AwaitAll(std::vector<Pending>& pending, Deadline deadline, int* waited_for) {
  for (Pending& p : pending) {
    if (p.recv == nullptr) continue;
    *waited_for = p.peer;
    p.received = p.recv->waitRecv(nullptr, TimeoutOf(deadline));
    if (p.received) continue;
    const Status why = WhyEnded();  // before the question, which breaks what was still whole
    if (!Received(p)) return why;
    p.received = true;
  }
  for (Pending& p : pending) {
    if (p.send == nullptr) continue;
    *waited_for = p.peer;
    if (p.send->waitSend(nullptr, TimeoutOf(deadline))) continue;
    const Status why = WhyEnded();
    if (!Sent(p)) return why;
  }
  return Status::Ok();
}

Status GlooTransfers::End(Op op, std::vector<Pending>& pending, int waited_for, Status status,
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

// An operation that ends after its deadline ran out of time, whatever broke the connection in the
// end: Gloo itself closes all connections when a wait runs out.
Status GlooTransfers::Explain(Op op, std::vector<Pending>& pending, int waited_for,
                              const Status& status, Deadline deadline) const {
  if (std::chrono::steady_clock::now() < deadline) return During(op, status);
  std::set<int> late;
  for (Pending& p : pending) {
    if (p.recv == nullptr || !Received(p)) late.insert(p.peer);
  }
  if (late.empty()) late.insert(waited_for);  // it came, and did not take our message
  return During(op, LatePeers(late, rank_));
}

void GlooTransfers::Abort(const std::string& reason) {
  const MutexLock lock(mutex_);
  if (!error_.ok()) return;
  error_ = AbortedBy(rank_, reason);
  if (pending_ == nullptr) {
    CloseMesh(mesh_);
    return;
  }
  // The thread in the operation closes the connections, once it has its buffers back.
  for (Pending& p : *pending_) EndWaits(p);
}

// The operation under way may still succeed, when all that it wants of this peer has come. No later
// one begins.
void GlooTransfers::EndWaitsFor(int peer) {
  const MutexLock lock(mutex_);
  if (pending_ == nullptr) return;
  for (Pending& p : *pending_) {
    if (p.peer == peer) EndWaits(p);
  }
}

void GlooTransfers::EndWaits(Pending& p) {
  if (p.recv != nullptr) p.recv->abortWaitRecv();
  if (p.send != nullptr) p.send->abortWaitSend();
}

Status GlooTransfers::WhyEnded() {
  const Status health = watcher_.Health();
  return health.ok() ? LostPeers({}) : health;
}

}  // namespace tributary::collective
