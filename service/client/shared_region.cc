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
  const std::string name = RandomName();
  const std::string key = "/" + name;
  // Tensors are the owner's business only; the service runs as the same user, or as root.
  const int file = shm_open(key.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
  if (file < 0) return Failure("cannot create an object", errno);
  void* data = MAP_FAILED;
  int error = posix_fallocate(file, 0, static_cast<off_t>(size));
  if (error == 0 && !Lock(file)) error = errno;
  if (error == 0) {
    data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (data == MAP_FAILED) error = errno;
  }
  if (data == MAP_FAILED) {
    close(file);
    shm_unlink(key.c_str());
    return Failure(absl::StrCat("cannot map ", size, " bytes"), error);
  }
  return std::unique_ptr<SharedRegion>(
      new SharedRegion(name, file, static_cast<std::byte*>(data), size));
}

void SharedRegion::Unlink() {
  if (linked_) shm_unlink(key().c_str());
  linked_ = false;
}

SharedRegion::~SharedRegion() {
  Unlink();
  munmap(data_, size_);
  close(file_);
}

}  // namespace tributary::client
