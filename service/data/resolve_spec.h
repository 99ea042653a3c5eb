// A cache as its creator asks for it, made complete: defaults filled in, capacity rounded to pages.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "tributary/v1/types.pb.h"
#include "worker/backends.h"
#include "worker/cache_spec.h"

namespace tributary::service {

// What only the coordinator acts on.
struct CacheTerms {
  std::vector<worker::AttentionMode> modes;  // asked for; in order, each once; empty: any
  int64_t rollback_tokens = 0;
  // Virtual pages of the layers with a window, where they have pages of their own; or else 0.
  int32_t window_pages = 0;

  bool Allow(worker::AttentionMode mode) const {
    return modes.empty() || std::find(modes.begin(), modes.end(), mode) != modes.end();
  }
  friend bool operator==(const CacheTerms&, const CacheTerms&) = default;
};

struct ResolvedSpec {
  worker::CacheSpec spec;  // what workers are told
  CacheTerms terms;
  v1::CacheSpec public_spec;  // both, as the API shows them
};

// INVALID_ARGUMENT with the field under "spec".
absl::StatusOr<ResolvedSpec> ResolveSpec(const v1::CacheSpec& asked, int ranks);

// UNSPECIFIED and unknown values are INVALID_ARGUMENT naming the field.
absl::StatusOr<worker::AttentionMode> ReadMode(v1::AttendMode mode, absl::string_view field);
absl::StatusOr<DType> ReadDType(v1::DType dtype, absl::string_view field);

}  // namespace tributary::service
