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
  bool read_often = false;  // by many thread blocks (queries), or once (new tokens)
};

// Whether kernels read the tensor in place. Otherwise it is copied to the GPU's own memory first,
// which costs a launch or two. This is a pure function of its argument.
constexpr bool MayBeReadInPlace(const InputUse& use) {
  // Beside the work of many rows a copy costs nothing, and their kernels read through tensor maps,
  // which are made for a process's own memory only.
  const bool few_rows = use.kind == StepKind::kDecode || use.kind == StepKind::kAppend;
  if (!few_rows || use.parts != 1) return false;
  // What lies behind the tensor is not ours to read.
  if (use.padded) return false;
  // Every thread block reads the queries. They cross the link once, not once per thread block.
  return use.same_gpu || !use.read_often;
}

}  // namespace tributary::worker
