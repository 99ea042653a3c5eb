#include "service/client/host_buffers.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/status/status_macros.h"
#include "service/client/offered_memory.h"
#include "tributary/v1/attention.pb.h"

namespace tributary::client {

struct HostBuffers::State {
  State(v1::AttentionService::Stub* stub, std::string path)
      : service_path(std::move(path)), registrar(stub) {}

  const std::string service_path;
  RegionRegistrar registrar;
  mutable Mutex mutex;
  bool closed TRIBUTARY_GUARDED_BY(mutex) = false;  // the stub is gone
  std::vector<std::weak_ptr<Buffer>> buffers TRIBUTARY_GUARDED_BY(mutex);
};

HostBuffers::HostBuffers(v1::AttentionService::Stub* stub, std::string service_path)
    : state_(std::make_shared<State>(stub, std::move(service_path))) {}

HostBuffers::~HostBuffers() {
  {
    const MutexLock lock(state_->mutex);
    state_->closed = true;
    state_->buffers.clear();
  }
  state_->registrar.AwaitNone();
}

absl::StatusOr<std::shared_ptr<SharedBuffer>> HostBuffers::Allocate(
    uint64_t bytes, std::chrono::system_clock::time_point deadline) {
  if (bytes == 0) return InvalidField("bytes", "must be > 0");
  const auto left = deadline - std::chrono::system_clock::now();
  TRIBUTARY_ASSIGN_OR_RETURN(
      OfferedMemory offered,
      OfferMemory(state_->service_path, bytes, std::chrono::steady_clock::now() + left));
  TRIBUTARY_RETURN_IF_ERROR(state_->registrar.RegisterNow(offered.request, deadline));
  offered.memory->Unlink();
  auto buffer = std::make_shared<Buffer>(state_, std::move(offered.memory));
  const MutexLock lock(state_->mutex);
  std::erase_if(state_->buffers, [](const std::weak_ptr<Buffer>& b) { return b.expired(); });
  state_->buffers.push_back(buffer);
  return buffer;
}

HostBuffers::BufferPtr HostBuffers::Find(const void* data, uint64_t bytes) const {
  const auto at = reinterpret_cast<uintptr_t>(data);
  std::vector<BufferPtr> looked_at;  // the last to hold one must not hold the lock
  const MutexLock lock(state_->mutex);
  for (const std::weak_ptr<Buffer>& known : state_->buffers) {
    const BufferPtr buffer = known.lock();
    if (buffer == nullptr) continue;
    looked_at.push_back(buffer);
    if (buffer->forgotten_) continue;
    const auto begin = reinterpret_cast<uintptr_t>(buffer->data());
    if (at < begin || bytes > buffer->bytes() || at - begin > buffer->bytes() - bytes) continue;
    return buffer;
  }
  return nullptr;
}

HostBuffers::Buffer::~Buffer() {
  const MutexLock lock(state_->mutex);
  if (!state_->closed) state_->registrar.Unregister(memory_->name());
}

}  // namespace tributary::client
