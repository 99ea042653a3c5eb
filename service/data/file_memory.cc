#include "service/data/file_memory.h"

#include <fcntl.h>
#include <sys/types.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/status/status_macros.h"
#include "worker/host_memory_ledger.h"

namespace tributary::service {
namespace {

constexpr uint64_t kPiece = uint64_t{64} << 20;

absl::Status CheckLeft(uint64_t bytes, size_t left) {
  const size_t margin = worker::MemoryMargin(left);
  if (margin <= left && bytes <= left - margin) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(left, " bytes are left on the machine"));
}

// An errno, or 0.
int Take(int file, uint64_t begin, uint64_t bytes) {
  while (fallocate(file, FALLOC_FL_KEEP_SIZE, static_cast<off_t>(begin),
                   static_cast<off_t>(bytes)) != 0) {
    if (errno == EOPNOTSUPP) return 0;
    if (errno != EINTR) return errno;
  }
  return 0;
}

}  // namespace

absl::Status TakeFileMemory(int file, uint64_t begin, uint64_t bytes, uint64_t missing,
                            const std::function<size_t()>& available) {
  TRIBUTARY_RETURN_IF_ERROR(CheckLeft(std::min(missing, bytes), available()));
  // Others take memory at the same time, so each piece is checked again.
  for (uint64_t taken = 0; taken < bytes; taken += kPiece) {
    const uint64_t piece = std::min(kPiece, bytes - taken);
    TRIBUTARY_RETURN_IF_ERROR(CheckLeft(piece, available()));
    if (const int error = Take(file, begin + taken, piece); error != 0) {
      return absl::ResourceExhaustedError(std::strerror(error));
    }
  }
  return absl::OkStatus();
}

}  // namespace tributary::service
