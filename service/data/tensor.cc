#include "service/data/tensor.h"

#include <cstring>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/status/errors.h"
#include "base/status/rpc_errors.h"
#include "base/status/status_macros.h"
#include "kernels/output_format.h"
#include "service/data/resolve_spec.h"
#include "worker/rpc/dtype_conversion.h"

namespace tributary::service {
namespace {

absl::StatusOr<DType> FloatDType(v1::DType dtype, absl::string_view field) {
  const std::optional<DType> known = FromProto(dtype);
  if (known.has_value() && IsUnscaled(*known)) return *known;
  const std::string name = absl::StrCat(field, ".dtype");
  TRIBUTARY_ASSIGN_OR_RETURN(const DType type, ReadDType(dtype, name));
  return InvalidField(name, absl::StrCat("must be f32, bf16 or f16, is ", Name(type)));
}

absl::StatusOr<DType> OutputDType(v1::DType dtype, absl::string_view field) {
  const std::optional<DType> known = FromProto(dtype);
  if (known.has_value() && IsOutputType(*known)) return *known;
  const std::string name = absl::StrCat(field, ".dtype");
  TRIBUTARY_ASSIGN_OR_RETURN(const DType type, ReadDType(dtype, name));
  return InvalidField(name,
                      absl::StrCat("must be f32, bf16, f16, fp8_e4m3 or nvfp4, is ", Name(type)));
}

absl::Status CheckShape(const v1::Tensor& tensor, absl::string_view field,
                        absl::Span<const int64_t> expected) {
  if (tensor.shape_size() != static_cast<int>(expected.size())) {
    return InvalidField(
        absl::StrCat(field, ".shape"),
        absl::StrCat("must have ", expected.size(), " dimensions, has ", tensor.shape_size()));
  }
  for (int i = 0; i < tensor.shape_size(); ++i) {
    if (tensor.shape(i) != expected[i]) {
      return InvalidField(absl::StrCat(field, ".shape[", i, "]"),
                          absl::StrCat("must be ", expected[i], ", is ", tensor.shape(i)));
    }
  }
  return absl::OkStatus();
}

// Bytes of a shape that is the service's own, so that no dimension is negative.
absl::StatusOr<size_t> Bytes(absl::Span<const int64_t> shape, DType dtype,
                             absl::string_view field) {
  int64_t elements = 1;
  int64_t bits = 0;
  for (const int64_t dimension : shape) {
    if (__builtin_mul_overflow(elements, dimension, &elements) ||
        __builtin_mul_overflow(elements, int64_t{BitsOf(DType::kF32)}, &bits)) {
      return InvalidField(absl::StrCat(field, ".shape"), "its size leaves 63 bits");
    }
  }
  return OutputBytes(dtype, elements);
}

absl::StatusOr<RegionBytes> FindBytes(const v1::SharedMemoryReference& reference, DType dtype,
                                      size_t bytes, absl::string_view field,
                                      const SharedMemoryRegistry* regions) {
  if (regions == nullptr) return NotOnThisMachine(absl::StrCat(field, ".shared_memory.region"));
  TRIBUTARY_ASSIGN_OR_RETURN(RegionBytes found,
                             regions->Find(reference.region(), reference.offset(), bytes, field));
  const size_t element_bytes = BytesOf(dtype, 1);  // of NVFP4: the byte that two elements share
  if (reinterpret_cast<uintptr_t>(found.data) % element_bytes != 0) {
    return InvalidField(
        absl::StrCat(field, ".shared_memory.offset"),
        absl::StrCat("must be a multiple of the element's ", element_bytes, " bytes"));
  }
  return found;
}

}  // namespace

absl::StatusOr<InputTensor> ReadTensor(const v1::Tensor& tensor, absl::string_view field,
                                       absl::Span<const int64_t> shape,
                                       const SharedMemoryRegistry* regions) {
  InputTensor input;
  TRIBUTARY_ASSIGN_OR_RETURN(input.view.dtype, FloatDType(tensor.dtype(), field));
  TRIBUTARY_RETURN_IF_ERROR(CheckShape(tensor, field, shape));
  TRIBUTARY_ASSIGN_OR_RETURN(input.view.bytes, Bytes(shape, input.view.dtype, field));
  switch (tensor.source_case()) {
    case v1::Tensor::kInline: {
      const std::string& bytes = tensor.inline_();
      if (bytes.size() != input.view.bytes) {
        return InvalidField(
            absl::StrCat(field, ".inline"),
            absl::StrCat("must have ", input.view.bytes, " bytes, has ", bytes.size()));
      }
      input.view.data = reinterpret_cast<const std::byte*>(bytes.data());
      return input;
    }
    case v1::Tensor::kSharedMemory: {
      TRIBUTARY_ASSIGN_OR_RETURN(
          RegionBytes found,
          FindBytes(tensor.shared_memory(), input.view.dtype, input.view.bytes, field, regions));
      input.view.data = found.data;
      input.view.pinned = found.pinned;
      input.owner = std::move(found.owner);
      if (found.device != nullptr) input.view.parts.push_back(found.part);
      input.device = std::move(found.device);
      return input;
    }
    case v1::Tensor::SOURCE_NOT_SET:
      break;
  }
  return InvalidField(field, "has neither inline bytes nor a shared memory reference");
}

absl::StatusOr<OutputTensor> PlaceOutput(const v1::Tensor* asked, absl::string_view field,
                                         TensorShape shape, DType default_dtype,
                                         v1::DType only_dtype, size_t max_inline_bytes,
                                         const SharedMemoryRegistry* regions) {
  OutputTensor output;
  output.dtype = default_dtype;
  output.shape = std::move(shape);
  if (asked != nullptr) {
    if (asked->dtype() == v1::DTYPE_UNSPECIFIED) {
      return InvalidField(absl::StrCat(field, ".dtype"), "must be stated");
    }
    TRIBUTARY_ASSIGN_OR_RETURN(output.dtype, OutputDType(asked->dtype(), field));
    if (only_dtype != v1::DTYPE_UNSPECIFIED && asked->dtype() != only_dtype) {
      return InvalidField(absl::StrCat(field, ".dtype"),
                          absl::StrCat("must be ", Name(default_dtype)));
    }
  }
  TRIBUTARY_ASSIGN_OR_RETURN(output.bytes, Bytes(output.shape, output.dtype, field));
  if (asked != nullptr && (asked->shape_size() > 0 || asked->has_shared_memory())) {
    TRIBUTARY_RETURN_IF_ERROR(CheckShape(*asked, field, output.shape));
  }
  if (asked != nullptr && asked->has_inline_()) {
    return InvalidField(absl::StrCat(field, ".inline"), "results are not written into the request");
  }
  if (asked != nullptr && asked->has_shared_memory()) {
    TRIBUTARY_ASSIGN_OR_RETURN(RegionBytes found, FindBytes(asked->shared_memory(), output.dtype,
                                                            output.bytes, field, regions));
    output.region = found.data;
    output.pinned = found.pinned;
    output.owner = std::move(found.owner);
    output.device = std::move(found.device);
    output.part = found.part;
    output.reference = &asked->shared_memory();
    return output;
  }
  if (output.bytes > max_inline_bytes) {
    return Exhausted(
        "max_message_bytes",
        absl::StrCat(field, " has ", output.bytes, " bytes, a message at most ", max_inline_bytes));
  }
  return output;
}

void WriteOutput(const OutputTensor& output, const std::byte* bytes, v1::Tensor* reply) {
  reply->set_dtype(ToProto(output.dtype));
  reply->mutable_shape()->Add(output.shape.begin(), output.shape.end());
  if (output.device == nullptr && output.region == nullptr) {
    reply->mutable_inline_()->assign(reinterpret_cast<const char*>(bytes), output.bytes);
    return;
  }
  *reply->mutable_shared_memory() = *output.reference;
  if (bytes != nullptr) std::memcpy(output.region, bytes, output.bytes);
}

}  // namespace tributary::service
