// From values known at run time to template arguments, ending in a refusal that names the value.
#pragma once

#include <string>
#include <type_traits>

#include "kernels/dtype.h"
#include "kernels/status.h"

namespace tributary::cuda {

template <auto kValue>
using Constant = std::integral_constant<decltype(kValue), kValue>;

inline Status Unsupported(std::string what) {
  return {StatusCode::kFailedPrecondition, std::move(what)};
}

// Calls f(Constant<dtype>{}) -> Status.
template <typename F>
Status DispatchKvType(DType kv, F f) {
  switch (kv) {
    case DType::kFp8E4M3:
      return f(Constant<DType::kFp8E4M3>{});
    case DType::kFp8E5M2:
      return f(Constant<DType::kFp8E5M2>{});
    case DType::kBf16:
      return f(Constant<DType::kBf16>{});
    case DType::kF16:
      return f(Constant<DType::kF16>{});
    case DType::kF32:
      break;
  }
  return Unsupported(std::string("kv.dtype: a GPU cache cannot be ") + Name(kv));
}

// Calls f(Constant<head_dim>{}) -> Status.
template <typename F>
Status DispatchHeadDim(int head_dim, F f) {
  switch (head_dim) {
    case 64:
      return f(Constant<64>{});
    case 128:
      return f(Constant<128>{});
    case 256:
      return f(Constant<256>{});
  }
  return Unsupported("kv.head_dim: " + std::to_string(head_dim) + " is not 64, 128 or 256");
}

}  // namespace tributary::cuda
