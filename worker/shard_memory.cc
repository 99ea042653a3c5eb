#include "worker/shard_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "worker/cache_spec.h"

namespace tributary::worker {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

constexpr size_t AlignUp(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// An address inside the mapping that huge pages can start at.
std::byte* AlignedBase(void* mapping) {
  return reinterpret_cast<std::byte*>(AlignUp(reinterpret_cast<uintptr_t>(mapping), kHugePage));
}

}  // namespace

absl::StatusOr<std::shared_ptr<ShardMemory>> ShardMemory::Create(size_t bytes, size_t available,
                                                                 PageFill fill) {
  if (bytes > available) {
    return ShardOutOfMemory(bytes, absl::StrCat(available, " are available"));
  }
  // A small shard would waste most of a huge page, and tests make many small ones.
  const bool huge = bytes >= kHugePage;
  const size_t mapped = huge ? AlignUp(bytes, kHugePage) + kHugePage : bytes;
  void* mapping = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) return ShardOutOfMemory(bytes, std::strerror(errno));
  absl::Cleanup unmap = [mapping, mapped] { munmap(mapping, mapped); };
  // Advice: may be refused.
  if (huge) madvise(AlignedBase(mapping), AlignUp(bytes, kHugePage), MADV_HUGEPAGE);
  auto memory = std::shared_ptr<ShardMemory>(new ShardMemory(mapping, mapped, bytes, fill));
  std::move(unmap).Cancel();
  return memory;
}

ShardMemory::ShardMemory(void* mapping, size_t mapped, size_t bytes, PageFill fill)
    : mapping_(mapping),
      mapped_(mapped),
      bytes_(bytes),
      fill_(fill),
      data_(bytes >= kHugePage ? AlignedBase(mapping) : static_cast<std::byte*>(mapping)) {}

// Pages are touched rather than asked for (MADV_POPULATE_WRITE): that would hold the lock of the
// process's address space while a page is cleared, by a thread that others go before. Whoever maps
// or unmaps anything, as a rank that drops a cache, would wait for that thread to get its turn.
size_t ShardMemory::TakePiece(size_t piece) const {
  static const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t begin = piece * kPieceBytes;
  const size_t bytes = BytesOfPiece(piece);
  if (fill_ == PageFill::kPoison) {
    std::memset(data_ + begin, 0xff, bytes);
    return bytes;
  }
  for (size_t at = 0; at < bytes; at += page) {
    *static_cast<volatile std::byte*>(data_ + begin + at) = std::byte{0};
  }
  return bytes;
}

void ShardMemory::GiveBack(absl::FunctionRef<void(size_t bytes)> given) {
  for (; given_back_ < pieces(); ++given_back_) {
    const size_t bytes = BytesOfPiece(given_back_);
    madvise(data_ + given_back_ * kPieceBytes, bytes, MADV_DONTNEED);
    given(bytes);
  }
}

ShardMemory::~ShardMemory() {
  GiveBack([](size_t) {});
  munmap(mapping_, mapped_);
}

}  // namespace tributary::worker
