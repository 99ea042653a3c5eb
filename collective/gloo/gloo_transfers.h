// One operation over Gloo: messages to and from peers, and how it ends when it cannot go on.
//
// Gloo's own collectives are not used: their rings multiply the latency, and their waits cannot be
// ended from outside.
#pragma once

#include <gloo/transport/unbound_buffer.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/sync/mutex.h"
#include "collective/communicator.h"
#include "collective/gloo/gloo_mesh.h"
#include "collective/gloo/gloo_watcher.h"
#include "collective/op.h"
#include "collective/peers/group_place.h"
#include "collective/peers/transfers.h"
#include "kernels/status.h"

namespace tributary::collective {

class GlooTransfers final : public Transfers {
 public:
  GlooTransfers(const GroupPlace& place, GlooMesh mesh);

  Status Run(Op op, size_t bytes, int root, const std::vector<Transfer>& transfers,
             Deadline deadline) override;
  void Abort(const std::string& reason) override;

 private:
  using Buffer = std::unique_ptr<gloo::transport::UnboundBuffer>;
  // A transfer under way. The memory belongs to the caller of the operation; when these buffers are
  // gone Gloo no longer touches it.
  struct Pending {
    int peer;
    Buffer send;  // nullptr when nothing is sent
    Buffer recv;
    bool received = false;
  };

  std::vector<Pending> CreateBuffers(const std::vector<Transfer>& transfers, size_t bytes);
  Status Begin(std::vector<Pending>* pending);
  static void Post(std::vector<Pending>& pending, uint64_t slot, int* waited_for);
  Status AwaitAll(std::vector<Pending>& pending, Deadline deadline, int* waited_for);
  Status End(Op op, std::vector<Pending>& pending, int waited_for, Status status,
             Deadline deadline);
  Status Explain(Op op, std::vector<Pending>& pending, int waited_for, const Status& status,
                 Deadline deadline) const;
  static bool Received(Pending& p);
  static bool Sent(Pending& p);
  static void EndWaits(Pending& p);
  // The watcher's call.
  void EndWaitsFor(int peer);
  // What the watcher says of a wait that was ended, which is kUnavailable also where it names
  // nobody: then Abort ended it.
  Status WhyEnded();

  const int rank_;
  const uint64_t epoch_;
  GlooMesh mesh_;
  uint64_t sequence_ = 0;  // of the next operation

  Mutex mutex_;
  Status error_ TRIBUTARY_GUARDED_BY(mutex_);  // the first one
  // Of the operation under way, or null.
  std::vector<Pending>* pending_ TRIBUTARY_GUARDED_BY(mutex_) = nullptr;

  GlooWatcher watcher_;  // last: its thread uses the above
};

}  // namespace tributary::collective
