// From values known at run time to template arguments, ending in a refusal that names the value.
#pragma once

#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "kernels/dtype.h"
#include "kernels/head_dims.h"
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
    case DType::kNvfp4:
      return f(Constant<DType::kNvfp4>{});
    case DType::kF32:
      break;
  }
  return Unsupported(std::string("kv.dtype: a GPU cache cannot be ") + Name(kv));
}

// Calls f(Constant<key_dim>{}, Constant<value_dim>{}) -> Status, if the table of head dims has
// these dimensions and says that the family (a column, as &HeadDims::decode_sm80) is built for
// them. f is instantiated for those rows of the table alone.
template <bool HeadDims::*kFamily, typename F>
Status DispatchHeadDims(int32_t key_dim, int32_t value_dim, F f) {
  std::optional<Status> status;
  const auto try_row = [&]<size_t kRow>(std::integral_constant<size_t, kRow>) {
    constexpr HeadDims kDims = kHeadDims[kRow];
    if constexpr (kDims.*kFamily) {
      if (kDims.key_dim != key_dim || kDims.value_dim != value_dim) return;
      Status done = f(Constant<int{kDims.key_dim}>{}, Constant<int{kDims.value_dim}>{});
      status = std::move(done);
    }
  };
  const auto try_rows = [&]<size_t... kRows>(std::index_sequence<kRows...>) {
    (try_row(std::integral_constant<size_t, kRows>{}), ...);
  };
  try_rows(std::make_index_sequence<kHeadDims.size()>{});
  if (status.has_value()) return *std::move(status);
  return Unsupported("kv.key_dim: " + HeadDimsName(key_dim, value_dim) + " is not " +
                     HeadDimsList([](const HeadDims& row) { return row.*kFamily; }));
}

}  // namespace tributary::cuda
