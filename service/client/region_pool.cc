#include "service/client/region_pool.h"

#include <utility>

#include "base/status/status_macros.h"
#include "base/sync/mutex.h"
#include "service/client/offered_memory.h"
#include "service/client/offset_allocator.h"
#include "service/client/region_registrar.h"
#include "service/client/shared_region.h"

namespace tributary::client {
namespace {

// After a registration that failed: tensors travel in messages meanwhile.
constexpr std::chrono::seconds kRenewalPause{1};

// The thread that hands a renewal's memory over has other calls to send, so it must not wait long.
constexpr std::chrono::milliseconds kHandOverTime{500};

}  // namespace

// A registered region and who holds what of it.
class RegionPool::Region {
 public:
  Region(std::shared_ptr<SharedRegion> memory, std::shared_ptr<RegionRegistrar> registrar)
      : memory_(std::move(memory)), registrar_(std::move(registrar)), room_(memory_->size()) {}
  ~Region() { registrar_->Unregister(memory_->name()); }

  const SharedRegion& memory() const { return *memory_; }
  std::optional<uint64_t> Allocate(uint64_t bytes) {
    const MutexLock lock(mutex_);
    return room_.Allocate(bytes);
  }
  void Free(uint64_t offset, uint64_t bytes) {
    const MutexLock lock(mutex_);
    room_.Free(offset, bytes);
  }

 private:
  const std::shared_ptr<SharedRegion> memory_;
  const std::shared_ptr<RegionRegistrar> registrar_;
  Mutex mutex_;
  OffsetAllocator room_ TRIBUTARY_GUARDED_BY(mutex_);
};

RegionPool::Slot::Slot(std::shared_ptr<Region> region, uint64_t offset, uint64_t bytes)
    : region_(std::move(region)), offset_(offset), bytes_(bytes) {}
RegionPool::Slot::Slot(Slot&& other) noexcept = default;
RegionPool::Slot& RegionPool::Slot::operator=(Slot&& other) noexcept {
  std::swap(region_, other.region_);
  std::swap(offset_, other.offset_);
  std::swap(bytes_, other.bytes_);
  return *this;
}
RegionPool::Slot::~Slot() {
  if (region_ != nullptr) region_->Free(offset_, bytes_);
}
std::byte* RegionPool::Slot::data() const { return region_->memory().data() + offset_; }
const std::string& RegionPool::Slot::region() const { return region_->memory().name(); }

RegionPool::RegionPool(v1::AttentionService::Stub* stub, uint64_t size, std::string service_path)
    : size_(size),
      service_path_(std::move(service_path)),
      registrar_(std::make_shared<RegionRegistrar>(stub)) {}

RegionPool::~RegionPool() {
  // A renewal under way may still install its region.
  registrar_->AwaitNone();
  std::shared_ptr<Region> last;
  {
    const MutexLock lock(mutex_);
    last = std::move(current_);
  }
  last.reset();
  registrar_->AwaitNone();
}

absl::Status RegionPool::Start(std::chrono::system_clock::time_point deadline) {
  if (size_ == 0) return absl::OkStatus();
  const auto left = deadline - std::chrono::system_clock::now();
  TRIBUTARY_ASSIGN_OR_RETURN(
      OfferedMemory made,
      OfferMemory(service_path_, size_, std::chrono::steady_clock::now() + left));
  TRIBUTARY_RETURN_IF_ERROR(registrar_->RegisterNow(made.request, deadline));
  made.memory->Unlink();
  const MutexLock lock(mutex_);
  current_ = std::make_shared<Region>(std::move(made.memory), registrar_);
  return absl::OkStatus();
}

std::optional<RegionPool::Slot> RegionPool::Acquire(uint64_t bytes, bool* coming) {
  *coming = false;
  if (size_ == 0) return std::nullopt;
  std::shared_ptr<Region> region;
  {
    const MutexLock lock(mutex_);
    region = current_;
    *coming = region == nullptr && !refused_;
  }
  if (region == nullptr) {
    Renew();
    return std::nullopt;
  }
  const std::optional<uint64_t> offset = region->Allocate(bytes);
  if (!offset.has_value()) return std::nullopt;
  return Slot(std::move(region), *offset, bytes);
}

void RegionPool::Retire(const Slot& slot) {
  // The slot keeps the region, so that no RPC is begun here.
  const MutexLock lock(mutex_);
  if (current_ == slot.region_) current_.reset();
}

void RegionPool::Renew() {
  {
    const MutexLock lock(mutex_);
    const bool early = std::chrono::steady_clock::now() < next_renewal_;
    if (renewing_ || current_ != nullptr || early) return;
    renewing_ = true;
  }
  absl::StatusOr<OfferedMemory> made =
      OfferMemory(service_path_, size_, std::chrono::steady_clock::now() + kHandOverTime);
  if (!made.ok()) return FinishRenewal(nullptr, /*refused=*/true);
  std::shared_ptr<SharedRegion> memory = std::move(made->memory);
  registrar_->Register(std::move(made->request), [this, memory](const absl::Status& status) {
    memory->Unlink();
    const bool later = absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status);
    FinishRenewal(status.ok() ? std::make_shared<Region>(memory, registrar_) : nullptr,
                  !status.ok() && !later);
  });
}

void RegionPool::FinishRenewal(std::shared_ptr<Region> region, bool refused) {
  const MutexLock lock(mutex_);
  refused_ = refused;
  renewing_ = false;
  if (region == nullptr) next_renewal_ = std::chrono::steady_clock::now() + kRenewalPause;
  current_ = std::move(region);
}

}  // namespace tributary::client
