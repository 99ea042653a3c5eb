// Learns of every connection that breaks, at once and in any phase.
//
// Gloo tells a waiting thread that a connection broke, except in the midst of a message. The
// watcher holds a receive open on every connection, one that nothing ever answers, so it is told of
// every break, also between operations.
#pragma once

#include <gloo/transport/unbound_buffer.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <thread>

#include "base/sync/mutex.h"
#include "collective/gloo/gloo_mesh.h"
#include "collective/peers/group_place.h"
#include "kernels/status.h"

namespace tributary::collective {

// Owns the thread that watches. Ends with its owner, or when no connection is left.
class GlooWatcher {
 public:
  // `mesh` outlives the watcher. on_lost is called on the watcher's thread, without a lock, after
  // the peer was added to those that are lost.
  GlooWatcher(GlooMesh& mesh, const GroupPlace& place, std::function<void(int peer)> on_lost);
  ~GlooWatcher();
  GlooWatcher(const GlooWatcher&) = delete;
  GlooWatcher& operator=(const GlooWatcher&) = delete;

  // kUnavailable, which names every peer whose connection broke and why; OK while there is none.
  Status Health();

 private:
  void Watch();
  // False when the watcher is going away.
  bool SetWatch(gloo::transport::UnboundBuffer* watch);
  bool IsLost(int peer);
  void Lose(int peer, std::string why);

  GlooMesh& mesh_;
  const int rank_;
  const int size_;
  const uint64_t epoch_;
  const std::function<void(int peer)> on_lost_;

  Mutex mutex_;
  // Peers whose connection broke, and why.
  std::map<int, std::string> lost_ TRIBUTARY_GUARDED_BY(mutex_);
  // What the thread waits in, or null.
  gloo::transport::UnboundBuffer* watch_ TRIBUTARY_GUARDED_BY(mutex_) = nullptr;
  bool leaving_ TRIBUTARY_GUARDED_BY(mutex_) = false;

  std::thread thread_;  // last: it uses all of the above
};

}  // namespace tributary::collective
