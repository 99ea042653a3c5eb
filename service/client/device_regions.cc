#include "service/client/device_regions.h"

#include <utility>
#include <vector>

#include "base/sync/mutex.h"
#include "service/client/retry.h"
#include "service/client/shared_region.h"

namespace tributary::client {
namespace {

v1::RegisterSharedMemoryRequest RegistrationOf(const DeviceRegion& region,
                                               const SharedRegion& life) {
  const DeviceMemory& memory = region.memory();
  v1::RegisterSharedMemoryRequest request;
  request.set_name(region.name());
  request.set_byte_size(memory.bytes);
  v1::CudaIpcMemory& cuda = *request.mutable_cuda_ipc();
  cuda.set_raw_handle(memory.ipc_handle);
  cuda.set_device_uuid(memory.gpu);
  cuda.set_offset(memory.offset);
  cuda.set_owner_key(life.key());
  return request;
}

}  // namespace

struct DeviceRegions::Sharing {
  mutable Mutex mutex;
  mutable CondVar changed;
  // Empty files whose locks tell the service that this process lives: one file per registration.
  // All are kept, because the service goes on looking at the one that it was told first.
  std::vector<std::shared_ptr<SharedRegion>> lives TRIBUTARY_GUARDED_BY(mutex);
  int registration TRIBUTARY_GUARDED_BY(mutex) = 0;
  bool renewing TRIBUTARY_GUARDED_BY(mutex) = false;
  bool closed TRIBUTARY_GUARDED_BY(mutex) = false;
};

class DeviceRegions::Shared final : public DeviceRegion {
 public:
  Shared(const DeviceRegions* owner, DeviceMemory memory, std::shared_ptr<SharedRegion> life)
      : owner_(owner),
        name_(life->name()),
        memory_(std::move(memory)),
        sharing_(std::make_shared<Sharing>()) {
    const MutexLock lock(sharing_->mutex);
    sharing_->lives.push_back(std::move(life));
  }

  const std::string& name() const override { return name_; }
  const DeviceMemory& memory() const override { return memory_; }
  const DeviceRegions* owner() const { return owner_; }
  const std::shared_ptr<Sharing>& sharing() const { return sharing_; }

 private:
  const DeviceRegions* const owner_;
  const std::string name_;
  const DeviceMemory memory_;
  const std::shared_ptr<Sharing> sharing_;
};

std::shared_ptr<DeviceRegions::Sharing> DeviceRegions::SharingOf(const DeviceRegion& region) const {
  const auto* const shared = dynamic_cast<const Shared*>(&region);
  return shared != nullptr && shared->owner() == this ? shared->sharing() : nullptr;
}

absl::StatusOr<std::shared_ptr<const DeviceRegion>> DeviceRegions::Describe(
    const DeviceMemory& memory) const {
  absl::StatusOr<std::unique_ptr<SharedRegion>> life = SharedRegion::Create(1);
  if (!life.ok()) return life.status();
  return std::make_shared<const Shared>(this, memory, *std::move(life));
}

absl::Status DeviceRegions::Register(const DeviceRegion& region,
                                     std::chrono::system_clock::time_point deadline) {
  const std::shared_ptr<Sharing> sharing = SharingOf(region);
  std::shared_ptr<SharedRegion> life;
  {
    const MutexLock lock(sharing->mutex);
    life = sharing->lives.front();
  }
  absl::Status status = registrar_.RegisterNow(RegistrationOf(region, *life), deadline);
  if (status.ok()) life->Unlink();
  return status;
}

void DeviceRegions::Close(const DeviceRegion& region) {
  const std::shared_ptr<Sharing> sharing = SharingOf(region);
  if (sharing == nullptr) return;
  const MutexLock lock(sharing->mutex);
  sharing->closed = true;
  // This ends, because the RPC that renews has a deadline.
  while (sharing->renewing) sharing->changed.Wait(sharing->mutex);
}

std::optional<int> DeviceRegions::Registration(const DeviceRegion& region) const {
  const std::shared_ptr<Sharing> sharing = SharingOf(region);
  if (sharing == nullptr) return 0;
  const MutexLock lock(sharing->mutex);
  if (sharing->renewing) return std::nullopt;
  return sharing->registration;
}

int DeviceRegions::AwaitRegistration(const DeviceRegion& region,
                                     std::chrono::steady_clock::time_point deadline) const {
  const std::shared_ptr<Sharing> sharing = SharingOf(region);
  if (sharing == nullptr) return 0;
  const MutexLock lock(sharing->mutex);
  while (sharing->renewing) {
    if (!sharing->changed.WaitUntil(sharing->mutex, deadline)) break;
  }
  return sharing->registration;
}

void DeviceRegions::Renew(const DeviceRegion& region, int forgotten) {
  const std::shared_ptr<Sharing> sharing = SharingOf(region);
  if (sharing == nullptr) return;
  {
    const MutexLock lock(sharing->mutex);
    if (sharing->closed || sharing->renewing || sharing->registration != forgotten) return;
    sharing->renewing = true;
  }
  const auto finish = [sharing](std::shared_ptr<SharedRegion> life, const absl::Status& status) {
    const MutexLock lock(sharing->mutex);
    sharing->renewing = false;
    if (status.ok()) ++sharing->registration;
    // After an answer that was lost, the service may be looking at it.
    if (status.ok() || IsOutcomeUnknown(status)) sharing->lives.push_back(std::move(life));
    sharing->changed.NotifyAll();
  };
  // The name of the one before is gone, so that nothing is left behind when this process dies.
  absl::StatusOr<std::unique_ptr<SharedRegion>> created = SharedRegion::Create(1);
  if (!created.ok()) return finish(nullptr, created.status());
  std::shared_ptr<SharedRegion> life = *std::move(created);
  registrar_.Register(RegistrationOf(region, *life), [life, finish](const absl::Status& status) {
    life->Unlink();
    finish(life, status);
  });
}

}  // namespace tributary::client
