// How large a step is, in terms that are the same on all ranks.
//
// To take memory, or to give it back, may wait for every GPU that reaches it, and so for kernels of
// peers that wait for this rank. Where partials meet in device memory, ranks therefore meet on the
// host in the first step of each size, once each has taken its memory. Then no kernel waits for a
// rank that is still taking memory. Each takes memory for twice the size, so that later steps of
// that size take none. Should a step take some all the same, the worst is a wait that ends by its
// bound.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

#include "kernels/row_mask.h"
#include "worker/cache_spec.h"
#include "worker/cuda/device_plan.h"
#include "worker/plan.h"
#include "worker/step_operations.h"

namespace tributary::worker {

// Steps whose needs differ by less than a factor of two on every rank have the same size. Nothing
// in it depends on a rank's own share.
using StepSize = std::array<uint64_t, 11>;

inline StepSize StepSizeOf(const PlannedStep& step) {
  const auto magnitude = [](int64_t count) {
    return static_cast<uint64_t>(std::bit_width(static_cast<uint64_t>(count)));
  };
  const RowMask mask = MaskOf(step.layer(), step.kind);
  const LayerGeometry geometry = step.geometry();
  uint64_t types = 0;
  for (const uint64_t value :
       {static_cast<uint64_t>(step.kind), static_cast<uint64_t>(step.q.dtype),
        static_cast<uint64_t>(step.k.dtype), static_cast<uint64_t>(geometry.kv.dtype),
        static_cast<uint64_t>(mask.base), static_cast<uint64_t>(mask.causal)}) {
    types = types << 8 | value;
  }
  // Rows of the largest pass, and of the largest that kernels for many rows may serve.
  int32_t pass_rows = 0;
  int32_t many_rows = 0;
  for (const RowPass& pass : step.plan.passes) {
    pass_rows = std::max(pass_rows, pass.row_count);
    if (pass.many_rows) many_rows = std::max(many_rows, pass.row_count);
  }
  return {
      types,
      static_cast<uint64_t>(geometry.q_heads) << 32 | static_cast<uint32_t>(geometry.kv.kv_heads),
      static_cast<uint64_t>(geometry.kv.key_dim) << 32 |
          static_cast<uint32_t>(geometry.kv.value_dim),
      static_cast<uint64_t>(mask.window.left),
      static_cast<uint64_t>(mask.window.right),
      static_cast<uint64_t>(PaddedCount(step.plan.query_rows)),
      static_cast<uint64_t>(PaddedCount(step.plan.new_tokens)),
      static_cast<uint64_t>(PaddedCount(pass_rows)),
      static_cast<uint64_t>(PaddedCount(many_rows)),
      magnitude(step.entries),
      magnitude(step.reach)};
}

}  // namespace tributary::worker
