// A group of remote workers without its gRPC service: who holds which rank, the epoch, and the
// commands in flight.
//
// It has three threads: the former forms groups and tells the observer; the watch looks after
// deadlines, silent workers and heartbeats; the completions call callbacks. Everything else happens
// on gRPC's threads and on those of callers.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "base/sync/mutex.h"
#include "service/workers/completions.h"
#include "service/workers/join_log.h"
#include "service/workers/remote_group.h"
#include "service/workers/worker_group.h"
#include "tributary/v1/worker.pb.h"
#include "worker/holdings.h"
#include "worker/rpc/registration.h"
#include "worker/rpc/worker_stream.h"

namespace tributary::service {

// Thread safe. Streams keep it alive.
class RemoteCore : public worker::WorkerStream::Events,
                   public std::enable_shared_from_this<RemoteCore> {
 public:
  using Clock = std::chrono::steady_clock;
  using Stream = std::shared_ptr<worker::WorkerStream>;

  explicit RemoteCore(const RemoteGroupOptions& options);

  const RemoteGroupOptions& options() const { return options_; }
  uint64_t group_id() const { return group_id_; }

  // False: no streams are taken any more.
  bool Accept(grpc::CallbackServerContext* context, Stream* stream);

  absl::Status Start(GroupObserver* observer);
  void Submit(std::shared_ptr<const worker::Command> command, WorkerGroup::Done done);
  std::vector<Member> members() const;
  std::string exchange() const;
  JoinLog& join_log() { return join_log_; }
  void LetGo(int rank);
  int size() const { return size_; }
  void Expect(int workers);
  void Regroup(const Regrouping& regrouping);
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
    int rank = -1;  // -1: not registered, or has lost its rank
    Clock::time_point heard;
    bool leaving = false;   // it wants to leave, and goes when the observer says so
    bool draining = false;  // it goes when nothing is in flight
  };

  struct RankState {
    worker::RankHistory known;
    Stream stream;  // null: nobody holds the rank
    bool ready = false;
    // The worker was told to abort the epoch that broke, and has not said that it did. When a
    // worker dies, its peers may be the first to notice. The group waits for an answer, so that it
    // does not spend an epoch on a worker that is dead.
    bool aborting = false;
    uint64_t holder = 0;     // the instance whose shard the group counts on; 0: none
    bool reporting = false;  // it has been asked what it holds, and has not answered
    // What it holds, until the first group of this life has formed.
    std::optional<worker::Holdings> held;
    std::string host;
    std::string backend;
    std::string build;      // of the worker's program
    uint32_t protocol = 0;  // the version of worker.proto that is spoken with it
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

  // Streams, ranks and the rendezvous.
  void Register(const Stream& stream, uint64_t epoch, const v1::Registration& registration)
      TRIBUTARY_REQUIRES(mutex_);
  // What is known of who holds the ranks, for whoever wants one now.
  std::vector<worker::RankHistory> Histories() const TRIBUTARY_REQUIRES(mutex_);
  // A worker wants to register. It is given the rank that it held in an earlier life, though
  // another one that came first has it, as long as nothing has been configured.
  void MakeWayForHolder(uint64_t instance_id) TRIBUTARY_REQUIRES(mutex_);
  // Whether a worker that wants to register belongs to a coordinator that has replaced this one.
  // Before the first group of this life forms, epochs that the journal missed are caught up with.
  bool Replaced(uint64_t epoch, const v1::Registration& registration) TRIBUTARY_REQUIRES(mutex_);
  void TakeHoldings(int rank, absl::StatusOr<worker::Holdings> held) TRIBUTARY_REQUIRES(mutex_);
  void Take(int rank, v1::WorkerMessage message) TRIBUTARY_REQUIRES(mutex_);
  void Put(v1::RendezvousPut put) TRIBUTARY_REQUIRES(mutex_);
  void Get(int rank, const std::string& key) TRIBUTARY_REQUIRES(mutex_);
  void BeginDraining(const Stream& stream) TRIBUTARY_REQUIRES(mutex_);
  void LetDrainedGo() TRIBUTARY_REQUIRES(mutex_);
  void LetGo(const Stream& stream) TRIBUTARY_REQUIRES(mutex_);
  // The worker of this stream is gone, or must be taken for gone: its rank is free.
  void Vacate(const Stream& stream, const std::string& why) TRIBUTARY_REQUIRES(mutex_);
  // Commands.
  // All ranks have answered the commands up to this number.
  uint64_t Settled() const TRIBUTARY_EXCLUDES(mutex_);
  // Whether the command may be sent. If so, it takes `done`.
  absl::Status Admit(uint64_t number, Pending pending, WorkerGroup::Done* done)
      TRIBUTARY_REQUIRES(mutex_);
  void TakeReply(int rank, worker::Reply reply) TRIBUTARY_REQUIRES(mutex_);
  // Passes the news to the observer, on the thread of completions: in order, and after the replies
  // that came before.
  void TakeNews(int rank, const v1::SessionNews& news) TRIBUTARY_REQUIRES(mutex_);
  void Complete(WorkerGroup::Done done, absl::Status status, std::vector<worker::Reply> replies);
  // Epochs.
  // Ends the group that serves or forms, if there is one. Commands in flight end with kAborted.
  void Break(const std::string& reason) TRIBUTARY_REQUIRES(mutex_);
  void Form() TRIBUTARY_REQUIRES(mutex_);
  // What is adopted must be of the last group that was given commands.
  void LeaveOutStale() TRIBUTARY_REQUIRES(mutex_);
  // All ranks are ready: tells the store and the observer.
  void Serve() TRIBUTARY_REQUIRES(mutex_);
  bool AllCanForm() const TRIBUTARY_REQUIRES(mutex_);
  bool AllReady() const TRIBUTARY_REQUIRES(mutex_);
  std::string RanksThat(const std::function<bool(int rank)>& predicate) const
      TRIBUTARY_REQUIRES(mutex_);
  // The lowest protocol version that is spoken with a rank: all ranks are told the same.
  uint32_t GroupProtocol() const TRIBUTARY_REQUIRES(mutex_);
  v1::CoordinatorMessage Message() const TRIBUTARY_REQUIRES(mutex_);
  void SendToAll(const v1::CoordinatorMessage& message) TRIBUTARY_REQUIRES(mutex_);
  // Does what is due at `now`, and returns when to look again.
  Clock::time_point WatchOnce(Clock::time_point now) TRIBUTARY_REQUIRES(mutex_);

