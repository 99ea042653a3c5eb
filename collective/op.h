// The operations of a communicator, for matching what ranks entered and for error messages.
#pragma once

#include <cstdint>

namespace tributary::collective {

// The values are part of what ranks over Gloo match messages by.
enum class Op : uint8_t { kWatch, kAllGather, kAllToAll, kReduceScatter, kGather, kBarrier };

constexpr const char* Name(Op op) {
  switch (op) {
    case Op::kWatch:
      return "watch";
    case Op::kAllGather:
      return "all_gather";
    case Op::kAllToAll:
      return "all_to_all";
    case Op::kReduceScatter:
      return "reduce_scatter";
    case Op::kGather:
      return "gather";
    case Op::kBarrier:
      return "barrier";
  }
  return "?";
}

}  // namespace tributary::collective
