// Copies a page of every layer in one launch: copy on write after a fork.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/status.h"

namespace tributary::cuda {

struct CopyPageArgs {
  std::byte* base = nullptr;  // page 0 of layer 0, aligned to 16 bytes
  size_t page_bytes = 0;      // a multiple of 16
  size_t layer_bytes = 0;     // from a page to the same page of the next layer
  int32_t layers = 0;
  int32_t source = 0;
  int32_t destination = 0;
};

Status LaunchCopyPage(const CopyPageArgs& args, cudaStream_t stream);

}  // namespace tributary::cuda
