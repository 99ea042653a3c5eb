#include "service/data/host_mailbox.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"

namespace tributary::service {
namespace {

absl::Status Failure(size_t bytes, int error) {
  return absl::ResourceExhaustedError(
      absl::StrCat("a mailbox of ", bytes, " bytes: ", std::strerror(error)));
}

// Without an answer that was cut off by a signal.
int Allocate(int file, size_t bytes) {
  int error = 0;
  do {
    error = posix_fallocate(file, 0, static_cast<off_t>(bytes));
  } while (error == EINTR);
  return error;
}

}  // namespace

absl::StatusOr<std::shared_ptr<HostMailbox>> HostMailbox::Create(const mailbox::Layout& layout,
                                                                 const MemoryPinner& pinner) {
  const int file = memfd_create("tributary-mailbox", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (file < 0) return Failure(layout.bytes, errno);
  absl::Cleanup close_file = [file] { close(file); };
  if (const int error = Allocate(file, layout.bytes); error != 0) {
    return Failure(layout.bytes, error);
  }
  if (fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return Failure(layout.bytes, errno);
  }
  std::unique_ptr<GuardedMapping> memory = GuardedMapping::Create(file, layout.bytes);
  if (memory == nullptr) return Failure(layout.bytes, errno);
  memory->Pin(pinner);
  std::move(close_file).Cancel();
  return std::shared_ptr<HostMailbox>(new HostMailbox(layout, file, std::move(memory)));
}

HostMailbox::HostMailbox(const mailbox::Layout& layout, int file,
                         std::unique_ptr<GuardedMapping> memory)
    : layout_(layout), file_(file), memory_(std::move(memory)) {}

HostMailbox::~HostMailbox() { close(file_); }

}  // namespace tributary::service
