// Whether kernels read a tensor of a step where another process put it.
#pragma once

#include <cstddef>

#include "worker/command.h"

namespace tributary::worker {

// A tensor that lies in regions.
struct InputUse {
  StepKind kind = StepKind::kDecode;
  size_t parts = 1;         // places that it lies in
  bool padded = false;      // kernels are launched for more rows than it has
  bool same_gpu = true;     // it lies on the GPU that reads it
  bool read_often = false;  // by many blocks of threads (queries), or once (new tokens)
};

// Otherwise it is copied to the GPU's own memory first, which costs a launch or two. A pure
// function of its argument.
constexpr bool MayBeReadInPlace(const InputUse& use) {
  // Beside many rows a copy is nothing, and their kernels read through tensor maps, which are made
  // of memory of one's own only.
  const bool few_rows = use.kind == StepKind::kDecode || use.kind == StepKind::kAppend;
  if (!few_rows || use.parts != 1) return false;
  // What lies behind the tensor is not ours to read.
  if (use.padded) return false;
  // Over a link once, not once a block.
  return use.same_gpu || !use.read_often;
}

}  // namespace tributary::worker
