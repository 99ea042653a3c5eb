// The coordinator's view of its workers: one group that executes commands together.
//
// Two implementations: embedded (threads of this process) and remote (processes that register).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "worker/backends.h"
#include "worker/command.h"

namespace tributary::service {

// What came of a command. `status` is the first error by rank, OK when every rank succeeded. A rank
// that never answered leaves a default Reply.
struct Outcome {
  absl::Status status;
  std::vector<worker::Reply> replies;  // by rank
};

// Whether a rank's reply means that ranks may have parted ways, as opposed to a refusal that is the
// same everywhere and leaves the group usable.
bool BreaksGroup(const absl::Status& reply);

// What CheckRegions says of a group that takes none.
absl::Status NoRegions(absl::string_view why);

struct Member {
  int rank = 0;
  std::string address;  // "embedded" or the peer's address
  std::string backend;  // "cpu", "cuda"; empty while nobody holds the rank
  bool connected = false;
  // The group counts on what this worker holds: it was set up and, should it leave and come back,
  // is not fresh.
  bool holds_shard = false;
  uint64_t memory_bytes = 0;
  double busy_seconds = 0;
};

// Told of the group's generations, one call at a time, from the group's own thread. While OnFormed
// runs the group accepts commands but nothing is in flight from before.
class GroupObserver {
 public:
  virtual ~GroupObserver() = default;
  // All ranks are connected under `epoch`. fresh[rank]: the rank holds nothing (it is new).
  virtual void OnFormed(uint64_t epoch, const std::vector<bool>& fresh) = 0;
  // The group cannot execute; every command in flight has been or will be completed with kAborted.
  virtual void OnBroken(const std::string& reason) = 0;
};

class WorkerGroup {
 public:
  using Done = std::function<void(Outcome)>;

  virtual ~WorkerGroup() = default;

  // N; fixed by configuration.
  virtual int size() const = 0;
  // What all its workers compute on; fixed by configuration.
  virtual worker::Device device() const = 0;
  // Whether its workers take OpenRegionCommand; fixed by configuration. kFailedPrecondition naming
  // CudaIpcMemory otherwise.
  virtual absl::Status CheckRegions() const = 0;
  // Forms the first group and keeps forming new ones until Stop. The observer outlives the group.
  virtual absl::Status Start(GroupObserver* observer) = 0;
  // Hands the command to every rank, in the order of calls, and calls `done` once, on any thread,
  // when all ranks replied, or the group broke (kAborted), or the command's deadline passed (which
  // breaks the group: ranks may have parted ways). The command stays alive until the last rank is
  // finished with it, which may be after `done`. A command of an epoch gone by completes with
  // kAborted at once.
  virtual void Submit(std::shared_ptr<const worker::Command> command, Done done) = 0;
  virtual std::vector<Member> members() const = 0;
  // Waits for what is in flight, at most until their deadlines, and lets the workers go.
  virtual void Stop() = 0;
};

}  // namespace tributary::service
