#include "service/data/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status/errors.h"
#include "base/status/rpc_errors.h"
#include "base/status/status_macros.h"
#include "service/data/file_memory.h"
#include "worker/opened_regions.h"

namespace tributary::service {

// An open POSIX object, or a memfd.
//
// A client that dies unregisters nothing. So it holds a lock on an object (fcntl, of any kind) for
// as long as it lives: the system lets go of it however a process ends. A region whose object was
// locked when it was registered and is no longer is forgotten a second later, or when the next one
// is registered. Regions whose objects were never locked stay until they are unregistered.
class SharedMemoryRegistry::Object {
 public:
  // `key` is the name that it has in the registry.
  Object(std::string key, Descriptor file)
      : key_(std::move(key)), file_(std::move(file)), had_owner_(SomebodyHoldsLock()) {}
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;

  // `field` is where the request named the key.
  static absl::StatusOr<std::shared_ptr<Object>> OpenPosix(const std::string& key,
                                                           absl::string_view field) {
    Descriptor file(shm_open(key.c_str(), O_RDWR, 0));
    if (file.open()) return std::make_shared<Object>(key, std::move(file));
    const int error = errno;
    if (error == ENOENT) return NotFound("shared memory object", key, field);
    const absl::StatusCode code =
        error == EACCES ? absl::StatusCode::kPermissionDenied : absl::StatusCode::kInvalidArgument;
    return FieldError(code, field, absl::StrCat("cannot open '", key, "': ", std::strerror(error)));
  }

  const std::string& key() const { return key_; }
  int fd() const { return file_.get(); }
  // Whether it was locked when it was opened, and whether it was and no longer is.
  bool had_owner() const { return had_owner_; }
  bool OwnerIsGone() const { return had_owner_ && !SomebodyHoldsLock(); }
  bool ReachesTo(uint64_t bytes) const {
    struct stat info;
    return fstat(fd(), &info) == 0 && info.st_size >= 0 &&
           static_cast<uint64_t>(info.st_size) >= bytes;
  }
  // How much of the machine's memory the object has taken already.
  uint64_t BytesHeld() const {
    struct stat info;
    return fstat(fd(), &info) == 0 ? static_cast<uint64_t>(info.st_blocks) * 512 : 0;
  }

