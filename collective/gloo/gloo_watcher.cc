#include "collective/gloo/gloo_watcher.h"

#include <exception>
#include <memory>
#include <utility>

#include "collective/gloo/gloo_slot.h"
#include "collective/peers/transfers.h"

namespace tributary::collective {

GlooWatcher::GlooWatcher(GlooMesh& mesh, const GroupPlace& place,
                         std::function<void(int peer)> on_lost)
    : mesh_(mesh),
      rank_(place.rank),
      size_(place.size),
      epoch_(place.epoch),
      on_lost_(std::move(on_lost)),
      thread_([this] { Watch(); }) {}

GlooWatcher::~GlooWatcher() {
  {
    const MutexLock lock(mutex_);
    leaving_ = true;
    if (watch_ != nullptr) watch_->abortWaitRecv();
  }
  thread_.join();
}

Status GlooWatcher::Health() {
  const MutexLock lock(mutex_);
  return lost_.empty() ? Status::Ok() : LostPeers(lost_);
}

void GlooWatcher::Watch() {
  const uint64_t slot = WatchSlot(epoch_);
  while (true) {
    std::unique_ptr<gloo::transport::UnboundBuffer> watch =
        mesh_.context->createUnboundBuffer(nullptr, 0);
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

bool GlooWatcher::SetWatch(gloo::transport::UnboundBuffer* watch) {
  const MutexLock lock(mutex_);
  watch_ = leaving_ ? nullptr : watch;
  return !leaving_;
}

bool GlooWatcher::IsLost(int peer) {
  const MutexLock lock(mutex_);
  return lost_.count(peer) > 0;
}

void GlooWatcher::Lose(int peer, std::string why) {
  {
    const MutexLock lock(mutex_);
    lost_[peer] = std::move(why);
  }
  on_lost_(peer);
}

}  // namespace tributary::collective
