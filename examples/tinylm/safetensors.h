// Reads a safetensors file: a JSON header of names, dtypes, shapes and byte ranges, then the bytes.
// Format: https://github.com/huggingface/safetensors ("Format").
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace tributary::tinylm {

class Safetensors {
 public:
  // NOT_FOUND when there is no such file, INVALID_ARGUMENT when it is not well formed: every range
  // is checked against the file, the shape and the dtype here.
  static absl::StatusOr<Safetensors> Read(const std::string& path);

  bool Has(const std::string& name) const { return tensors_.contains(name); }
  size_t size() const { return tensors_.size(); }

  // A tensor of F32, F16, BF16 or I32 elements as float, row-major. NOT_FOUND without it,
  // INVALID_ARGUMENT when its shape is not `shape` (-1: any extent) or its dtype is another.
  absl::StatusOr<std::vector<float>> Floats(const std::string& name,
                                            const std::vector<int64_t>& shape) const;

 private:
  struct Tensor {
    std::string dtype;
    std::vector<int64_t> shape;
    size_t begin = 0;  // in bytes_
    size_t elements = 0;
  };

  std::string bytes_;  // the whole file
  std::map<std::string, Tensor> tensors_;
};

}  // namespace tributary::tinylm
