#include "worker/cache_spec.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/status/errors.h"
#include "base/status/status_macros.h"
#include "kernels/head_dims.h"

namespace tributary::worker {
namespace {

// Far beyond any sequence, and sums of it with a position stay inside 63 bits.
constexpr int64_t kMaxWindow = int64_t{1} << 48;

// `prefix` says whose they are: "" for the cache, "layer_specs[3]." for a layer.
absl::Status CheckGeometry(absl::string_view prefix, const LayerGeometry& g) {
  const auto refuse = [&](absl::string_view field, auto... reason) {
    return InvalidField(absl::StrCat(prefix, field), absl::StrCat(reason...));
  };
  const int32_t kv_heads = g.kv.kv_heads;
  if (kv_heads < 1 || kv_heads > kMaxKvHeads) {
    return refuse("kv_heads", "must be 1 to ", kMaxKvHeads, ", is ", kv_heads);
  }
  if (g.q_heads < 1) return refuse("q_heads", "is ", g.q_heads);
  if (g.q_heads % kv_heads != 0) {
    return refuse("q_heads", "must be a multiple of kv_heads (", kv_heads, "), is ", g.q_heads);
  }
  if (g.gqa_ratio() > kMaxGqaRatio) {
    return refuse("q_heads", "may be at most ", kMaxGqaRatio, " times kv_heads (", kv_heads,
                  "), is ", g.q_heads);
  }
  const HeadDims* dims = FindHeadDims(g.kv.key_dim, g.kv.value_dim);
  if (dims == nullptr || !IsServed(*dims)) {
    // Where keys of this size are served, it is the size of the values that is wrong.
    const bool key_is_served = std::any_of(
        kHeadDims.begin(), kHeadDims.end(),
        [&](const HeadDims& row) { return row.key_dim == g.kv.key_dim && IsServed(row); });
    return refuse(key_is_served ? "value_head_dim" : "head_dim", "must be ", HeadDimsList(IsServed),
                  ", is ", HeadDimsName(g.kv.key_dim, g.kv.value_dim));
  }
  if (!std::isfinite(g.sm_scale) || g.sm_scale <= 0) {
    return refuse("sm_scale", "must be finite and > 0, is ", g.sm_scale);
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

absl::Status CheckWindowSide(const std::string& field, int64_t side) {
  if (side >= -1 && side <= kMaxWindow) return absl::OkStatus();
  return InvalidField(field, absl::StrCat("must be 0 to 2^48, or absent, is ", side));
}

absl::Status CheckKvDType(const std::string& field, DType dtype) {
  if (BitsOf(dtype) != 0) return absl::OkStatus();
  return InvalidField(
      field, absl::StrCat("must be f32, bf16, f16, fp8_e4m3, fp8_e5m2 or nvfp4, is number ",
                          static_cast<int>(dtype)));
}

absl::Status CheckSoftCap(const std::string& field, float soft_cap) {
  if (std::isfinite(soft_cap) && soft_cap >= 0) return absl::OkStatus();
  return InvalidField(field, absl::StrCat("must be finite and >= 0, is ", soft_cap));
}

absl::Status CheckLayer(absl::string_view field, const LayerSpec& layer, const CacheSpec& spec) {
  TRIBUTARY_RETURN_IF_ERROR(
      CheckWindowSide(absl::StrCat(field, ".window.left"), layer.window.left));
  TRIBUTARY_RETURN_IF_ERROR(
      CheckWindowSide(absl::StrCat(field, ".window.right"), layer.window.right));
  TRIBUTARY_RETURN_IF_ERROR(CheckKvDType(absl::StrCat(field, ".kv_dtype"), KvDType(spec, layer)));
  TRIBUTARY_RETURN_IF_ERROR(CheckSoftCap(absl::StrCat(field, ".soft_cap"), SoftCap(spec, layer)));
  const LayerGeometry g = GeometryOf(spec, layer);
  TRIBUTARY_RETURN_IF_ERROR(CheckGeometry(absl::StrCat(field, "."), g));
  TRIBUTARY_RETURN_IF_ERROR(CheckSinks(absl::StrCat(field, ".sinks"), layer.sinks, g.q_heads));
  TRIBUTARY_RETURN_IF_ERROR(
      CheckScale(absl::StrCat(field, ".k_scale"), layer.k_scale, g.kv.kv_heads));
  TRIBUTARY_RETURN_IF_ERROR(
      CheckScale(absl::StrCat(field, ".v_scale"), layer.v_scale, g.kv.kv_heads));
  if (std::isfinite(layer.o_scale) && layer.o_scale > 0) return absl::OkStatus();
  return InvalidField(absl::StrCat(field, ".o_scale"),
                      absl::StrCat("must be finite and > 0, is ", layer.o_scale));
}

bool SameScale(const std::vector<float>& a, const std::vector<float>& b, int32_t kv_heads) {
  for (int32_t h = 0; h < kv_heads; ++h) {
    if (a[a.size() == 1 ? 0 : h] != b[b.size() == 1 ? 0 : h]) return false;
  }
  return true;
}

bool SameLayer(const CacheSpec& spec_a, const LayerSpec& a, const CacheSpec& spec_b,
               const LayerSpec& b) {
  const LayerGeometry g = GeometryOf(spec_a, a);
  return g == GeometryOf(spec_b, b) && a.window.left == b.window.left &&
         a.window.right == b.window.right && a.window_base == b.window_base &&
         a.causal_block == b.causal_block && a.sinks == b.sinks &&
         SoftCap(spec_a, a) == SoftCap(spec_b, b) && a.o_scale == b.o_scale &&
         SameScale(a.k_scale, b.k_scale, g.kv.kv_heads) &&
         SameScale(a.v_scale, b.v_scale, g.kv.kv_heads);
}

}  // namespace

LayerGeometry GeometryOf(const CacheSpec& spec, const LayerSpec& layer) {
  const auto first_given = [](std::initializer_list<int32_t> values) {
    return *std::find_if(values.begin(), values.end() - 1, [](int32_t v) { return v != 0; });
  };
  LayerGeometry g;
  g.q_heads = first_given({layer.q_heads, spec.q_heads});
  g.kv.kv_heads = first_given({layer.kv_heads, spec.kv_heads});
  g.kv.key_dim = first_given({layer.head_dim, spec.head_dim});
  g.kv.value_dim =
      first_given({layer.value_head_dim, layer.head_dim, spec.value_head_dim, spec.head_dim});
  g.kv.dtype = KvDType(spec, layer);
  g.sm_scale = layer.sm_scale != 0.0f ? layer.sm_scale : spec.sm_scale;
  return g;
}

DType KvDType(const CacheSpec& spec, const LayerSpec& layer) {
  return layer.kv_dtype.value_or(spec.kv_dtype);
}

float SoftCap(const CacheSpec& spec, const LayerSpec& layer) {
  return layer.soft_cap.value_or(spec.soft_cap);
}

bool RoundsQueries(const CacheSpec& spec, DType kv_dtype) {
  return spec.fp8_queries && IsFp8(kv_dtype);
}

absl::Status ValidateCacheSpec(const CacheSpec& spec) {
  if (spec.layers.empty() || spec.layers.size() > kMaxLayers) {
    return InvalidField("layers",
                        absl::StrCat("must be 1 to ", kMaxLayers, ", is ", spec.layers.size()));
  }
  TRIBUTARY_RETURN_IF_ERROR(CheckGeometry("", GeometryOf(spec, LayerSpec())));
  TRIBUTARY_RETURN_IF_ERROR(CheckPaging(spec));
  TRIBUTARY_RETURN_IF_ERROR(CheckKvDType("kv_dtype", spec.kv_dtype));
  TRIBUTARY_RETURN_IF_ERROR(CheckSoftCap("soft_cap", spec.soft_cap));
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    TRIBUTARY_RETURN_IF_ERROR(
        CheckLayer(absl::StrCat("layer_specs[", i, "]"), spec.layers[i], spec));
  }
  const auto rounds = [&](const LayerSpec& l) { return RoundsQueries(spec, KvDType(spec, l)); };
  if (spec.fp8_queries && std::none_of(spec.layers.begin(), spec.layers.end(), rounds)) {
    return InvalidField("fp8_queries", "no layer's kv_dtype is fp8_e4m3 or fp8_e5m2");
  }
  if (spec.fp8_weights && !spec.fp8_queries) {
    return InvalidField("fp8_weights", "needs fp8_queries");
  }
  return ShardBytes(spec).status();
}

bool SameSpec(const CacheSpec& a, const CacheSpec& b) {
  if (GeometryOf(a, LayerSpec()) != GeometryOf(b, LayerSpec()) || a.page_size != b.page_size ||
      a.interleave != b.interleave || a.fp8_queries != b.fp8_queries ||
      a.fp8_weights != b.fp8_weights || a.num_pages != b.num_pages ||
      (a.replica_stride > 0) != (b.replica_stride > 0) || a.layers.size() != b.layers.size()) {
    return false;
  }
  for (size_t i = 0; i < a.layers.size(); ++i) {
    if (!SameLayer(a, a.layers[i], b, b.layers[i])) return false;
  }
  return true;
}

absl::Status ShardOutOfMemory(size_t needed, absl::string_view why) {
  return absl::ResourceExhaustedError(
      absl::StrCat("the cache needs ", needed, " bytes on each rank: ", why));
}

absl::StatusOr<size_t> ShardBytes(const CacheSpec& spec) {
  // A page of one layer has at most 2 * 1024 heads * 128 slots * 256 elements: their sum over at
  // most 1024 layers cannot overflow, its product with the pages can.
  int64_t page = 0;  // of all layers
  for (const LayerSpec& layer : spec.layers) {
    page += static_cast<int64_t>(PageBytes(GeometryOf(spec, layer).kv, spec.page_size));
  }
  int64_t bytes = 0;
  if (__builtin_mul_overflow(page, int64_t{spec.num_pages}, &bytes)) {
    return InvalidField("capacity_tokens",
                        absl::StrCat("no machine holds it: ", spec.num_pages, " pages of ", page,
                                     " bytes in ", spec.layers.size(), " layers"));
  }
  return static_cast<size_t>(bytes);
}

}  // namespace tributary::worker
