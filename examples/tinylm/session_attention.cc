#include "examples/tinylm/session_attention.h"

#include <utility>

namespace tributary::tinylm {
namespace {

// The most that a prompt brings at once.
constexpr int32_t kMostRows = 1024;

// A session takes outputs by the same type as inputs, which it does not change.
client::HeadRows RowsOf(const Matrix& tensor, int32_t heads, int32_t dim) {
  return {.data = const_cast<float*>(tensor.data()),
          .rows = static_cast<int32_t>(tensor.rows()),
          .heads = heads,
          .dim = dim};
}

}  // namespace

SessionAttention::SessionAttention(const ServiceCache* cache, uint64_t sequence,
                                   std::unique_ptr<client::HostSession> session)
    : cache_(cache), sequence_(sequence), session_(std::move(session)) {}

absl::StatusOr<std::unique_ptr<SessionAttention>> SessionAttention::Open(
    const ServiceCache* cache, const client::ConnectOptions& connect) {
  const absl::StatusOr<uint64_t> sequence = cache->client()->OpenSequence(cache->id());
  if (!sequence.ok()) return sequence.status();
  absl::StatusOr<std::unique_ptr<client::HostSession>> session =
      client::HostSession::Open(connect, {.cache_id = cache->id(),
                                          .max_rows = kMostRows,
                                          .max_new_tokens = kMostRows,
                                          .dtype = v1::DTYPE_F32});
  if (!session.ok()) return session.status();
  return std::unique_ptr<SessionAttention>(
      new SessionAttention(cache, *sequence, *std::move(session)));
}

SessionAttention::~SessionAttention() {
  session_.reset();  // it may hold the sequence
  cache_->client()->CloseSequence(cache_->id(), sequence_).IgnoreError();
}

absl::Status SessionAttention::Attend(int32_t layer, int64_t first_position, const Matrix& q,
                                      const Matrix& k, const Matrix& v, Matrix& out) {
  const ModelConfig& config = cache_->config();
  if (layer == 0) {
    absl::Status submitted = Submit(first_position, static_cast<int32_t>(q.rows()));
    if (!submitted.ok()) return submitted;
  }
  return session_->Attend({.q = RowsOf(q, config.q_heads, config.head_dim),
                           .k = RowsOf(k, config.kv_heads, config.head_dim),
                           .v = RowsOf(v, config.kv_heads, config.head_dim),
                           .output = RowsOf(out, config.q_heads, config.head_dim)});
}

absl::Status SessionAttention::Submit(int64_t first_position, int32_t rows) {
  client::SessionStep step{.layers = cache_->config().layers,
                           .entries = {{.sequence_id = sequence_,
                                        .first_position = first_position,
                                        .query_rows = rows,
                                        .new_tokens = rows,
                                        .truncate_to = truncate_to_}}};
  absl::Status submitted = session_->Submit(step).status();
  if (submitted.ok()) truncate_to_.reset();
  return submitted;
}

absl::Status SessionAttention::Truncate(int64_t length) {
  truncate_to_ = length;
  return absl::OkStatus();
}

}  // namespace tributary::tinylm
