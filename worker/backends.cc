#include "worker/backends.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace tributary::worker {
namespace {

template <typename T>
bool Has(const std::vector<T>& values, const T& value) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

// Dimensions of keys and of values of the layers, each pair once.
std::vector<std::pair<int32_t, int32_t>> DimsOf(const CacheSpec& spec) {
  std::vector<std::pair<int32_t, int32_t>> dims;
  for (const LayerSpec& layer : spec.layers) {
    const KvGeometry g = GeometryOf(spec, layer).kv;
    const std::pair of_layer(g.key_dim, g.value_dim);
    if (!Has(dims, of_layer)) dims.push_back(of_layer);
  }
  return dims;
}

// What the layers keep K/V as, each once.
std::vector<DType> KvDTypes(const CacheSpec& spec) {
  std::vector<DType> dtypes;
  for (const LayerSpec& layer : spec.layers) {
    if (!Has(dtypes, KvDType(spec, layer))) dtypes.push_back(KvDType(spec, layer));
  }
  return dtypes;
}

}  // namespace

const char* Name(AttentionMode mode) {
  switch (mode) {
    case AttentionMode::kCausal:
      return "CAUSAL";
    case AttentionMode::kDflash:
      return "DFLASH";
  }
  return "unknown";
}

const char* Name(Device device) {
  switch (device) {
    case Device::kCpu:
      return "cpu";
    case Device::kCuda:
      return "cuda";
  }
  return "unknown";
}

bool Parse(std::string_view text, Device* out) {
  for (const Device device : {Device::kCpu, Device::kCuda}) {
    if (text != Name(device)) continue;
    *out = device;
    return true;
  }
  return false;
}

namespace {

// The rows of the table of head dims that a backend serves.
template <typename Serves>
std::vector<HeadDims> RowsThat(Serves serves) {
  std::vector<HeadDims> dims;
  std::copy_if(kHeadDims.begin(), kHeadDims.end(), std::back_inserter(dims), serves);
  return dims;
}

std::vector<ModeCapabilities> EveryMode() {
  return {{.mode = AttentionMode::kCausal, .left_window = true, .soft_cap = true, .sinks = true},
          {.mode = AttentionMode::kDflash,
           .left_window = true,
           .right_window = true,
           .anchor_window = true,
           .causal_block = true,
           .soft_cap = true,
           .sinks = true}};
}

constexpr DType kInputs[] = {DType::kF32, DType::kBf16, DType::kF16};

// Of every type of q over every type of cache that the backend offers.
template <typename ErrorOf>
std::vector<OutputError> ForEveryType(const BackendCapabilities& backend, ErrorOf error_of) {
  std::vector<OutputError> errors;
  for (const DType q : kInputs) {
    for (const DType kv : backend.kv_dtypes) errors.push_back(error_of(q, kv));
  }
  return errors;
}

// Weights are rounded to bf16 where q is bf16 and the processor multiplies bf16
// (kernels/cpu/bf16_pieces.h). That is half a unit of the weighted mean of |v|. Caches of f32 and
// NVFP4 are multiplied in f32, but not the tokens that rows see as they came.
OutputError CpuError(DType q, DType kv) {
  const double error = q == DType::kBf16 ? 1e-2 : 1e-4;
  return {.q = q, .kv = kv, .few_rows = error, .many_rows = error};
}

// f16 is multiplied over caches of f16, FP8 and NVFP4, bf16 over those of bf16, and what many rows
// see as it came in its own type: f32 is rounded to bf16 then.
OutputError CudaError(DType q, DType kv) {
  constexpr double kF16Multiplied = 2e-3;
  if (kv == DType::kBf16) {
    const double error = q == DType::kBf16 ? 1e-2 : 2e-2;
    return {.q = q, .kv = kv, .few_rows = error, .many_rows = error};
  }
  double many_rows = kF16Multiplied;
  if (q == DType::kF32) many_rows = 2e-2;
  if (q == DType::kBf16) many_rows = kv == DType::kF16 ? 1e-2 : 2e-2;
  return {.q = q, .kv = kv, .few_rows = kF16Multiplied, .many_rows = many_rows};
}

// What every backend of this tree can do.
BackendCapabilities CommonCapabilities() {
  return {.modes = EveryMode(),
          .page_sizes = {16, 32, 64, 128},
          .kv_dtypes = {DType::kFp8E4M3, DType::kFp8E5M2, DType::kBf16, DType::kF16},
          .max_gqa_ratio = kMaxGqaRatio,
          .layer_types = true,
          .lse = true,
          .batch_invariant = true,
          .fp8_queries = true};
}

BackendCapabilities CpuCapabilities() {
  BackendCapabilities cpu = CommonCapabilities();
  cpu.name = "cpu";
  cpu.device = Device::kCpu;
  cpu.arch = "x86-64, arm64";
  cpu.head_dims = RowsThat([](const HeadDims& row) { return row.cpu; });
  cpu.kv_dtypes.insert(cpu.kv_dtypes.end(), {DType::kF32, DType::kNvfp4});
  cpu.shares_pages = true;
  cpu.replicas = true;
  cpu.f32_output_errors = ForEveryType(cpu, CpuError);
  return cpu;
}

BackendCapabilities CudaCapabilities() {
  BackendCapabilities cuda = CommonCapabilities();
  cuda.name = "cuda";
  cuda.device = Device::kCuda;
  cuda.arch = "sm_80 and later";
  cuda.least_compute_capability = 80;
  cuda.replicas = true;
  cuda.head_dims = RowsThat([](const HeadDims& row) { return row.cuda(); });
  cuda.kv_dtypes.push_back(DType::kNvfp4);
  cuda.fp8_weights = true;
  cuda.shares_pages = true;
  cuda.f32_output_errors = ForEveryType(cuda, CudaError);
  return cuda;
}

}  // namespace

