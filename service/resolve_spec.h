// A cache as its creator asks for it, made complete: defaults filled in, capacity rounded to pages.
#pragma once

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "tributary/v1/types.pb.h"
#include "worker/cache_spec.h"

namespace tributary::service {

struct ResolvedSpec {
  worker::CacheSpec spec;     // what workers are told
  v1::CacheSpec public_spec;  // the same as the API shows it
};

// INVALID_ARGUMENT with the field under "spec".
absl::StatusOr<ResolvedSpec> ResolveSpec(const v1::CacheSpec& asked, int ranks);

// UNSPECIFIED and unknown values are INVALID_ARGUMENT naming the field.
absl::StatusOr<DType> FromProto(v1::DType dtype, absl::string_view field);
v1::DType ToProto(DType dtype);

}  // namespace tributary::service
