// The merge of partials in host memory. Internal to the exchange.
//
// All strategies add weight * O in rank order with the same weights, so they agree to the bit. (The
// library is built without contraction into fused multiply-adds, see CMakeLists.txt.)
#pragma once

#include <cstddef>

namespace tributary::collective {

// weights[i]: the share of partial i in the union of all n. Returns the LSE of the union.
float MergeWeightsOf(const float* lse, size_t stride, int n, float* weights);

// out = weight * o. An empty partial counts as zero whatever its O holds: 0 * NaN would be NaN.
void Scale(const float* o, float lse, float weight, size_t n, float* out);

// The sink of one (row, head). An empty row stays 0, also under a sink of -inf.
void ApplySink(float lse, float sink, size_t n, float* o);

// The partials of all ranks for some heads, in rank order.
struct Sources {
  const float* o;      // of rank 0: [rows, row_heads, value_dim], from the first head wanted
  const float* lse;    // of rank 0: [rows, row_heads]
  size_t rank_stride;  // floats from one rank's o and lse to the next one's
  size_t row_heads;    // heads in a row of a source; at least the heads wanted
};

// Merges `heads` heads into out [rows, heads, value_dim] and lse_out [rows, heads] (may be
// nullptr). `sinks` starts at the first head wanted.
void MergeSources(const Sources& s, size_t rows, size_t heads, size_t value_dim, int ranks,
                  const float* sinks, float* weights, float* out, float* lse_out);

}  // namespace tributary::collective
