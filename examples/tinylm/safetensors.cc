#include "examples/tinylm/safetensors.h"

#include <bit>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/element.h"

namespace tributary::tinylm {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors are little-endian");

constexpr size_t kLengthBytes = 8;
constexpr size_t kMaxHeader = size_t{100} << 20;  // the format's own limit

size_t SizeOfName(const std::string& dtype) {
  if (dtype == "F32" || dtype == "I32") return 4;
  if (dtype == "F16" || dtype == "BF16") return 2;
  return 0;
}

// The number of elements, or nothing when the shape is negative or too large for `limit` of them.
std::optional<size_t> ElementsOf(const std::vector<int64_t>& shape, size_t limit) {
  size_t elements = 1;
  for (const int64_t extent : shape) {
    if (extent < 0) return std::nullopt;
    if (extent > 0 && elements > limit / static_cast<size_t>(extent)) return std::nullopt;
    elements *= static_cast<size_t>(extent);
  }
  return elements;
}

bool Matches(const std::vector<int64_t>& shape, const std::vector<int64_t>& expected) {
  if (shape.size() != expected.size()) return false;
  for (size_t i = 0; i < shape.size(); ++i) {
    if (expected[i] >= 0 && expected[i] != shape[i]) return false;
  }
  return true;
}

float Load(const std::string& dtype, const char* data, size_t index) {
  if (dtype == "BF16") return LoadElement(DType::kBf16, data, index);
  if (dtype == "F16") return LoadElement(DType::kF16, data, index);
  if (dtype == "F32") return LoadElement(DType::kF32, data, index);
  int32_t integer = 0;
  std::memcpy(&integer, data + index * sizeof(integer), sizeof(integer));
  return static_cast<float>(integer);
}

}  // namespace

absl::StatusOr<Safetensors> Safetensors::Read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::NotFoundError(absl::StrCat(path, ": cannot be opened"));
  Safetensors result;
  result.bytes_.assign(std::istreambuf_iterator<char>(file), {});

  const auto malformed = [&path](absl::string_view what) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", what));
  };
  uint64_t header_size = 0;
  if (result.bytes_.size() < kLengthBytes) return malformed("too short for a safetensors file");
  std::memcpy(&header_size, result.bytes_.data(), kLengthBytes);
  if (header_size > kMaxHeader || header_size > result.bytes_.size() - kLengthBytes) {
    return malformed("the header is longer than the file");
  }
  const size_t data_begin = kLengthBytes + header_size;
  const size_t data_size = result.bytes_.size() - data_begin;
  const nlohmann::json header =
      nlohmann::json::parse(result.bytes_.begin() + kLengthBytes,
                            result.bytes_.begin() + static_cast<ptrdiff_t>(data_begin), nullptr,
                            /*allow_exceptions=*/false);
  if (!header.is_object()) return malformed("the header is not a JSON object");

  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    Tensor tensor;
    std::vector<uint64_t> range;
    try {
      tensor.dtype = entry.at("dtype").get<std::string>();
      tensor.shape = entry.at("shape").get<std::vector<int64_t>>();
      range = entry.at("data_offsets").get<std::vector<uint64_t>>();
    } catch (const nlohmann::json::exception& error) {
      return malformed(absl::StrCat("tensor ", name, ": ", error.what()));
    }
    if (range.size() != 2 || range[0] > range[1] || range[1] > data_size) {
      return malformed(absl::StrCat("tensor ", name, ": data_offsets lie outside the file"));
    }
    const std::optional<size_t> elements = ElementsOf(tensor.shape, data_size + 1);
    const size_t width = SizeOfName(tensor.dtype);
    if (!elements || (width > 0 && *elements * width != range[1] - range[0])) {
      return malformed(absl::StrCat("tensor ", name, ": shape and data_offsets disagree"));
    }
    tensor.begin = data_begin + range[0];
    tensor.elements = *elements;
    result.tensors_.emplace(name, std::move(tensor));
  }
  return result;
}

absl::StatusOr<std::vector<float>> Safetensors::Floats(const std::string& name,
                                                       const std::vector<int64_t>& shape) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) return absl::NotFoundError(absl::StrCat("no tensor ", name));
  const Tensor& tensor = found->second;
  if (!Matches(tensor.shape, shape)) {
    return absl::InvalidArgumentError(absl::StrCat("tensor ", name, " has shape [",
                                                   absl::StrJoin(tensor.shape, ", "), "], not [",
                                                   absl::StrJoin(shape, ", "), "]"));
  }
  if (SizeOfName(tensor.dtype) == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor ", name, " is of dtype ", tensor.dtype, ", which is not read"));
  }
  std::vector<float> values(tensor.elements);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = Load(tensor.dtype, bytes_.data() + tensor.begin, i);
  }
  return values;
}

}  // namespace tributary::tinylm
