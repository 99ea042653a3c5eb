#include "service/data/host_mailbox.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "service/data/file_memory.h"

namespace tributary::service {
namespace {

absl::Status Failure(size_t bytes, absl::string_view why) {
  return absl::ResourceExhaustedError(absl::StrCat("a mailbox of ", bytes, " bytes: ", why));
}
absl::Status Failure(size_t bytes, int error) { return Failure(bytes, std::strerror(error)); }

}  // namespace

absl::StatusOr<std::shared_ptr<HostMailbox>> HostMailbox::Create(
    const mailbox::Layout& layout, const MemoryPinner& pinner,
    const std::function<size_t()>& available) {
  const int file = memfd_create("tributary-mailbox", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (file < 0) return Failure(layout.bytes, errno);
  absl::Cleanup close_file = [file] { close(file); };
  const absl::Status taken =
      TakeFileMemory(file, /*begin=*/0, layout.bytes, /*missing=*/layout.bytes, available);
  if (!taken.ok()) return Failure(layout.bytes, taken.message());
  if (ftruncate(file, static_cast<off_t>(layout.bytes)) != 0) return Failure(layout.bytes, errno);
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
