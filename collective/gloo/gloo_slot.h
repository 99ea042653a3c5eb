// Slots of Gloo's messages: equal on two ranks exactly where they are in the same operation.
//
// A slot is a hash of the epoch, the operation's number, kind and size. Ranks that part ways
// therefore never meet, and run into their deadline. If sizes could differ within a slot, Gloo
// would throw on its own thread and end the process.
#pragma once

#include <cstddef>
#include <cstdint>

#include "collective/op.h"

namespace tributary::collective {

// splitmix64 (Steele, Lea and Flood, OOPSLA 2014), used to fold one more value into a hash.
inline uint64_t Fold(uint64_t hash, uint64_t value) {
  uint64_t z = hash + value + 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// `sequence` counts the operations of a communicator. root: 0 where the operation has none.
inline uint64_t OperationSlot(uint64_t epoch, uint64_t sequence, Op op, size_t bytes, int root) {
  uint64_t slot = 0;
  for (const uint64_t value : {epoch, sequence, static_cast<uint64_t>(op),
                               static_cast<uint64_t>(bytes), static_cast<uint64_t>(root)}) {
    slot = Fold(slot, value);
  }
  return slot;
}

// Of the receive that watches a connection, which nothing ever answers.
inline uint64_t WatchSlot(uint64_t epoch) { return Fold(epoch, static_cast<uint64_t>(Op::kWatch)); }

}  // namespace tributary::collective
