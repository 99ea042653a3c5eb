#include "service/data/resolve_spec.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status/errors.h"
#include "base/status/status_macros.h"
#include "service/data/layer_groups.h"
#include "worker/rpc/dtype_conversion.h"

namespace tributary::service {
namespace {

constexpr int32_t kDefaultPageSize = 16;
constexpr int64_t kDefaultRollbackTokens = 1024;

absl::Status ReadWindowBase(v1::WindowBase base, absl::string_view field, WindowBase* out) {
  switch (base) {
    case v1::WINDOW_BASE_UNSPECIFIED:
    case v1::WINDOW_BASE_QUERY:
      *out = WindowBase::kQuery;
      return absl::OkStatus();
    case v1::WINDOW_BASE_ANCHOR:
      *out = WindowBase::kAnchor;
      return absl::OkStatus();
    default:
      return InvalidField(field, "must be WINDOW_BASE_QUERY or WINDOW_BASE_ANCHOR");
  }
}

absl::StatusOr<worker::LayerSpec> LayerFromProto(const v1::LayerSpec& in, int layer) {
  const std::string field = absl::StrCat("layer_specs[", layer, "]");
  worker::LayerSpec out;
  if (in.window().has_left()) out.window.left = in.window().left();
  if (in.window().has_right()) out.window.right = in.window().right();
  out.sinks.assign(in.sinks().begin(), in.sinks().end());
  if (!in.k_scale().empty()) out.k_scale.assign(in.k_scale().begin(), in.k_scale().end());
  if (!in.v_scale().empty()) out.v_scale.assign(in.v_scale().begin(), in.v_scale().end());
  TRIBUTARY_RETURN_IF_ERROR(
      ReadWindowBase(in.window_base(), absl::StrCat(field, ".window_base"), &out.window_base));
  out.causal_block = in.causal_block();
  if (in.kv_dtype() != v1::DTYPE_UNSPECIFIED) {
    TRIBUTARY_ASSIGN_OR_RETURN(out.kv_dtype,
                               ReadDType(in.kv_dtype(), absl::StrCat(field, ".kv_dtype")));
  }
  if (in.has_soft_cap()) out.soft_cap = in.soft_cap();
  out.q_heads = in.q_heads();
  out.kv_heads = in.kv_heads();
  out.head_dim = in.head_dim();
  out.value_head_dim = in.value_head_dim();
  out.sm_scale = in.sm_scale();
  if (in.has_o_scale()) out.o_scale = in.o_scale();
  return out;
}

// -1 stands for "unbounded" below; a caller says so by leaving the side out.
absl::Status CheckWindow(const v1::Window& window, int layer) {
  const std::string field = absl::StrCat("layer_specs[", layer, "].window");
  if (window.has_left() && window.left() < 0) {
    return InvalidField(absl::StrCat(field, ".left"), "must be >= 0 or absent");
  }
  if (window.has_right() && window.right() < 0) {
    return InvalidField(absl::StrCat(field, ".right"), "must be >= 0 or absent");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<worker::LayerSpec>> ResolveLayers(const v1::CacheSpec& asked) {
  if (asked.layers() < 1 || asked.layers() > worker::kMaxLayers) {
    return InvalidField("layers",
                        absl::StrCat("must be 1 to ", worker::kMaxLayers, ", is ", asked.layers()));
  }
  const int given = asked.layer_specs_size();
  if (given > 1 && given != asked.layers()) {
    return InvalidField("layer_specs", absl::StrCat("must have 0, 1 or layers (", asked.layers(),
                                                    ") elements, has ", given));
  }
  std::vector<worker::LayerSpec> layers;
  for (int i = 0; i < given; ++i) {
    TRIBUTARY_RETURN_IF_ERROR(CheckWindow(asked.layer_specs(i).window(), i));
    TRIBUTARY_ASSIGN_OR_RETURN(worker::LayerSpec layer, LayerFromProto(asked.layer_specs(i), i));
    layers.push_back(std::move(layer));
  }
  if (given <= 1) layers.resize(asked.layers(), given == 1 ? layers[0] : worker::LayerSpec());
  return layers;
}

absl::StatusOr<int32_t> ResolvePages(const char* field, int64_t capacity, int64_t page_tokens) {
  if (capacity < 1) {
    return InvalidField(field, absl::StrCat("must be >= 1, is ", capacity));
  }
  const int64_t pages = (capacity - 1) / page_tokens + 1;
  if (pages > std::numeric_limits<int32_t>::max()) {
    return InvalidField(field, absl::StrCat("makes ", pages, " pages, more than 2^31 - 1"));
  }
  return static_cast<int32_t>(pages);
}

// Pages of their own for the layers with a window, where they are asked for; or else 0.
absl::StatusOr<int32_t> ResolveWindowPages(const v1::CacheSpec& asked,
                                           const worker::CacheSpec& spec, int64_t page_tokens) {
  constexpr char kField[] = "window_capacity_tokens";
  if (!asked.has_window_capacity_tokens()) return 0;
  if (LayerGroups(WindowsOf(spec), /*apart=*/true).size() < 2) {
    return InvalidField(kField,
                        "is for caches of layers with a window.left and layers without; "
                        "here all are of one kind, and capacity_tokens is for them");
  }
  return ResolvePages(kField, asked.window_capacity_tokens(), page_tokens);
}

absl::StatusOr<CacheTerms> ResolveTerms(const v1::CacheSpec& asked) {
  CacheTerms terms;
  for (int i = 0; i < asked.modes_size(); ++i) {
    TRIBUTARY_ASSIGN_OR_RETURN(const worker::AttentionMode mode,
                               ReadMode(asked.modes(i), absl::StrCat("modes[", i, "]")));
    terms.modes.push_back(mode);
  }
  std::sort(terms.modes.begin(), terms.modes.end());
  terms.modes.erase(std::unique(terms.modes.begin(), terms.modes.end()), terms.modes.end());
  terms.rollback_tokens =
      asked.has_rollback_tokens() ? asked.rollback_tokens() : kDefaultRollbackTokens;
  if (terms.rollback_tokens < 0) {
    return InvalidField("rollback_tokens",
                        absl::StrCat("must be >= 0, is ", terms.rollback_tokens));
  }
  return terms;
}

// A scale that nobody gives is 1 / sqrt(head_dim), of the cache and of every layer that has a
// head_dim of its own.
void ResolveScales(float asked, worker::CacheSpec* spec) {
  const auto default_scale = [](int32_t head_dim) {
    return head_dim > 0 ? 1.0f / std::sqrt(static_cast<float>(head_dim)) : 0.0f;
  };
  spec->sm_scale = asked != 0.0f ? asked : default_scale(spec->head_dim);
  if (asked != 0.0f) return;
  for (worker::LayerSpec& layer : spec->layers) {
    if (layer.sm_scale == 0.0f && layer.head_dim != 0) {
      layer.sm_scale = default_scale(layer.head_dim);
    }
  }
}

// The stride of the replicas, 0 where there are none.
absl::StatusOr<int32_t> ResolveReplicas(const v1::CacheSpec& asked, int ranks) {
  if (asked.replicas() < 0 || asked.replicas() > 1) {
    return InvalidField("replicas", absl::StrCat("must be 0 or 1, is ", asked.replicas()));
  }
  if (asked.replicas() == 1 && ranks == 1) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "replicas",
                      "there is one worker: no other can keep its tokens");
  }
  return asked.replicas();
}

absl::StatusOr<ResolvedSpec> Resolve(const v1::CacheSpec& asked, int ranks) {
  worker::CacheSpec spec;
  TRIBUTARY_ASSIGN_OR_RETURN(spec.layers, ResolveLayers(asked));
  spec.q_heads = asked.q_heads();
  spec.kv_heads = asked.kv_heads();
  spec.head_dim = asked.head_dim();
  spec.value_head_dim = asked.value_head_dim() == 0 ? spec.head_dim : asked.value_head_dim();
  spec.page_size = asked.page_size() == 0 ? kDefaultPageSize : asked.page_size();
  spec.interleave = asked.interleave() == 0 ? spec.page_size : asked.interleave();
  spec.kv_dtype = DType::kFp8E4M3;
  if (asked.kv_dtype() != v1::DTYPE_UNSPECIFIED) {
    TRIBUTARY_ASSIGN_OR_RETURN(spec.kv_dtype, ReadDType(asked.kv_dtype(), "kv_dtype"));
  }
  ResolveScales(asked.sm_scale(), &spec);
  spec.soft_cap = asked.soft_cap();
  spec.fp8_queries = asked.fp8_queries();
  spec.fp8_weights = asked.fp8_weights();
  TRIBUTARY_ASSIGN_OR_RETURN(spec.replica_stride, ResolveReplicas(asked, ranks));
  spec.num_pages = 1;
  TRIBUTARY_RETURN_IF_ERROR(worker::ValidateCacheSpec(spec));  // the page size before it divides
  const int64_t page_tokens = int64_t{spec.page_size} * ranks;
  TRIBUTARY_ASSIGN_OR_RETURN(spec.num_pages,
                             ResolvePages("capacity_tokens", asked.capacity_tokens(), page_tokens));
  TRIBUTARY_RETURN_IF_ERROR(worker::ValidateCacheSpec(spec));
  TRIBUTARY_ASSIGN_OR_RETURN(CacheTerms terms, ResolveTerms(asked));
  TRIBUTARY_ASSIGN_OR_RETURN(terms.window_pages, ResolveWindowPages(asked, spec, page_tokens));

  v1::CacheSpec shown = asked;
  shown.set_page_size(spec.page_size);
  shown.set_interleave(spec.interleave);
  shown.set_kv_dtype(ToProto(spec.kv_dtype));
  shown.set_sm_scale(spec.sm_scale);
  shown.set_value_head_dim(spec.value_head_dim);
  shown.set_replicas(spec.replica_stride > 0 ? 1 : 0);
  for (int i = 0; i < shown.layer_specs_size(); ++i) {
    shown.mutable_layer_specs(i)->set_sm_scale(spec.layers[static_cast<size_t>(i)].sm_scale);
  }
  shown.set_capacity_tokens(spec.num_pages * page_tokens);
  shown.set_rollback_tokens(terms.rollback_tokens);
  if (terms.window_pages > 0) shown.set_window_capacity_tokens(terms.window_pages * page_tokens);
  return ResolvedSpec{std::move(spec), std::move(terms), std::move(shown)};
}

}  // namespace

absl::StatusOr<ResolvedSpec> ResolveSpec(const v1::CacheSpec& asked, int ranks) {
  absl::StatusOr<ResolvedSpec> resolved = Resolve(asked, ranks);
  if (!resolved.ok()) return PrefixField("spec", resolved.status());
  return resolved;
}

absl::StatusOr<worker::AttentionMode> ReadMode(v1::AttendMode mode, absl::string_view field) {
  switch (mode) {
    case v1::ATTEND_MODE_CAUSAL:
      return worker::AttentionMode::kCausal;
    case v1::ATTEND_MODE_DFLASH:
      return worker::AttentionMode::kDflash;
    default:
      return InvalidField(field, "must be ATTEND_MODE_CAUSAL or ATTEND_MODE_DFLASH");
  }
}

absl::StatusOr<DType> ReadDType(v1::DType dtype, absl::string_view field) {
  const std::optional<DType> known = FromProto(dtype);
  if (known.has_value()) return *known;
  return InvalidField(field, absl::StrCat("no such dtype: ", static_cast<int>(dtype)));
}

}  // namespace tributary::service
