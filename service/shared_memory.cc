#include "service/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "service/errors.h"
#include "worker/errors.h"

namespace tributary::service {
namespace {

// A client that dies unregisters nothing. So it holds a lock on its object (fcntl, of any kind) for
// as long as it lives: the system lets go of it however a process ends. A region whose object was
// locked when it was registered and is no longer is forgotten when the next one is registered.
// Objects that were never locked stay until they are unregistered.
template <typename Regions>
std::vector<typename Regions::mapped_type> TakeOwnerless(Regions* regions) {
  std::vector<typename Regions::mapped_type> taken;
  for (auto it = regions->begin(); it != regions->end();) {
    const auto region = it++;
    if (!region->second->OwnerIsGone()) continue;
    taken.push_back(std::move(region->second));
    regions->erase(region);
  }
  return taken;
}

}  // namespace

// A mapping of one object. The file stays open: its size is asked for at every use, because reading
// beyond the end of an object that its owner has cut short kills the process.
class SharedMemoryRegistry::Region {
 public:
  Region(std::string key, uint64_t offset, uint64_t size)
      : key_(std::move(key)), offset_(offset), size_(size) {}
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region() {
    if (base_ != MAP_FAILED) munmap(base_, offset_ + size_);
    if (fd_ >= 0) close(fd_);
  }

  absl::Status Map() {
    fd_ = shm_open(key_.c_str(), O_RDWR, 0);
    if (fd_ < 0) return OpenError(errno);
    if (!Whole()) {
      return worker::InvalidField(
          "byte_size", absl::StrCat("the object '", key_, "' ends before ", offset_, " + ", size_));
    }
    // From the start of the object: an offset need not be a multiple of the machine's page.
    base_ = mmap(nullptr, offset_ + size_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    if (base_ == MAP_FAILED) {
      return absl::InternalError(absl::StrCat("cannot map '", key_, "': ", std::strerror(errno)));
    }
    had_owner_ = SomebodyHoldsLock();
    return absl::OkStatus();
  }

  // Whether the object was locked when it was mapped, and no longer is.
  bool OwnerIsGone() const { return had_owner_ && !SomebodyHoldsLock(); }

  bool Same(const std::string& key, uint64_t offset, uint64_t size) const {
    return key_ == key && offset_ == offset && size_ == size;
  }
  // Whether the object still reaches to the region's end.
  bool Whole() const {
    struct stat info;
    return fstat(fd_, &info) == 0 && info.st_size >= 0 &&
           static_cast<uint64_t>(info.st_size) >= offset_ + size_;
  }
  std::byte* data() const { return static_cast<std::byte*>(base_) + offset_; }
  uint64_t size() const { return size_; }

 private:
  bool SomebodyHoldsLock() const {
    struct flock lock {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    return fcntl(fd_, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
  }
  absl::Status OpenError(int error) const {
    if (error == ENOENT) return NotFound("shared memory object", key_, "system.key");
    const absl::StatusCode code =
        error == EACCES ? absl::StatusCode::kPermissionDenied : absl::StatusCode::kInvalidArgument;
    return worker::FieldError(code, "system.key",
                              absl::StrCat("cannot open '", key_, "': ", std::strerror(error)));
  }

  const std::string key_;
  const uint64_t offset_;
  const uint64_t size_;
  int fd_ = -1;
  void* base_ = MAP_FAILED;
  bool had_owner_ = false;
};

absl::Status CheckName(absl::string_view field, absl::string_view name) {
  if (name.empty() || name.size() > 128) {
    return worker::InvalidField(field,
                                absl::StrCat("must have 1 to 128 characters, has ", name.size()));
  }
  for (const char c : name) {
    if (!absl::ascii_isalnum(c) && c != '.' && c != '_' && c != '-') {
      return worker::InvalidField(field, "may only contain A-Z, a-z, 0-9, '.', '_' and '-'");
    }
  }
  return absl::OkStatus();
}

absl::Status SharedMemoryRegistry::CheckKey(const std::string& key) const {
  if (key.size() < 2 || key[0] != '/' || key.find('/', 1) != std::string::npos ||
      key.find('\0') != std::string::npos) {
    return worker::InvalidField("system.key", "must be '/' and a name without further '/'");
  }
  const bool allowed =
      prefixes_.empty() || std::any_of(prefixes_.begin(), prefixes_.end(), [&](const auto& prefix) {
        return absl::StartsWith(key, prefix);
      });
  if (allowed) return absl::OkStatus();
  return worker::FieldError(
      absl::StatusCode::kPermissionDenied, "system.key",
      absl::StrCat("'", key, "' must begin with ", absl::StrJoin(prefixes_, " or ")));
}

absl::Status SharedMemoryRegistry::RegisterSystem(const std::string& name, const std::string& key,
                                                  uint64_t offset, uint64_t byte_size) {
  if (absl::Status status = CheckName("name", name); !status.ok()) return status;
  if (absl::Status status = CheckKey(key); !status.ok()) return status;
  if (byte_size == 0) return worker::InvalidField("byte_size", "must be > 0");
  if (offset + byte_size < offset) {
    return worker::InvalidField("system.offset", "offset + byte_size leaves 64 bits");
  }
  std::vector<std::shared_ptr<const Region>> ownerless;  // unmapped when the lock is free again
  std::unique_lock lock(mutex_);
  ownerless = TakeOwnerless(&regions_);
  if (const auto it = regions_.find(name); it != regions_.end()) {
    if (it->second->Same(key, offset, byte_size)) return absl::OkStatus();
    return Conflict("name", absl::StrCat("region '", name, "' is registered otherwise"));
  }
  auto region = std::make_shared<Region>(key, offset, byte_size);
  if (absl::Status status = region->Map(); !status.ok()) return status;
  regions_.emplace(name, std::move(region));
  return absl::OkStatus();
}

absl::Status SharedMemoryRegistry::Unregister(const std::string& name) {
  std::unique_lock lock(mutex_);
  if (regions_.erase(name) == 0) return NotFound("shared memory region", name, "name");
  return absl::OkStatus();
}

absl::StatusOr<RegionBytes> SharedMemoryRegistry::Find(const std::string& name, uint64_t offset,
                                                       uint64_t bytes,
                                                       absl::string_view field) const {
  std::shared_ptr<const Region> region;
  {
    std::shared_lock lock(mutex_);
    if (const auto it = regions_.find(name); it != regions_.end()) region = it->second;
  }
  if (region == nullptr) {
    return NotFound("shared memory region", name, absl::StrCat(field, ".shared_memory.region"));
  }
  if (offset > region->size() || bytes > region->size() - offset) {
    return worker::InvalidField(
        absl::StrCat(field, ".shared_memory.offset"),
        absl::StrCat(bytes, " bytes at ", offset, " leave the region of ", region->size()));
  }
  if (!region->Whole()) {
    return worker::InvalidField(absl::StrCat(field, ".shared_memory.region"),
                                "the shared memory object has been cut short");
  }
  return RegionBytes{region->data() + offset, region};
}

}  // namespace tributary::service
