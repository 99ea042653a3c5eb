#include "service/client/shared_region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <random>

#include "absl/strings/str_cat.h"

namespace tributary::client {
namespace {

std::string RandomName() {
  std::random_device device;
  const auto word = [&] { return absl::Hex(device(), absl::kZeroPad8); };
  return absl::StrCat("tributary-", word(), word(), word(), word());
}

absl::Status Failure(absl::string_view what, int error) {
  const absl::StatusCode code = error == ENOSPC || error == ENOMEM || error == EMFILE
                                    ? absl::StatusCode::kResourceExhausted
                                    : absl::StatusCode::kFailedPrecondition;
  return {code, absl::StrCat("shared memory: ", what, ": ", std::strerror(error))};
}

// Held until the last descriptor of this open file is closed: at the latest when the process ends.
bool Lock(int file) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  return fcntl(file, F_OFD_SETLK, &lock) == 0;
}

}  // namespace

absl::StatusOr<std::unique_ptr<SharedRegion>> SharedRegion::Create(uint64_t size) {
  std::unique_ptr<SharedRegion> region(new SharedRegion(RandomName(), size));
  // Tensors are the owner's business only; the service runs as the same user, or as root.
  region->file_ =
      Descriptor(shm_open(region->key().c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600));
  if (!region->file_.open()) return Failure("cannot create an object", errno);
  region->linked_ = true;
  if (absl::Status taken = region->Take(); !taken.ok()) return taken;
  return region;
}

absl::StatusOr<std::unique_ptr<SharedRegion>> SharedRegion::CreateSealed(uint64_t size) {
  std::unique_ptr<SharedRegion> region(new SharedRegion(RandomName(), size));
  region->file_ = Descriptor(memfd_create("tributary-region", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!region->file_.open()) return Failure("cannot create a memfd", errno);
  // The lock is taken through an open description of its own, because the service gets a copy of
  // the first one and would hold the lock with it.
  const std::string self = absl::StrCat("/proc/self/fd/", region->descriptor());
  region->lock_ = Descriptor(open(self.c_str(), O_RDWR | O_CLOEXEC));
  if (!region->lock_.open()) return Failure("cannot open a memfd again", errno);
  if (absl::Status taken = region->Take(); !taken.ok()) return taken;
  if (fcntl(region->descriptor(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return Failure("cannot seal a memfd", errno);
  }
  return region;
}

absl::Status SharedRegion::Take() {
  const std::string what = absl::StrCat("cannot map ", size_, " bytes");
  if (const int error = posix_fallocate(descriptor(), 0, static_cast<off_t>(size_)); error != 0) {
    return Failure(what, error);
  }
  if (!Lock(sealed() ? lock_.get() : descriptor())) return Failure(what, errno);
  void* const data = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor(), 0);
  if (data == MAP_FAILED) return Failure(what, errno);
  data_ = static_cast<std::byte*>(data);
  return absl::OkStatus();
}

void SharedRegion::Unlink() {
  if (std::exchange(linked_, false)) shm_unlink(key().c_str());
}

SharedRegion::~SharedRegion() {
  Unlink();
  if (data_ != nullptr) munmap(data_, size_);
}

}  // namespace tributary::client