 private:
  bool SomebodyHoldsLock() const {
    struct flock lock {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    return fcntl(fd(), F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
  }

  const std::string key_;
  const Descriptor file_;
  const bool had_owner_;
};

// A part of an object, mapped. The object stays open: its size is asked for at every use. That
// finds most objects that their owners have cut short; GuardedMapping finds the others.
class SharedMemoryRegistry::Mapping {
 public:
  Mapping(std::shared_ptr<const Object> object, uint64_t offset, uint64_t size)
      : object_(std::move(object)), offset_(offset), size_(size) {}

  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  // `available`: bytes that the machine would still give.
  absl::Status Map(const std::function<size_t()>& available, const MemoryPinner& pinner) {
    if (!Whole()) {
      return InvalidField("byte_size", absl::StrCat("the object '", object_->key(),
                                                    "' ends before ", offset_, " + ", size_));
    }
    // All of it is taken now: the owner is told here, and not by a call, that there is not enough.
    const uint64_t held = object_->BytesHeld();
    const absl::Status taken =
        TakeFileMemory(object_->fd(), offset_, size_, size_ - std::min(size_, held), available);
    if (!taken.ok()) return CannotTake(taken.message());
    // From the start of the object: an offset need not be a multiple of the machine's page.
    memory_ = GuardedMapping::Create(object_->fd(), offset_ + size_);
    if (memory_ == nullptr) {
      return absl::InternalError(
          absl::StrCat("cannot map '", object_->key(), "': ", std::strerror(errno)));
    }
    memory_->Pin(pinner, offset_);
    return absl::OkStatus();
  }

  bool Same(const std::string& key, uint64_t offset, uint64_t size) const {
    return object_->key() == key && offset_ == offset && size_ == size;
  }
  // Whether the object still reaches to the region's end.
  bool Whole() const { return object_->ReachesTo(offset_ + size_); }
  // Once it is mapped.
  const GuardedMapping& memory() const { return *memory_; }
  std::byte* data() const { return memory_->data() + offset_; }
  uint64_t size() const { return size_; }

 private:
  absl::Status CannotTake(absl::string_view why) const {
    return FieldError(
        absl::StatusCode::kResourceExhausted, "byte_size",
        absl::StrCat("cannot take ", size_, " bytes of '", object_->key(), "': ", why));
  }

  const std::shared_ptr<const Object> object_;
  const uint64_t offset_;
  const uint64_t size_;
  std::unique_ptr<GuardedMapping> memory_;
};

namespace {

absl::Status NoRegion(absl::string_view name, absl::string_view field) {
  return NotFound("shared memory region", name, absl::StrCat(field, ".shared_memory.region"));
}

absl::Status CheckInside(uint64_t offset, uint64_t bytes, uint64_t size, absl::string_view field) {
  if (offset <= size && bytes <= size - offset) return absl::OkStatus();
  return InvalidField(absl::StrCat(field, ".shared_memory.offset"),
                      absl::StrCat(bytes, " bytes at ", offset, " leave the region of ", size));
}

absl::StatusOr<RegionBytes> OfDevice(const RegisteredRegionPtr& device, uint64_t offset,
                                     uint64_t bytes, absl::string_view field) {
  TRIBUTARY_RETURN_IF_ERROR(CheckInside(offset, bytes, device->memory.bytes, field));
  if (offset % worker::kRegionAlignment != 0) {
    return InvalidField(
        absl::StrCat(field, ".shared_memory.offset"),
        absl::StrCat("must be a multiple of ", worker::kRegionAlignment, " in memory of a GPU"));
  }
  return RegionBytes{.device = device, .part = {device->id, offset, bytes}};
}

absl::Status CutShort(absl::string_view field) {
  return InvalidField(absl::StrCat(field, ".shared_memory.region"),
                      "the shared memory object has been cut short");
}

// Whether a POSIX object may have this name.
absl::Status CheckKeyForm(absl::string_view field, const std::string& key) {
  if (key.size() < 2 || key[0] != '/' || key.find('/', 1) != std::string::npos ||
      key.find('\0') != std::string::npos) {
    return InvalidField(field, "must be '/' and a name without further '/'");
  }
  return absl::OkStatus();
}

// Whether the operator lets hosts name the object.
absl::Status CheckAllowed(absl::string_view field, const std::string& key,
                          const std::vector<std::string>& prefixes) {
  if (std::any_of(prefixes.begin(), prefixes.end(),
                  [&](const auto& prefix) { return absl::StartsWith(key, prefix); })) {
    return absl::OkStatus();
  }
  return FieldError(
      absl::StatusCode::kPermissionDenied, field,
      prefixes.empty()
          ? std::string("the service opens no POSIX objects by name (--shared_memory_prefixes): "
                        "share memory over its Unix socket (memfd)")
          : absl::StrCat("'", key, "' must begin with ", absl::StrJoin(prefixes, " or ")));
}

// Whether a memfd stays as long as it is, and may be written to.
absl::Status CheckSeals(int file) {
  const int seals = fcntl(file, F_GET_SEALS);
  if (seals < 0) return InvalidField("memfd.secret", "what was handed over is no memfd");
  if ((seals & F_SEAL_SHRINK) == 0) {
    return InvalidField("memfd.secret", "the memfd must be sealed with F_SEAL_SHRINK");
  }
  if ((seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE)) != 0) {
    return InvalidField("memfd.secret", "the memfd must not be sealed against writing");
  }
  return absl::OkStatus();
}

absl::Status NoDeposit() {
  return FieldError(absl::StatusCode::kNotFound, "memfd.secret",
                    "no memory waits under this secret: hand it over at the service's companion "
                    "socket first, at most 10 s before");
}

absl::Status RegisteredOtherwise(absl::string_view name) {
  return Conflict("name", absl::StrCat("region '", name, "' is registered otherwise"));
}

}  // namespace

SharedMemoryRegistry::SharedMemoryRegistry(std::vector<std::string> prefixes,
                                           std::function<size_t()> available, MemoryPinner pinner)
    : prefixes_(std::move(prefixes)),
      available_(std::move(available)),
      pinner_(std::move(pinner)) {}

SharedMemoryRegistry::~SharedMemoryRegistry() = default;

absl::Status CheckName(absl::string_view field, absl::string_view name) {
  if (name.empty() || name.size() > 128) {
    return InvalidField(field, absl::StrCat("must have 1 to 128 characters, has ", name.size()));
  }
  for (const char c : name) {
    if (!absl::ascii_isalnum(c) && c != '.' && c != '_' && c != '-') {
      return InvalidField(field, "may only contain A-Z, a-z, 0-9, '.', '_' and '-'");
    }
  }
  return absl::OkStatus();
}

template <typename Open>
absl::Status SharedMemoryRegistry::Register(const std::string& name, absl::string_view kind,
                                            const std::string& key, uint64_t offset,
                                            uint64_t byte_size, Open open) {
  if (byte_size == 0) return InvalidField("byte_size", "must be > 0");
  if (offset + byte_size < offset) {
    return InvalidField(absl::StrCat(kind, ".offset"), "offset + byte_size leaves 64 bits");
  }
  const auto registered = [&](const Region& region) {
    const auto& mapping = region.mapping;
    if (mapping != nullptr && mapping->Same(key, offset, byte_size)) return absl::OkStatus();
    return RegisteredOtherwise(name);
  };
  {
    const MutexLock lock(mutex_);
    if (const auto it = regions_.find(name); it != regions_.end()) return registered(it->second);
  }
  // Without the lock: to take the memory of a large object takes a while.
  TRIBUTARY_ASSIGN_OR_RETURN(std::shared_ptr<Object> object, open());
  auto mapping = std::make_shared<Mapping>(object, offset, byte_size);
  TRIBUTARY_RETURN_IF_ERROR(mapping->Map(available_, pinner_));
  const MutexLock lock(mutex_);
  const auto [it, added] =
      regions_.try_emplace(name, Region{.mapping = std::move(mapping), .owner = std::move(object)});
  return added ? absl::OkStatus() : registered(it->second);
}

absl::Status SharedMemoryRegistry::RegisterMemfd(const std::string& name, Descriptor memory,
                                                 const std::string& registration, uint64_t offset,
                                                 uint64_t byte_size) {
  TRIBUTARY_RETURN_IF_ERROR(CheckName("name", name));
  const std::string key = absl::StrCat("memfd:", absl::BytesToHexString(registration));
  return Register(name, "memfd", key, offset, byte_size,
                  [&]() -> absl::StatusOr<std::shared_ptr<Object>> {
                    if (!memory.open()) return NoDeposit();
                    TRIBUTARY_RETURN_IF_ERROR(CheckSeals(memory.get()));
                    return std::make_shared<Object>(key, std::move(memory));
                  });
}

absl::Status SharedMemoryRegistry::RegisterSystem(const std::string& name, const std::string& key,
                                                  uint64_t offset, uint64_t byte_size) {
  TRIBUTARY_RETURN_IF_ERROR(CheckName("name", name));
  TRIBUTARY_RETURN_IF_ERROR(CheckKeyForm("system.key", key));
  TRIBUTARY_RETURN_IF_ERROR(CheckAllowed("system.key", key, prefixes_));
  return Register(name, "system", key, offset, byte_size,
                  [&] { return Object::OpenPosix(key, "system.key"); });
}

absl::StatusOr<RegisteredRegionPtr> SharedMemoryRegistry::RegisterDevice(
    const std::string& name, const worker::SharedDeviceMemory& memory,
    const std::string& owner_key) {
  TRIBUTARY_RETURN_IF_ERROR(CheckName("name", name));
  TRIBUTARY_RETURN_IF_ERROR(worker::CheckSharedDeviceMemory(memory));
  std::shared_ptr<Object> owner;
  if (!owner_key.empty()) {
    TRIBUTARY_RETURN_IF_ERROR(CheckKeyForm("cuda_ipc.owner_key", owner_key));
    // It is opened for its lock alone, and never mapped.
    if (!prefixes_.empty()) {
      TRIBUTARY_RETURN_IF_ERROR(CheckAllowed("cuda_ipc.owner_key", owner_key, prefixes_));
    }
    TRIBUTARY_ASSIGN_OR_RETURN(owner, Object::OpenPosix(owner_key, "cuda_ipc.owner_key"));
    if (!owner->had_owner()) {
      return InvalidField("cuda_ipc.owner_key",
                          absl::StrCat("nobody holds a lock on '", owner_key, "'"));
    }
  }
  const MutexLock lock(mutex_);
  if (const auto it = regions_.find(name); it != regions_.end()) {
    const RegisteredRegionPtr& device = it->second.device;
    if (device != nullptr && device->memory == memory) return device;
    return RegisteredOtherwise(name);
  }
  auto device = std::make_shared<RegisteredRegion>(next_id_++, name, memory);
  regions_.emplace(name, Region{.device = device, .owner = std::move(owner)});
  return device;
}

absl::StatusOr<RegisteredRegionPtr> SharedMemoryRegistry::Unregister(const std::string& name) {
  Region region;  // unmapped when the lock is free again
  const MutexLock lock(mutex_);
  const auto it = regions_.find(name);
  if (it == regions_.end()) return NotFound("shared memory region", name, "name");
  region = std::move(it->second);
  regions_.erase(it);
  return region.device;
}

void SharedMemoryRegistry::Forget(const RegisteredRegionPtr& region) {
  const MutexLock lock(mutex_);
  const auto it = regions_.find(region->name);
  if (it != regions_.end() && it->second.device == region) regions_.erase(it);
}

RegisteredRegionPtr SharedMemoryRegistry::FindDevice(const std::string& name) const {
  const MutexLock lock(mutex_);
  const auto it = regions_.find(name);
  return it == regions_.end() ? nullptr : it->second.device;
}

bool SharedMemoryRegistry::HasOwners() const {
  const MutexLock lock(mutex_);
  return std::any_of(regions_.begin(), regions_.end(), [](const auto& region) {
    const auto& owner = region.second.owner;
    return owner != nullptr && owner->had_owner();
  });
}

std::vector<RegisteredRegionPtr> SharedMemoryRegistry::ForgetOwnerless() {
  std::vector<Region> ownerless;  // unmapped when the lock is free again
  std::vector<RegisteredRegionPtr> devices;
  const MutexLock lock(mutex_);
  for (auto it = regions_.begin(); it != regions_.end();) {
    const auto region = it++;
    const auto& owner = region->second.owner;
    if (owner == nullptr || !owner->OwnerIsGone()) continue;
    if (region->second.device != nullptr) devices.push_back(region->second.device);
    ownerless.push_back(std::move(region->second));
    regions_.erase(region);
  }
  return devices;
}

absl::StatusOr<RegionBytes> SharedMemoryRegistry::Find(const std::string& name, uint64_t offset,
                                                       uint64_t bytes,
                                                       absl::string_view field) const {
  std::shared_ptr<const Mapping> mapping;
  {
    const MutexLock lock(mutex_);
    const auto it = regions_.find(name);
    if (it == regions_.end()) return NoRegion(name, field);
    if (it->second.device != nullptr) return OfDevice(it->second.device, offset, bytes, field);
    mapping = it->second.mapping;
  }
  TRIBUTARY_RETURN_IF_ERROR(CheckInside(offset, bytes, mapping->size(), field));
  RegionBytes found{.data = mapping->data() + offset,
                    .pinned = mapping->memory().pinned(),
                    .owner = std::shared_ptr<const GuardedMapping>(mapping, &mapping->memory())};
  TRIBUTARY_RETURN_IF_ERROR(CheckWhole(found.owner.get(), field));
  if (!mapping->Whole()) return CutShort(field);
  return found;
}

absl::Status NotOnThisMachine(absl::string_view field) {
  return FieldError(absl::StatusCode::kPermissionDenied, field,
                    "shared memory is for callers on this machine: those that come through a Unix "
                    "socket or over loopback");
}

absl::Status CheckWhole(const GuardedMapping* memory, absl::string_view field) {
  return memory == nullptr || !memory->cut_short() ? absl::OkStatus() : CutShort(field);
}

}  // namespace tributary::service
