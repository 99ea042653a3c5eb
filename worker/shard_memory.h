// Host memory of one rank's share of a cache: addresses first, the memory itself piece by piece.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "worker/backend.h"

namespace tributary::worker {

// Given back when its last owner is gone. Owners are the shard and, while the memory is taken or
// given back, the threads that do so (memory_taker.h, memory_giver.h).
class ShardMemory {
 public:
  // Takes addresses, of huge pages where the system gives them. kResourceExhausted, with the sizes,
  // when that is more than `available` bytes or the system refuses.
  static absl::StatusOr<std::shared_ptr<ShardMemory>> Create(size_t bytes, size_t available,
                                                             PageFill fill);
  ~ShardMemory();
  ShardMemory(const ShardMemory&) = delete;
  ShardMemory& operator=(const ShardMemory&) = delete;

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

  // Takes the memory of a piece, each once, on any thread; returns the piece's bytes. Nothing is
  // read or written otherwise before all pieces are taken.
  size_t pieces() const { return (bytes_ + kPieceBytes - 1) / kPieceBytes; }
  size_t TakePiece(size_t piece) const;
  // Gives the memory back, piece by piece, so that nobody who maps memory meanwhile waits for all
  // of it. Calls `given` behind each piece, with the piece's bytes. For the last user, as the
  // destructor, which does the same where this was not called.
  void GiveBack(absl::FunctionRef<void(size_t bytes)> given);

 private:
  static constexpr size_t kPieceBytes = size_t{2} << 20;  // a huge page

  ShardMemory(void* mapping, size_t mapped, size_t bytes, PageFill fill);

  size_t BytesOfPiece(size_t piece) const {
    return std::min(kPieceBytes, bytes_ - piece * kPieceBytes);
  }

  void* const mapping_;
  const size_t mapped_;
  const size_t bytes_;
  const PageFill fill_;
  std::byte* const data_;  // where the first page begins
  size_t given_back_ = 0;  // pieces
};

}  // namespace tributary::worker
