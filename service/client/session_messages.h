// A session's messages as the client library has what they say.
#pragma once

#include <cstdint>
#include <vector>

#include "base/mailbox/pieces.h"
#include "service/client/client.h"
#include "service/client/session.h"
#include "tributary/v1/session.pb.h"

namespace tributary::client {

v1::SubmitStep MessageOf(const SessionStep& step, uint64_t step_id);

// Bytes of an element: F32, BF16, F16 or FP8_E4M3.
inline int32_t BytesOf(v1::DType dtype) { return static_cast<int32_t>(OutputBytes(dtype, 1)); }
// Of an element of q, k and v, and of an output.
struct ElementBytes {
  int32_t inputs = 0;
  int32_t output = 0;
};
// Elements between two rows, and between two heads of a row.
inline int64_t RowStride(const HeadRows& rows) {
  return rows.row_stride != 0 ? rows.row_stride : int64_t{rows.heads} * rows.dim;
}
inline int64_t HeadStride(const HeadRows& rows) {
  return rows.head_stride != 0 ? rows.head_stride : rows.dim;
}

// What a step goes through the slots in, where a slot has room for so many rows and new tokens.
std::vector<mailbox::Piece> PiecesOf(const SessionStep& step, int32_t max_rows,
                                     int32_t max_new_tokens);
// A piece of a layer, in place.
SessionLayer PartOf(const SessionLayer& layer, const mailbox::Piece& piece, ElementBytes bytes);

}  // namespace tributary::client
