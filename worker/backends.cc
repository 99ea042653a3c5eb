#include "worker/backends.h"

#include <algorithm>
#include <array>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace tributary::worker {
namespace {

const char* Name(AttentionMode mode) {
  switch (mode) {
    case AttentionMode::kCausal:
      return "CAUSAL";
    case AttentionMode::kDflash:
      return "DFLASH";
  }
  return "unknown";
}

template <typename T>
bool Has(const std::vector<T>& values, T value) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

bool AnyLayer(const CacheSpec& spec, bool (*has)(const LayerSpec&)) {
  return std::any_of(spec.layers.begin(), spec.layers.end(), has);
}

}  // namespace

const BackendCapabilities& CpuBackend() {
  static const BackendCapabilities& cpu = *new BackendCapabilities{
      .name = "cpu",
      .modes = {AttentionMode::kCausal},
      .head_dims = {64, 128, 256},
      .page_sizes = {16, 32, 64, 128},
      .kv_dtypes = {DType::kFp8E4M3, DType::kFp8E5M2, DType::kBf16, DType::kF16},
      .max_group = 16,
      .left_window = true,
      .soft_cap = true,
      .sinks = true,
  };
  return cpu;
}

std::vector<std::string> WhyNot(const BackendCapabilities& backend, const CacheSpec& spec,
                                AttentionMode mode) {
  std::vector<std::string> reasons;
  const auto require = [&](bool fits, auto... sentence) {
    if (!fits) reasons.push_back(absl::StrCat(sentence...));
  };
  require(Has(backend.modes, mode), "mode ", Name(mode), " is not offered");
  require(Has(backend.head_dims, spec.head_dim), "head_dim ", spec.head_dim, " is not offered");
  require(Has(backend.page_sizes, spec.page_size), "page_size ", spec.page_size, " is not offered");
  require(Has(backend.kv_dtypes, spec.kv_dtype), "kv_dtype ", tributary::Name(spec.kv_dtype),
          " is not offered");
  require(spec.kv_heads > 0 && spec.q_heads <= backend.max_group * spec.kv_heads, "more than ",
          backend.max_group, " query heads a KV head");
  require(
      backend.left_window || !AnyLayer(spec, [](const LayerSpec& l) { return l.window.left >= 0; }),
      "sliding windows are not offered");
  require(backend.soft_cap || spec.soft_cap == 0, "soft_cap is not offered");
  require(backend.sinks || !AnyLayer(spec, [](const LayerSpec& l) { return !l.sinks.empty(); }),
          "attention sinks are not offered");
  return reasons;
}

absl::StatusOr<const BackendCapabilities*> SelectBackend(
    std::span<const BackendCapabilities* const> backends, const CacheSpec& spec,
    AttentionMode mode) {
  std::vector<std::string> refusals;
  for (const BackendCapabilities* backend : backends) {
    const std::vector<std::string> reasons = WhyNot(*backend, spec, mode);
    if (reasons.empty()) return backend;
    refusals.push_back(absl::StrCat(backend->name, ": ", absl::StrJoin(reasons, ", ")));
  }
  return absl::FailedPreconditionError(
      absl::StrCat("no backend can do this (", absl::StrJoin(refusals, "; "), ")"));
}

absl::StatusOr<const BackendCapabilities*> SelectBackend(const CacheSpec& spec,
                                                         AttentionMode mode) {
  const std::array<const BackendCapabilities*, 1> built = {&CpuBackend()};
  return SelectBackend(built, spec, mode);
}

}  // namespace tributary::worker
