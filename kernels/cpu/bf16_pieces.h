// How many bf16 numbers stand for one number of the attention arithmetic where the processor
// multiplies bf16. Pure functions of the queries' type, which is the precision the caller asks for.
#pragma once

#include "kernels/dtype.h"

namespace tributary::cpu {

// Pieces that add up to a query element exactly (to 2^-24 of it for f32).
constexpr int QueryPieces(DType q_dtype) {
  return q_dtype == DType::kBf16 ? 1 : q_dtype == DType::kF16 ? 2 : 3;
}

// Pieces of a weight exp(logit - max). Two leave an error of 2^-17 of the weight. One leaves 2^-9,
// half a unit of bf16, which is what a host that computes in bf16 has in every tensor it sends; its
// output is off by at most that share of the weighted mean of |v|. The LSE never depends on this:
// the sum is taken of the weights as they were.
//
// The type of the output does not matter: rows of several calls share a block of queries, and what
// a row gets must not depend on its company. A host that wants f32 to be precise to f32 sends its
// queries in f32, which holds every bf16 exactly.
constexpr int WeightPieces(DType q_dtype) { return q_dtype == DType::kBf16 ? 1 : 2; }

}  // namespace tributary::cpu
