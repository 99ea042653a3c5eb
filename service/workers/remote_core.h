// A group of remote workers without its gRPC service: the seats, the epoch, what is in flight.
//
// Three threads: the former (forms groups, tells the observer), the watch (deadlines, silence,
// heartbeats) and the completions. Everything else happens on gRPC's threads and those of callers.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "service/workers/completions.h"
#include "service/workers/remote_group.h"
#include "service/workers/worker_group.h"
#include "tributary/v1/worker.pb.h"
#include "worker/rpc/registration.h"
#include "worker/rpc/worker_stream.h"

namespace tributary::service {

// Streams keep it alive.
class RemoteCore : public worker::WorkerStream::Events,
                   public std::enable_shared_from_this<RemoteCore> {
 public:
  using Clock = std::chrono::steady_clock;
  using Stream = std::shared_ptr<worker::WorkerStream>;

  explicit RemoteCore(const RemoteGroupOptions& options);

  const RemoteGroupOptions& options() const { return options_; }

  // False: no streams are taken any more.
  bool Accept(grpc::CallbackServerContext* context, Stream* stream);

  absl::Status Start(GroupObserver* observer);
  void Submit(std::shared_ptr<const worker::Command> command, WorkerGroup::Done done);
  std::vector<Member> members() const;
  void Stop();

  void OnMessage(const Stream& stream, const grpc::ByteBuffer& message) override;
  void OnEnd(const Stream& stream) override;
  void OnGone(const Stream& stream) override;

 private:
  enum class State {
    kWaiting,  // for ranks, or for the pause after a failed formation
    kForming,  // the ranks connect to each other under epoch_
    kServing,
  };

  // What is known of a stream.
  struct Peer {
    int rank = -1;  // -1: not registered, or has lost its seat
    Clock::time_point heard;
    bool draining = false;
  };

  struct Seat {
    worker::Seat known;
    Stream stream;  // null: nobody
    bool ready = false;
    // Whether its worker may still be in the epoch that broke: it was told to abort and has not
    // said that it did. When a worker dies its peers may be the first to notice; no epoch is
    // wasted on the dead, who say nothing.
    bool aborting = false;
    uint64_t holder = 0;  // the instance whose shard the group counts on; 0: none
    std::string backend;
    uint64_t memory_bytes = 0;
    double busy_seconds = 0;
  };

  struct Pending {
    uint64_t epoch = 0;
    Clock::time_point deadline;
    WorkerGroup::Done done;
    std::vector<worker::Reply> replies;  // by rank
    std::vector<bool> answered;          // by rank
    int missing = 0;
  };

  // All of the following are called with the mutex held. Streams, seats and the rendezvous:
  void Register(const Stream& stream, uint64_t epoch, const v1::Registration& registration);
  void Take(int rank, v1::WorkerMessage message);
  void Put(v1::RendezvousPut put);
  void Get(int rank, const std::string& key);
  void BeginDraining(const Stream& stream);
  void LetDrainedGo();
  void LetGo(const Stream& stream);
  // The seat's worker is gone, or must be taken for gone.
  void Vacate(const Stream& stream, const std::string& why);
  // Commands:
  // Takes `done` when the command may be sent.
  absl::Status Admit(uint64_t number, Pending pending, WorkerGroup::Done* done);
  void TakeReply(int rank, worker::Reply reply);
  void Complete(WorkerGroup::Done done, absl::Status status, std::vector<worker::Reply> replies);
  // Epochs:
  // Ends the group that serves or forms, if any. All in flight is kAborted.
  void Break(const std::string& reason);
  void Form();
  bool AllCanForm() const;
  bool AllReady() const;
  std::string RanksThat(const std::function<bool(int rank)>& predicate) const;
  v1::CoordinatorMessage Message() const;
  void SendToAll(const v1::CoordinatorMessage& message);
  // What is due at `now`; returns when to look again.
  Clock::time_point WatchOnce(Clock::time_point now);

  void FormerLoop();
  void WatchLoop();

  const RemoteGroupOptions options_;
  const uint64_t group_id_;
  GroupObserver* observer_ = nullptr;

  // Held over a Submit, so that all ranks get commands in one order. Taken before mutex_, which
  // is free while commands are written: replies need not wait for that.
  std::mutex submit_mutex_;

  mutable std::mutex mutex_;
  std::condition_variable former_wakes_;
  std::condition_variable watch_wakes_;
  std::condition_variable drained_;  // nothing in flight, or a stream is gone

  State state_ = State::kWaiting;
  bool started_ = false;
  bool stopping_ = false;  // no new commands, no new groups
  bool stopped_ = false;   // the threads end
  uint64_t epoch_ = 0;     // of the group that serves or forms; of the last one while waiting
  Clock::time_point form_deadline_;
  Clock::time_point abort_deadline_;  // of the workers that are aborting
  Clock::time_point form_not_before_;
  int form_failures_ = 0;  // in a row
  uint64_t leavings_ = 0;
  std::deque<std::string> broken_;  // what the observer has yet to be told
  Clock::time_point next_heartbeat_;
  Clock::time_point watch_until_;

  std::vector<Seat> seats_;       // by rank
  std::map<Stream, Peer> peers_;  // every stream that is not gone
  std::map<std::string, std::string> rendezvous_;
  std::map<std::string, std::vector<int>> rendezvous_waiters_;  // key -> ranks
  std::map<uint64_t, Pending> pending_;                         // by number

  Completions completions_;
  std::thread former_;
  std::thread watch_;
};

}  // namespace tributary::service