  // The ranks of the group that serves or forms. Behind them are workers that a larger one expects.
  absl::Span<RankState> Ranks() TRIBUTARY_REQUIRES(mutex_) {
    return absl::MakeSpan(ranks_).first(static_cast<size_t>(size_));
  }
  absl::Span<const RankState> Ranks() const TRIBUTARY_REQUIRES(mutex_) {
    return absl::MakeConstSpan(ranks_).first(static_cast<size_t>(size_));
  }
  // From now on there are so many ranks that workers may hold. Those of others are sent away.
  void SetPlaces(int places) TRIBUTARY_REQUIRES(mutex_);

  // When the service stops: waits until all streams are gone, for a bounded time.
  void WaitForPeersToLeave() TRIBUTARY_REQUIRES(mutex_);

  void FormerLoop();
  void WatchLoop();

  const RemoteGroupOptions options_;
  JoinLog join_log_;
  const uint64_t group_id_;
  GroupObserver* observer_ = nullptr;

  // Held during a Submit, so that all ranks get commands in one order. It is taken before mutex_,
  // which is free while commands are written: replies need not wait for that.
  Mutex submit_mutex_;

  mutable Mutex mutex_;
  CondVar former_wakes_;
  CondVar watch_wakes_;
  CondVar drained_;  // nothing is in flight, or a stream is gone

  State state_ TRIBUTARY_GUARDED_BY(mutex_) = State::kWaiting;
  bool started_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  bool stopping_ TRIBUTARY_GUARDED_BY(mutex_) = false;  // no new commands, no new groups
  bool stopped_ TRIBUTARY_GUARDED_BY(mutex_) = false;   // the threads end
  // An earlier life's group is to be gone on with; until the first group of this one has formed.
  bool adopting_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  Clock::time_point kept_until_ TRIBUTARY_GUARDED_BY(mutex_);  // ranks, for those that held them
  bool configured_ TRIBUTARY_GUARDED_BY(mutex_) = false;       // this life has given out an epoch
  bool replaced_ TRIBUTARY_GUARDED_BY(mutex_) = false;     // by another coordinator: forms no group
  uint64_t last_number_ TRIBUTARY_GUARDED_BY(mutex_) = 0;  // of a command that was admitted
  // The epoch of the group that serves or forms; that of the last group while waiting.
  uint64_t epoch_ TRIBUTARY_GUARDED_BY(mutex_) = 0;
  uint64_t stored_ TRIBUTARY_GUARDED_BY(mutex_) = 0;  // the last epoch that the store was told
  Clock::time_point form_deadline_ TRIBUTARY_GUARDED_BY(mutex_);
  Clock::time_point abort_deadline_ TRIBUTARY_GUARDED_BY(mutex_);  // of workers that are aborting
  Clock::time_point form_not_before_ TRIBUTARY_GUARDED_BY(mutex_);
  int form_failures_ TRIBUTARY_GUARDED_BY(mutex_) = 0;  // in a row
  uint64_t leavings_ TRIBUTARY_GUARDED_BY(mutex_) = 0;
  std::deque<int> leaving_ TRIBUTARY_GUARDED_BY(mutex_);  // ranks; not yet told to the observer
  std::deque<std::string> broken_ TRIBUTARY_GUARDED_BY(mutex_);  // not yet told to the observer
  Clock::time_point next_heartbeat_ TRIBUTARY_GUARDED_BY(mutex_);
  Clock::time_point watch_until_ TRIBUTARY_GUARDED_BY(mutex_);

  // Changes under mutex_, and is read without it too.
  std::atomic<int> size_;
  int shard_ranks_ TRIBUTARY_GUARDED_BY(mutex_);          // as in Regrouping
  bool forms_once_ TRIBUTARY_GUARDED_BY(mutex_) = false;  // as in Regrouping
  bool has_formed_ TRIBUTARY_GUARDED_BY(mutex_) = false;  // and must not form again
  std::vector<RankState> ranks_ TRIBUTARY_GUARDED_BY(mutex_);
  std::map<Stream, Peer> peers_ TRIBUTARY_GUARDED_BY(mutex_);  // every stream that is not gone
  std::string exchange_ TRIBUTARY_GUARDED_BY(mutex_);          // what rank 0 said of it last
  std::map<std::string, std::string> rendezvous_ TRIBUTARY_GUARDED_BY(mutex_);
  // Which ranks wait for a key.
  std::map<std::string, std::vector<int>> rendezvous_waiters_ TRIBUTARY_GUARDED_BY(mutex_);
  std::map<uint64_t, Pending> pending_ TRIBUTARY_GUARDED_BY(mutex_);  // by number

  Completions completions_;
  std::thread former_;
  std::thread watch_;
};

}  // namespace tributary::service
