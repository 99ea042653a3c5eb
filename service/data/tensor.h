// Tensors of requests and replies. They are checked once, and are plain bytes from then on.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "service/data/guarded_mapping.h"
#include "service/data/shared_memory.h"
#include "tributary/v1/types.pb.h"
#include "worker/command.h"

namespace tributary::service {

using TensorShape = absl::InlinedVector<int64_t, 3>;

// The bytes of a request's tensor. `owner` keeps a region mapped; it is null for inline bytes,
// which the request itself keeps.
struct InputTensor {
  worker::TensorView view;
  std::shared_ptr<const GuardedMapping> owner;
  RegisteredRegionPtr device;  // of the view's one part, or null
};

// Where a result goes: into a region of host memory, into one of a GPU's memory, or, when there is
// neither, into the reply.
struct OutputTensor {
  DType dtype = DType::kF32;
  bool pinned = false;  // whether `region` is pinned, as in worker::OutputPlace
  float scale = 1.0f;   // for FP8 and NVFP4
  TensorShape shape;
  std::byte* region = nullptr;
  std::shared_ptr<const GuardedMapping> owner;
  RegisteredRegionPtr device;
  worker::RegionPart part;  // of `device`
  // Of the request's message, which outlives this: echoed in the reply. Null: inline.
  const v1::SharedMemoryReference* reference = nullptr;
  size_t bytes = 0;
};

// Checks dtype (f32, bf16 or f16), shape and size; an error names the field ("q.shape[1]").
// `regions` null: the caller may not name any (PERMISSION_DENIED). NOT_FOUND for an unknown region.
// Offsets must be multiples of the element's size.
absl::StatusOr<InputTensor> ReadTensor(const v1::Tensor& tensor, absl::string_view field,
                                       absl::Span<const int64_t> shape,
                                       const SharedMemoryRegistry* regions);

// `asked` may be null or without source: inline in its dtype, or in `default_dtype` if it states
// none. `only_dtype` (UNSPECIFIED for any that outputs may have) is the one dtype allowed.
// RESOURCE_EXHAUSTED when an inline result is larger than `max_inline_bytes`.
absl::StatusOr<OutputTensor> PlaceOutput(const v1::Tensor* asked, absl::string_view field,
                                         TensorShape shape, DType default_dtype,
                                         v1::DType only_dtype, size_t max_inline_bytes,
                                         const SharedMemoryRegistry* regions);

// Copies a result's bytes into its region or into reply->inline. `bytes` is null where the workers
// have put them where they belong: then the reply only refers to them.
void WriteOutput(const OutputTensor& output, const std::byte* bytes, v1::Tensor* reply);

}  // namespace tributary::service
