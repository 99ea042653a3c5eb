#include "collective/tls/tls_transfers.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "base/rpc/descriptor.h"
#include "base/sync/mutex.h"
#include "collective/tls/message_header.h"
#include "collective/tls/poll_until.h"

namespace tributary::collective {
namespace {

// A message that is no longer than this goes out as one record, behind its header. What is longer
// begins with so much.
constexpr size_t kHead = 16 << 10;
// One peer's turn in a large message, so that no peer waits for all of another's.
constexpr size_t kTurn = 256 << 10;

// One message on its way to a peer.
class Outgoing {
 public:
  void Begin(const MessageHeader& header, const std::byte* data) {
    const size_t with_header = std::min<size_t>(header.bytes, kHead - sizeof(header));
    head_.resize(sizeof(header) + with_header);
    std::memcpy(head_.data(), &header, sizeof(header));
    if (with_header > 0) std::memcpy(head_.data() + sizeof(header), data, with_header);
    data_ = data;
    size_ = sizeof(header) + header.bytes;
    sent_ = 0;
  }
  bool done() const { return sent_ == size_; }

  // kDone also where only its turn is over.
  TlsConnection::Io Advance(TlsConnection& connection) {
    const size_t until = std::min(size_, sent_ + kTurn);
    while (sent_ < until) {
      const bool head = sent_ < head_.size();
      const std::byte* from = head ? head_.data() + sent_ : data_ + (sent_ - sizeof(MessageHeader));
      size_t sent = 0;
      const TlsConnection::Io io =
          connection.Write(from, (head ? head_.size() : size_) - sent_, &sent);
      if (io != TlsConnection::Io::kDone) return io;
      sent_ += sent;
    }
    return TlsConnection::Io::kDone;
  }

 private:
  std::vector<std::byte> head_;  // the header and what goes with it
  const std::byte* data_ = nullptr;
  size_t size_ = 0;  // with the header
  size_t sent_ = 0;
};

// One message on its way from a peer.
class Incoming {
 public:
  void Begin(const MessageHeader& expected, std::byte* data) {
    expected_ = expected;
    data_ = data;
    got_ = 0;
  }
  bool done() const { return !differs() && got_ == sizeof(MessageHeader) + expected_.bytes; }
  // The peer is in another operation than this rank. Nothing of its message was taken.
  bool differs() const { return got_ == sizeof(MessageHeader) && !(header_ == expected_); }
  const MessageHeader& header() const { return header_; }

  // kDone also where only its turn is over, and where the message differs.
  TlsConnection::Io Advance(TlsConnection& connection) {
    const size_t until = std::min(sizeof(header_) + expected_.bytes, got_ + kTurn);
    while (got_ < until) {
      const bool in_header = got_ < sizeof(header_);
      std::byte* to = in_header ? reinterpret_cast<std::byte*>(&header_) + got_
                                : data_ + (got_ - sizeof(header_));
      size_t got = 0;
      const size_t end = in_header ? sizeof(header_) : sizeof(header_) + expected_.bytes;
      const TlsConnection::Io io = connection.Read(to, end - got_, &got);
      if (io != TlsConnection::Io::kDone) return io;
      got_ += got;
      if (differs()) return TlsConnection::Io::kDone;
    }
    return TlsConnection::Io::kDone;
  }

 private:
  MessageHeader expected_;
  MessageHeader header_;
  std::byte* data_ = nullptr;
  size_t got_ = 0;  // with the header
};

class TlsTransfers final : public Transfers {
 public:
  TlsTransfers(const GroupPlace& place, TlsMesh mesh, Descriptor wake)
      : rank_(place.rank),
        outgoing_(place.size),
        incoming_(place.size),
        wake_(std::move(wake)),
        mesh_(std::move(mesh)) {}

  Status Run(Op op, size_t bytes, int root, const std::vector<Transfer>& transfers,
             Deadline deadline) override {
    {
      const MutexLock lock(mutex_);
      if (!error_.ok()) return error_;
      running_ = true;
    }
    const MessageHeader header{
        .sequence = sequence_++, .bytes = bytes, .op = static_cast<uint32_t>(op), .root = root};
    const Status status = CarryOut(header, transfers, deadline);
    const MutexLock lock(mutex_);
    running_ = false;
    if (status.ok() && error_.ok()) return status;
    if (error_.ok()) error_ = During(op, status);
    Close();
    return error_;
  }

  void Abort(const std::string& reason) override {
    const MutexLock lock(mutex_);
    if (!error_.ok()) return;
    error_ = AbortedBy(rank_, reason);
    if (!running_) return Close();
    // The thread in the operation closes the connections.
    aborted_ = true;
    const uint64_t one = 1;
    // It fails only when so much has been written that the thread wakes anyway.
    [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof(one));
  }

