// The coordinator's view of its workers: one group that executes commands together.
//
// Two implementations: embedded (threads of this process) and remote (processes that register).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "worker/backend.h"
#include "worker/backends.h"
#include "worker/command.h"
#include "worker/holdings.h"

namespace tributary::service {

// What became of a command. `status` is the first error by rank, and OK when every rank succeeded.
// A rank that never answered leaves a default Reply.
struct Outcome {
  absl::Status status;
  std::vector<worker::Reply> replies;  // by rank
};

// Whether a rank's reply means that the ranks' states may differ from now on. The alternative is a
// refusal that is the same on every rank and leaves the group usable.
bool BreaksGroup(const absl::Status& reply);

// What CheckRegions returns for a group that takes no regions.
absl::Status NoRegions(absl::string_view why);
// What CheckDeviceSessions returns for a group that takes no such sessions.
absl::Status NoDeviceSessions(absl::string_view why);

struct Member {
  int rank = 0;
  std::string address;    // "embedded" or the peer's address
  std::string host;       // the name under which peers reach its machine; empty for "embedded"
  std::string backend;    // "cpu", "cuda"; empty while nobody holds the rank
  std::string build;      // the build of the worker's program; empty for "embedded"
  uint32_t protocol = 0;  // the version of worker.proto spoken with it; 0 for "embedded"
  bool connected = false;
  // The group counts on what this worker holds: it was set up, and it is not fresh if it leaves and
  // comes back.
  bool holds_shard = false;
  uint64_t memory_bytes = 0;
  double busy_seconds = 0;
};

// Is told of the group's generations, in one call at a time, from the group's own thread. While
// OnFormed runs the group accepts commands, and no command of an earlier generation is in flight.
class GroupObserver {
 public:
  virtual ~GroupObserver() = default;
  // The group goes on from an earlier life of the coordinator: [ranks], what each holds; nothing
  // for ranks that are fresh. Called before the first OnFormed, and once.
  virtual void OnAdopted(const std::vector<std::optional<worker::Holdings>>& held) {
    static_cast<void>(held);
  }
  // All ranks are connected under `epoch`. fresh[rank]: the rank is new and holds nothing.
  virtual void OnFormed(uint64_t epoch, const std::vector<bool>& fresh) = 0;
  // The group cannot execute; every command in flight has been or will be completed with kAborted.
  virtual void OnBroken(const std::string& reason) = 0;
  // A worker was told to stop while the group serves. If this returns true, it goes on executing
  // commands until it is let go (WorkerGroup::LetGo) or leaves by itself, and this is called again
  // when the group forms anew meanwhile. Otherwise it is let go when nothing is in flight.
  virtual bool OnLeaving(int rank) {
    static_cast<void>(rank);
    return false;
  }
  // How a session has come along on the workers. On any thread, one call at a time per session.
  virtual void OnSessionNews(const worker::SessionNews& news) { static_cast<void>(news); }
};

// Why the group is to form anew, and as what (WorkerGroup::Regroup).
struct Regrouping {
  int size = 1;         // N from now on
  int shard_ranks = 1;  // the shards that workers keep are dealt over so many ranks
  // The group forms once: when it breaks, or fails to form, it waits for another Regroup.
  bool once = false;
  std::string reason;  // what OnBroken is told
};

class WorkerGroup {
 public:
  using Done = std::function<void(Outcome)>;

  virtual ~WorkerGroup() = default;

  // Tells groups apart: drawn at random, and kept by a coordinator that keeps its state. Never 0.
  virtual uint64_t id() const = 0;
  // The number of ranks, N. It changes by Regroup only.
  virtual int size() const = 0;
  // What all its workers compute on; fixed by configuration.
  virtual worker::Device device() const = 0;
  // OK when its workers take OpenRegionCommand, or else kFailedPrecondition that names
  // CudaIpcMemory. Fixed by configuration.
  virtual absl::Status CheckRegions() const = 0;
  // OK when its workers take OpenSessionCommand, or else kFailedPrecondition that names
  // open.memory. Fixed by configuration.
  virtual absl::Status CheckDeviceSessions() const = 0;
  // Whether tensors of commands are handed to the system, to be sent. Fixed by configuration. They
  // are then not to lie in memory that a host shares: see GuardedMapping.
  virtual bool sends_tensors() const { return false; }
  // Pins memory that a host shares (MemoryPinner). It does so only where ranks are threads of this
  // process and compute on GPUs, because others have no use for that.
  virtual std::shared_ptr<const void> PinMemory(std::byte* data, size_t bytes) const {
    static_cast<void>(data), static_cast<void>(bytes);
    return nullptr;
  }
  // Forms the first group and keeps forming new ones until Stop. The observer outlives the group.
  virtual absl::Status Start(GroupObserver* observer) = 0;
  // Hands the command to every rank, in the order of calls, and calls `done` once, on any thread,
  // when all ranks replied, or the group broke (kAborted), or the command's deadline passed (which
  // breaks the group: ranks may have parted ways). The command stays alive until the last rank is
  // finished with it, which may be after `done`. A command of an earlier epoch completes with
  // kAborted at once.
  virtual void Submit(std::shared_ptr<const worker::Command> command, Done done) = 0;
  // Whether threads that wait for commands may be lent to it. Fixed by configuration.
  virtual bool borrows() const { return false; }
  // For a thread that waits for the outcome of a command which names it as its waiter. A group that
  // borrows is lent every such thread, as soon as the command has been submitted: the thread
  // carries out rank 0's commands in that rank's place, up to its own, so that two threads need not
  // be woken for it. Returns when `over` is true, or when another thread is at it; the caller then
  // waits as it would have. `over` must not block.
  virtual void Lend(const std::function<bool()>& over) { static_cast<void>(over); }
  // Likewise, for a thread that has something else to do than to wait, and has submitted to a group
  // that borrows a command that names it as its waiter: it carries out that command in rank 0's
  // place, if it is rank 0's next one and no other thread is at it, and then returns. It must call
  // this soon.
  virtual void LendOnce() {}
  virtual std::vector<Member> members() const = 0;
  // How the ranks' partials meet, for GetTopologyReply.exchange. On any thread.
  virtual std::string exchange() const { return ""; }
  // Lets a worker go that is leaving (GroupObserver::OnLeaving) when nothing is in flight; then the
  // group breaks. It changes nothing where the rank is not leaving.
  virtual void LetGo(int rank) { static_cast<void>(rank); }

  // OK when the number of ranks may change, or else kFailedPrecondition that says why not.
  virtual absl::Status CheckResize() const;
  // More workers than the group has may register from now on, up to `workers`. They are members,
  // and take no part until the group is formed anew with them. With size() nobody else may.
  virtual void Expect(int workers) { static_cast<void>(workers); }
  // Breaks the group, if it is not broken already, and forms it anew. The observer is told of one
  // break, with the reason given. What is in flight ends with kAborted. Workers of ranks
  // beyond the new size are sent away, and stand by.
  virtual void Regroup(const Regrouping& regrouping) { static_cast<void>(regrouping); }

  // Waits until the commands in flight have ended, at most until their deadlines, and lets the
  // workers go.
  virtual void Stop() = 0;
};

}  // namespace tributary::service