const BackendCapabilities& CpuBackend() {
  static const BackendCapabilities& cpu = *new BackendCapabilities(CpuCapabilities());
  return cpu;
}

const BackendCapabilities& CudaBackend() {
  static const BackendCapabilities& cuda = *new BackendCapabilities(CudaCapabilities());
  return cuda;
}

std::span<const BackendCapabilities* const> RegisteredBackends() {
  static const std::array<const BackendCapabilities*, 2> all = {&CudaBackend(), &CpuBackend()};
  return all;
}

std::vector<std::string> WhyNot(const BackendCapabilities& backend, const CacheSpec& spec,
                                const BackendNeeds& needs) {
  std::vector<std::string> reasons;
  const auto require = [&](bool fits, auto... sentence) {
    if (!fits) reasons.push_back(absl::StrCat(sentence...));
  };
  require(backend.device == needs.device, "the workers' device is ", Name(needs.device));
  const auto offered = std::find_if(backend.modes.begin(), backend.modes.end(),
                                    [&](const auto& m) { return m.mode == needs.mode; });
  require(offered != backend.modes.end(), "mode ", Name(needs.mode), " is not offered");
  const ModeCapabilities mode = offered == backend.modes.end() ? ModeCapabilities() : *offered;
  for (const auto& dims : DimsOf(spec)) {
    const auto [key_dim, value_dim] = dims;
    require(std::any_of(backend.head_dims.begin(), backend.head_dims.end(),
                        [&dims](const HeadDims& d) {
                          return d.key_dim == dims.first && d.value_dim == dims.second;
                        }),
            "head_dim ", HeadDimsName(key_dim, value_dim), " is not offered");
  }
  require(Has(backend.page_sizes, spec.page_size), "page_size ", spec.page_size, " is not offered");
  for (const DType dtype : KvDTypes(spec)) {
    require(Has(backend.kv_dtypes, dtype), "kv_dtype ", tributary::Name(dtype), " is not offered");
  }
  require(std::all_of(spec.layers.begin(), spec.layers.end(),
                      [&](const LayerSpec& layer) {
                        const LayerGeometry g = GeometryOf(spec, layer);
                        return g.q_heads <= backend.max_gqa_ratio * g.kv.kv_heads;
                      }),
          "more than ", backend.max_gqa_ratio, " query heads per KV head");
  const auto any = [&](auto has) {
    return std::any_of(spec.layers.begin(), spec.layers.end(), has);
  };
  require(backend.layer_types || !any([&](const LayerSpec& l) {
            return KvDType(spec, l) != spec.kv_dtype || SoftCap(spec, l) != spec.soft_cap;
          }),
          "layers of a kv_dtype or soft_cap of their own are not offered");
  require(mode.left_window || !any([](const LayerSpec& l) { return l.window.left >= 0; }),
          "sliding windows are not offered");
  if (needs.mode == AttentionMode::kDflash) {
    require(mode.right_window || !any([](const LayerSpec& l) { return l.window.right >= 0; }),
            "windows with a right side are not offered");
    require(mode.anchor_window ||
                !any([](const LayerSpec& l) { return l.window_base == WindowBase::kAnchor; }),
            "windows around the anchor are not offered");
    require(mode.causal_block || !any([](const LayerSpec& l) { return l.causal_block; }),
            "causal blocks are not offered");
  }
  require(mode.soft_cap || !any([&](const LayerSpec& l) { return SoftCap(spec, l) != 0; }),
          "soft_cap is not offered");
  require(mode.sinks || !any([](const LayerSpec& l) { return !l.sinks.empty(); }),
          "attention sinks are not offered");
  require(backend.lse, "the log-sum-exp is not offered, without which partials cannot be merged");
  require(backend.batch_invariant || !needs.batch_invariant,
          "results that do not depend on the batch are not offered");
  require(backend.replicas || spec.replica_stride == 0, "replicas are not offered");
  require(backend.fp8_queries || !spec.fp8_queries, "queries in FP8 are not offered");
  return reasons;
}

Selection SelectBackend(std::span<const BackendCapabilities* const> backends, const CacheSpec& spec,
                        const BackendNeeds& needs) {
  Selection selection;
  for (const BackendCapabilities* backend : backends) {
    const std::vector<std::string> reasons = WhyNot(*backend, spec, needs);
    if (reasons.empty()) return {.backend = backend};
    selection.refusals.push_back(absl::StrCat(backend->name, ": ", absl::StrJoin(reasons, ", ")));
  }
  return selection;
}

Selection SelectBackend(const CacheSpec& spec, const BackendNeeds& needs) {
  return SelectBackend(RegisteredBackends(), spec, needs);
}

CacheBackends::CacheBackends(std::span<const BackendCapabilities* const> backends,
                             const CacheSpec& spec, BackendNeeds needs) {
  for (const AttentionMode mode : kAttentionModes) {
    needs.mode = mode;
    by_mode_[static_cast<size_t>(mode)] = SelectBackend(backends, spec, needs);
  }
}

const BackendCapabilities* CacheBackends::first() const {
  for (const Selection& selection : by_mode_) {
    if (selection.ok()) return selection.backend;
  }
  return nullptr;
}

}  // namespace tributary::worker
