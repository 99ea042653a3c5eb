#include "worker/cache_spec.h"

#include <cmath>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "worker/errors.h"
#include "worker/status_macros.h"

namespace tributary::worker {
namespace {

constexpr int32_t kMaxLayers = 1024;
constexpr int32_t kMaxKvHeads = 1024;
constexpr int32_t kMaxGroup = 16;

absl::Status CheckHeads(const CacheSpec& spec) {
  if (spec.kv_heads < 1 || spec.kv_heads > kMaxKvHeads) {
    return InvalidField("kv_heads",
                        absl::StrCat("must be 1 to ", kMaxKvHeads, ", is ", spec.kv_heads));
  }
  if (spec.q_heads < 1) return InvalidField("q_heads", absl::StrCat("is ", spec.q_heads));
  if (spec.q_heads % spec.kv_heads != 0) {
    return InvalidField("q_heads", absl::StrCat("must be a multiple of kv_heads (", spec.kv_heads,
                                                "), is ", spec.q_heads));
  }
  if (spec.q_heads / spec.kv_heads > kMaxGroup) {
    return InvalidField("q_heads", absl::StrCat("may be at most ", kMaxGroup, " times kv_heads (",
                                                spec.kv_heads, "), is ", spec.q_heads));
  }
  return absl::OkStatus();
}

absl::Status CheckPaging(const CacheSpec& spec) {
  const int32_t page = spec.page_size;
  if (page != 16 && page != 32 && page != 64 && page != 128) {
    return InvalidField("page_size", absl::StrCat("must be 16, 32, 64 or 128, is ", page));
  }
  if (spec.interleave < 1 || spec.interleave > page || page % spec.interleave != 0) {
    return InvalidField("interleave",
                        absl::StrCat("must divide page_size (", page, "), is ", spec.interleave));
  }
  if (spec.num_pages < 1) {
    return InvalidField("capacity_tokens",
                        absl::StrCat("must give 1 page or more, gives ", spec.num_pages));
  }
  return absl::OkStatus();
}

absl::Status CheckScale(absl::string_view field, const std::vector<float>& scale,
                        int32_t kv_heads) {
  if (scale.size() != 1 && scale.size() != static_cast<size_t>(kv_heads)) {
    return InvalidField(
        field, absl::StrCat("must have 1 or kv_heads (", kv_heads, ") values, has ", scale.size()));
  }
  for (size_t i = 0; i < scale.size(); ++i) {
    if (!std::isfinite(scale[i]) || scale[i] <= 0) {
      return InvalidField(absl::StrCat(field, "[", i, "]"),
                          absl::StrCat("must be finite and > 0, is ", scale[i]));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckSinks(absl::string_view field, const std::vector<float>& sinks, int32_t q_heads) {
  if (!sinks.empty() && sinks.size() != static_cast<size_t>(q_heads)) {
    return InvalidField(
        field, absl::StrCat("must have 0 or q_heads (", q_heads, ") values, has ", sinks.size()));
  }
  for (size_t i = 0; i < sinks.size(); ++i) {
    if (!std::isfinite(sinks[i])) {
      return InvalidField(absl::StrCat(field, "[", i, "]"),
                          absl::StrCat("must be finite, is ", sinks[i]));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckLayer(absl::string_view field, const LayerSpec& layer, const CacheSpec& spec) {
  if (layer.window.left < -1) {
    return InvalidField(absl::StrCat(field, ".window.left"),
                        absl::StrCat("must be >= 0 or absent, is ", layer.window.left));
  }
  if (layer.window.right < -1) {
    return InvalidField(absl::StrCat(field, ".window.right"),
                        absl::StrCat("must be >= 0 or absent, is ", layer.window.right));
  }
  TRIBUTARY_RETURN_IF_ERROR(CheckSinks(absl::StrCat(field, ".sinks"), layer.sinks, spec.q_heads));
  TRIBUTARY_RETURN_IF_ERROR(
      CheckScale(absl::StrCat(field, ".k_scale"), layer.k_scale, spec.kv_heads));
  return CheckScale(absl::StrCat(field, ".v_scale"), layer.v_scale, spec.kv_heads);
}

bool SameScale(const std::vector<float>& a, const std::vector<float>& b, int32_t kv_heads) {
  for (int32_t h = 0; h < kv_heads; ++h) {
    if (a[a.size() == 1 ? 0 : h] != b[b.size() == 1 ? 0 : h]) return false;
  }
  return true;
}

bool SameLayer(const LayerSpec& a, const LayerSpec& b, int32_t kv_heads) {
  return a.window.left == b.window.left && a.window.right == b.window.right && a.sinks == b.sinks &&
         SameScale(a.k_scale, b.k_scale, kv_heads) && SameScale(a.v_scale, b.v_scale, kv_heads);
}

}  // namespace

absl::Status ValidateCacheSpec(const CacheSpec& spec) {
  if (spec.layers.empty() || spec.layers.size() > kMaxLayers) {
    return InvalidField("layers",
                        absl::StrCat("must be 1 to ", kMaxLayers, ", is ", spec.layers.size()));
  }
  TRIBUTARY_RETURN_IF_ERROR(CheckHeads(spec));
  if (spec.head_dim != 64 && spec.head_dim != 128 && spec.head_dim != 256) {
    return InvalidField("head_dim", absl::StrCat("must be 64, 128 or 256, is ", spec.head_dim));
  }
  TRIBUTARY_RETURN_IF_ERROR(CheckPaging(spec));
  if (!IsFp8(spec.kv_dtype) && spec.kv_dtype != DType::kBf16 && spec.kv_dtype != DType::kF16) {
    return InvalidField("kv_dtype", absl::StrCat("must be fp8_e4m3, fp8_e5m2, bf16 or f16, is ",
                                                 Name(spec.kv_dtype)));
  }
  if (!std::isfinite(spec.sm_scale) || spec.sm_scale <= 0) {
    return InvalidField("sm_scale", absl::StrCat("must be finite and > 0, is ", spec.sm_scale));
  }
  if (!std::isfinite(spec.soft_cap) || spec.soft_cap < 0) {
    return InvalidField("soft_cap", absl::StrCat("must be finite and >= 0, is ", spec.soft_cap));
  }
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    TRIBUTARY_RETURN_IF_ERROR(
        CheckLayer(absl::StrCat("layer_specs[", i, "]"), spec.layers[i], spec));
  }
  return ShardBytes(spec).status();
}

bool SameSpec(const CacheSpec& a, const CacheSpec& b) {
  if (a.q_heads != b.q_heads || a.kv_heads != b.kv_heads || a.head_dim != b.head_dim ||
      a.page_size != b.page_size || a.interleave != b.interleave || a.kv_dtype != b.kv_dtype ||
      a.sm_scale != b.sm_scale || a.soft_cap != b.soft_cap || a.num_pages != b.num_pages ||
      a.layers.size() != b.layers.size()) {
    return false;
  }
  for (size_t i = 0; i < a.layers.size(); ++i) {
    if (!SameLayer(a.layers[i], b.layers[i], a.kv_heads)) return false;
  }
  return true;
}

absl::StatusOr<size_t> ShardBytes(const CacheSpec& spec) {
  // A token of one layer is at most 2 * 1024 heads * 256 * 2 bytes: the first product cannot
  // overflow, the next two can.
  const int64_t page = int64_t{2} * spec.kv_heads * spec.page_size * spec.head_dim *
                       static_cast<int64_t>(SizeOf(spec.kv_dtype));
  int64_t bytes = 0;
  if (__builtin_mul_overflow(page, int64_t{spec.num_pages}, &bytes) ||
      __builtin_mul_overflow(bytes, static_cast<int64_t>(spec.layers.size()), &bytes)) {
    return InvalidField("capacity_tokens",
                        absl::StrCat("no machine holds it: ", spec.layers.size(), " layers of ",
                                     spec.num_pages, " pages of ", page, " bytes"));
  }
  return static_cast<size_t>(bytes);
}

}  // namespace tributary::worker
