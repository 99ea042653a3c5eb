// A session's messages as the client library has what they say.
#pragma once

#include <cstdint>
#include <vector>

#include "base/mailbox/pieces.h"
#include "service/client/session.h"
#include "tributary/v1/session.pb.h"

namespace tributary::client {

v1::SubmitStep MessageOf(const SessionStep& step, uint64_t step_id);

// Of F32, BF16 and F16.
inline int32_t BytesOf(v1::DType dtype) { return dtype == v1::DTYPE_F32 ? 4 : 2; }
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
SessionLayer PartOf(const SessionLayer& layer, const mailbox::Piece& piece, int32_t element_bytes);

}  // namespace tributary::client
