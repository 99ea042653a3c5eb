// The operations of a communicator, for matching what ranks entered and for error messages.
#pragma once

#include <cstdint>

#include "kernels/status.h"

namespace tributary::collective {

// The values are part of what ranks that are processes match messages by.
enum class Op : uint8_t { kWatch, kAllGather, kAllToAll, kReduceScatter, kGather, kBarrier, kPass };

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
    case Op::kPass:
      return "pass";
  }
  return "?";
}

// kInvalidArgument unless `from` and `to` of a Pass are two ranks of the group.
inline Status CheckPass(int from, int to, int size) {
  if (from >= 0 && from < size && to >= 0 && to < size && from != to) return Status::Ok();
  return {StatusCode::kInvalidArgument, "pass: from and to must be two ranks"};
}

}  // namespace tributary::collective
