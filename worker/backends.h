// Which backend executes a cache's attention, or why none can.
//
// A backend states what it can do; selection compares and either names a backend or lists what each
// one lacks. Nothing falls back silently: a request that no backend covers is refused.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/dtype.h"
#include "kernels/head_dims.h"
#include "worker/cache_spec.h"

namespace tributary::worker {

enum class AttentionMode : uint8_t { kCausal, kDflash };
inline constexpr std::array kAttentionModes = {AttentionMode::kCausal, AttentionMode::kDflash};
const char* Name(AttentionMode mode);  // "CAUSAL", "DFLASH"

// What the workers of a group compute on.
enum class Device : uint8_t { kCpu, kCuda };
const char* Name(Device device);  // "cpu", "cuda"
bool Parse(std::string_view text, Device* out);

// What of LayerSpec and CacheSpec a mode can do.
struct ModeCapabilities {
  AttentionMode mode = AttentionMode::kCausal;
  bool left_window = false;
  // DFlash: windows with a right side, windows around the anchor, blocks that are causal.
  bool right_window = false;
  bool anchor_window = false;
  bool causal_block = false;
  bool soft_cap = false;
  bool sinks = false;
};

// How far elements of f32 outputs may be from attention over what the cache holds, where queries,
// keys and values have unit variance.
struct OutputError {
  DType q = DType::kF32;  // also of new tokens
  DType kv = DType::kBf16;
  double few_rows = 0;   // of rows that see all tokens as the cache keeps them
  double many_rows = 0;  // of calls of many rows, drafts, and rows that see tokens as they came
};

struct BackendCapabilities {
  std::string name;  // "cpu"; unique, and what replies and workers say
  Device device = Device::kCpu;
  std::string arch;                      // "x86-64, arm64", for people
  int32_t least_compute_capability = 0;  // of a GPU: 10 * major + minor
  std::vector<ModeCapabilities> modes;
  std::vector<HeadDims> head_dims;
  std::vector<int32_t> page_sizes;
  std::vector<DType> kv_dtypes;
  int32_t max_gqa_ratio = 0;  // q_heads / kv_heads
  // Layers whose kv_dtype or soft_cap is not the cache's.
  bool layer_types = false;
  // Log-sum-exp beside the output: without it partials of several ranks cannot be merged.
  bool lse = false;
  // Can compute a row so that nothing else in the batch changes a bit of it.
  bool batch_invariant = false;
  // Can round queries to FP8 where the cache is FP8.
  bool fp8_queries = false;
  // Rounds weights, too, on some devices at least (CacheSpec::fp8_weights).
  bool fp8_weights = false;
  // Reads pages that sequences of a step share (RowPass::shared) once for all of them.
  bool shares_pages = false;
  // Keeps pages for other ranks (CacheSpec::replicas).
  bool replicas = false;
  std::vector<OutputError> f32_output_errors;  // one for each type of q and of a cache
};

const BackendCapabilities& CpuBackend();
// Registered in every build, so that a refusal names it; whether this build and this machine have
// what it takes is asked where a worker starts.
const BackendCapabilities& CudaBackend();

// All of them, in order of preference.
std::span<const BackendCapabilities* const> RegisteredBackends();

// What is asked of a backend besides the cache's spec.
struct BackendNeeds {
  Device device = Device::kCpu;
  AttentionMode mode = AttentionMode::kCausal;
  bool batch_invariant = false;
};

// What `backend` lacks for attention over caches of this spec; empty when it lacks nothing. One
// sentence a reason.
std::vector<std::string> WhyNot(const BackendCapabilities& backend, const CacheSpec& spec,
                                const BackendNeeds& needs);

// A backend, or what speaks against each: "cpu: mode DFLASH is not offered, ...".
struct Selection {
  const BackendCapabilities* backend = nullptr;  // of static life
  std::vector<std::string> refusals;             // when there is none: one a backend

  bool ok() const { return backend != nullptr; }
};

// The first of `backends`, which come in order of preference, that lacks nothing.
Selection SelectBackend(std::span<const BackendCapabilities* const> backends, const CacheSpec& spec,
                        const BackendNeeds& needs);
// Among the registered ones.
Selection SelectBackend(const CacheSpec& spec, const BackendNeeds& needs);

// What a cache remembers: the backend of each mode, decided when it is created.
class CacheBackends {
 public:
  // Chooses among `backends` for every mode; `needs.mode` is ignored.
  CacheBackends(std::span<const BackendCapabilities* const> backends, const CacheSpec& spec,
                BackendNeeds needs);

  const Selection& of(AttentionMode mode) const { return by_mode_[static_cast<size_t>(mode)]; }
  // Of the first mode that has one; nullptr when no mode has, and then the cache is of no use.
  const BackendCapabilities* first() const;

 private:
  std::array<Selection, kAttentionModes.size()> by_mode_;
};

}  // namespace tributary::worker