 private:
  // What is left to do with one peer.
  struct Pending {
    int peer;
    bool sends;
    bool receives;
    short events = 0;   // of poll(2)
    bool ready = true;  // there is more to do without waiting
  };

  Status CarryOut(const MessageHeader& header, const std::vector<Transfer>& transfers,
                  Deadline deadline) {
    std::vector<Pending> pending;
    for (const Transfer& t : transfers) {
      if (t.sends) outgoing_[t.peer].Begin(header, t.send);
      if (t.receives) incoming_[t.peer].Begin(header, t.recv);
      pending.push_back({.peer = t.peer, .sends = t.sends, .receives = t.receives});
    }
    while (true) {
      std::map<int, std::string> lost;
      for (Pending& p : pending) Advance(p, &lost);
      for (const Pending& p : pending) {
        if (p.receives && incoming_[p.peer].differs()) return PartedWays(p.peer, header);
      }
      if (!lost.empty()) return LostPeers(lost);
      std::erase_if(pending, [](const Pending& p) { return !p.sends && !p.receives; });
      if (pending.empty()) return Status::Ok();
      if (aborted_) return {};  // Abort has said why
      if (std::chrono::steady_clock::now() >= deadline) return Late(pending);
      Wait(pending, deadline);
    }
  }

  // Whether it is done or has to wait, `p` says afterwards.
  void Advance(Pending& p, std::map<int, std::string>* lost) {
    TlsConnection& connection = *mesh_.peers[p.peer];
    p.events = 0;
    p.ready = false;
    const auto note = [&](TlsConnection::Io io, bool done, bool* wanted) {
      if (io == TlsConnection::Io::kBroken) {
        (*lost)[p.peer] = connection.error();
      } else if (io == TlsConnection::Io::kWaits) {
        p.events |= connection.events();
      } else if (done) {
        *wanted = false;
      } else {
        p.ready = true;
      }
    };
    if (p.sends) {
      const TlsConnection::Io io = outgoing_[p.peer].Advance(connection);
      note(io, outgoing_[p.peer].done(), &p.sends);
      if (io == TlsConnection::Io::kBroken) return;
    }
    if (p.receives) {
      const TlsConnection::Io io = incoming_[p.peer].Advance(connection);
      note(io, incoming_[p.peer].done(), &p.receives);
    }
  }

  void Wait(const std::vector<Pending>& pending, Deadline deadline) {
    std::vector<pollfd> waits = {{.fd = wake_.get(), .events = POLLIN}};
    for (const Pending& p : pending) {
      if (p.ready) return;
      waits.push_back({.fd = mesh_.peers[p.peer]->socket(), .events = p.events});
    }
    PollUntil(waits, deadline);
  }

  // Those whose message did not come, or else those who did not take ours.
  Status Late(const std::vector<Pending>& pending) const {
    std::set<int> late;
    for (const Pending& p : pending) {
      if (p.receives) late.insert(p.peer);
    }
    if (late.empty()) {
      for (const Pending& p : pending) late.insert(p.peer);
    }
    return LatePeers(late, rank_);
  }

  Status PartedWays(int peer, const MessageHeader& own) const {
    return {StatusCode::kInternal, "rank " + std::to_string(peer) + " is in " +
                                       Describe(incoming_[peer].header()) + ", rank " +
                                       std::to_string(rank_) + " in " + Describe(own)};
  }

  // Peers see it without delay.
  void Close() { mesh_.peers.clear(); }

  const int rank_;
  uint64_t sequence_ = 0;           // of the next operation
  std::vector<Outgoing> outgoing_;  // by peer
  std::vector<Incoming> incoming_;  // by peer

  std::atomic<bool> aborted_ = false;
  const Descriptor wake_;  // Abort writes to it

  Mutex mutex_;
  bool running_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  Status error_ TRIBUTARY_GUARDED_BY(mutex_);  // the first one
  // Belongs to the thread in Run while there is one, and to whoever holds the mutex otherwise.
  TlsMesh mesh_;
};

}  // namespace

Status CreateTlsTransfers(const GroupPlace& place, TlsMesh mesh, std::unique_ptr<Transfers>* out) {
  Descriptor wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.open()) {
    return {StatusCode::kUnavailable, std::string("eventfd: ") + std::strerror(errno)};
  }
  *out = std::make_unique<TlsTransfers>(place, std::move(mesh), std::move(wake));
  return Status::Ok();
}

}  // namespace tributary::collective
