#include "kernels/cpu/backend.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/cpu/attend.h"
#include "kernels/cpu/page_layout.h"
#include "kernels/cpu/page_rows.h"
#include "kernels/cpu/quantize.h"
#include "kernels/cpu/tiling.h"
#include "kernels/lse.h"
#include "kernels/validate.h"

namespace tributary::cpu {
namespace {

// Work worth waking a thread for: below this many elements a part is not cut further.
constexpr int64_t kElementsPerPart = 1 << 14;

// Calls body(begin, end) over [0, items), cut into parts of at least kElementsPerPart elements.
template <typename Body>
void ParallelFor(int64_t items, int64_t elements_per_item, ThreadPool& pool, const Body& body) {
  if (items <= 0) return;
  const int64_t most = std::max<int64_t>(1, items * elements_per_item / kElementsPerPart);
  const int64_t parts = std::min({items, most, int64_t{4} * pool.threads()});
  pool.Run(static_cast<int>(parts),
           [&](int part) { body(items * part / parts, items * (part + 1) / parts); });
}

const std::byte* At(const void* data, size_t element, DType type) {
  return static_cast<const std::byte*>(data) + element * SizeOf(type);
}

float ScaleOf(const float* scales, int32_t head) { return scales == nullptr ? 1.0f : scales[head]; }

// Calls visit(place in the cache, row as the cache would hold it) for the key and the value of
// every head of token t. `row` has room for one.
template <typename Visit>
void ForEachRow(const AppendParams& p, int32_t t, std::vector<std::byte>& row, const Visit& visit) {
  const PagedKv& kv = p.kv;
  RowPlace place;
  place.page = static_cast<int32_t>(p.slots[t] / kv.page_size);
  place.token = static_cast<int32_t>(p.slots[t] % kv.page_size);
  for (place.head = 0; place.head < kv.kv_heads; ++place.head) {
    const size_t from = (size_t(t) * kv.kv_heads + place.head) * kv.head_dim;
    const auto visit_row = [&](RowKind kind, const void* source, const float* scales) {
      place.kind = kind;
      QuantizeRow(p.input_dtype, At(source, from, p.input_dtype), ScaleOf(scales, place.head),
                  kv.dtype, row.data(), kv.head_dim);
      visit(place, row.data());
    };
    visit_row(RowKind::kKey, p.k, kv.k_scale);
    visit_row(RowKind::kValue, p.v, kv.v_scale);
  }
}

std::vector<std::byte> RoomForRow(const PagedKv& kv) {
  return std::vector<std::byte>(size_t(kv.head_dim) * SizeOf(kv.dtype));
}

int64_t ElementsPerToken(const PagedKv& kv) { return int64_t{2} * kv.kv_heads * kv.head_dim; }

// Attention reads the keys and values of `head` and of those after it by this.
KeyValueSource SourceOf(const PagedKv& kv, const AttentionEntry& entry, int32_t head) {
  KeyValueSource source;
  source.k = kv.base + KeyBlockOffset(kv, head, 0);
  source.v = kv.base + ValueBlockOffset(kv, head, 0);
  source.head_bytes = BlockPlaneBytes(kv);
  source.pages = entry.pages.data();
  source.page_bytes = PageBytes(kv);
  source.page_shift = std::countr_zero(static_cast<uint32_t>(kv.page_size));
  source.block_shift = std::countr_zero(static_cast<uint32_t>(BlockTokens(kv.page_size)));
  source.block_bytes = 2 * kv.kv_heads * BlockPlaneBytes(kv);
  return source;
}

// Chunks of every block of rows and every kv head.
int64_t HeadChunks(const AttentionParams& p, int32_t group) {
  int64_t chunks = 0;
  for (const AttentionEntry& entry : p.entries) {
    for (int32_t row = 0; row < entry.row_count; row += RowsPerBlock(group)) {
      chunks += ChunksOf(p.keys[entry.row_begin + row]).count;
    }
  }
  return chunks * p.kv.kv_heads;
}

// What each source's output counts for in the union of row-head `at`; returns the union's LSE. The
// pairwise merge folded from the left: a source is scaled by its own factor and by every later one.
float SourceWeights(const MergeParams& p, int64_t at, std::vector<float>& weights) {
  std::vector<MergeWeights<float>> merges(weights.size());
  float lse = EmptyLse<float>();
  for (size_t s = 0; s < merges.size(); ++s) {
    merges[s] = Merge(lse, p.lse[s][at]);
    lse = merges[s].lse;
  }
  float later = 1.0f;
  for (size_t s = merges.size(); s-- > 0;) {
    weights[s] = merges[s].b * later;
    later *= merges[s].a;
  }
  return lse;
}

// out = scale * sum of weights[s] * o[s], for row-head `at`. Every source is read before out is
// written, which may be one of them. A source without keys is not read at all.
void WeighOutputs(const MergeParams& p, int64_t at, const std::vector<float>& weights,
                  float scale) {
  constexpr int32_t kBlock = 64;
  for (int32_t begin = 0; begin < p.head_dim; begin += kBlock) {
    const int32_t n = std::min(kBlock, p.head_dim - begin);
    const size_t first = size_t(at) * p.head_dim + begin;
    float sum[kBlock] = {};
    for (size_t s = 0; s < weights.size(); ++s) {
      if (p.lse[s][at] == EmptyLse<float>()) continue;
      const float* source = p.o[s] + first;
      for (int32_t i = 0; i < n; ++i) sum[i] += weights[s] * source[i];
    }
    for (int32_t i = 0; i < n; ++i) p.out[first + i] = scale * sum[i];
  }
}

}  // namespace

Status Append(const AppendParams& p, ThreadPool& pool) {
  if (Status status = Validate(p); !status.ok()) return status;
  ParallelFor(p.tokens, ElementsPerToken(p.kv), pool, [&](int64_t begin, int64_t end) {
    std::vector<std::byte> room = RoomForRow(p.kv);
    for (int64_t t = begin; t < end; ++t) {
      if (p.slots[t] == kPadSlot) continue;
      ForEachRow(p, t, room,
                 [&](RowPlace place, const std::byte* row) { StoreRow(p.kv, place, row); });
    }
  });
  return Status::Ok();
}

Status MatchesCache(const AppendParams& p, ThreadPool& pool, uint8_t* matches) {
  if (Status status = Validate(p); !status.ok()) return status;
  if (p.tokens > 0 && matches == nullptr) return InvalidArgument("matches: is null");
  ParallelFor(p.tokens, ElementsPerToken(p.kv), pool, [&](int64_t begin, int64_t end) {
    std::vector<std::byte> room = RoomForRow(p.kv);
    for (int64_t t = begin; t < end; ++t) {
      bool same = true;
      if (p.slots[t] != kPadSlot) {
        ForEachRow(p, t, room, [&](RowPlace place, const std::byte* row) {
          same = same && HoldsRow(p.kv, place, row);
        });
      }
      matches[t] = same;
    }
  });
  return Status::Ok();
}

Status Attention(const AttentionParams& p, ThreadPool& pool) {
  if (Status status = Validate(p); !status.ok()) return status;
  const int32_t group = p.q_heads / p.kv.kv_heads;
  const int64_t head_chunks = HeadChunks(p, group);
  std::vector<AttendJob> jobs;
  for (const AttentionEntry& entry : p.entries) {
    for (int32_t first = 0; first < entry.row_count; first += RowsPerBlock(group)) {
      const int32_t row = entry.row_begin + first;
      const int32_t rows = std::min(RowsPerBlock(group), entry.row_count - first);
      const int32_t heads = HeadsPerJob(p.kv.kv_heads, rows * group, head_chunks, pool.threads());
      for (int32_t head = 0; head < p.kv.kv_heads; head += heads) {
        const size_t at = size_t(row) * p.q_heads + head * group;  // first (row, head) of the block
        AttendJob& job = jobs.emplace_back();
        job.params.kv = SourceOf(p.kv, entry, head);
        job.params.kv_dtype = p.kv.dtype;
        job.params.kv_heads = std::min(heads, p.kv.kv_heads - head);
        job.params.head_dim = p.kv.head_dim;
        job.params.queries = {.q = At(p.q, at * p.kv.head_dim, p.q_dtype),
                              .row_bytes = size_t(p.q_heads) * p.kv.head_dim * SizeOf(p.q_dtype),
                              .dtype = p.q_dtype,
                              .rows = rows,
                              .heads = group,
                              .keys = p.keys + row};
        job.params.sm_scale = p.sm_scale;
        job.params.soft_cap = p.soft_cap;
        job.params.k_scale = p.kv.k_scale == nullptr ? nullptr : p.kv.k_scale + head;
        job.params.v_scale = p.kv.v_scale == nullptr ? nullptr : p.kv.v_scale + head;
        job.o = p.o + at * p.kv.head_dim;
        job.lse = p.lse + at;
        job.o_heads = p.q_heads;
      }
    }
  }
  Attend(jobs, pool);
  return Status::Ok();
}

Status NewTokens(const NewTokensParams& p, ThreadPool& pool) {
  if (Status status = Validate(p); !status.ok()) return status;
  const int32_t group = p.q_heads / p.kv_heads;
  const int32_t head_end = p.head_begin + p.head_count;
  std::vector<AttendJob> jobs;
  for (const NewTokensEntry& entry : p.entries) {
    for (int32_t first = 0; first < entry.row_count; first += RowsPerBlock(group)) {
      const int32_t row = entry.row_begin + first;
      // The slice may begin or end inside a group.
      for (int32_t head = p.head_begin; head < head_end; head = (head / group + 1) * group) {
        const int32_t kv_head = head / group;
        const size_t key = (size_t(entry.row_begin) * p.kv_heads + kv_head) * p.head_dim;
        const size_t query = (size_t(row) * p.q_heads + head) * p.head_dim;
        const size_t at = size_t(row) * p.head_count + (head - p.head_begin);
        AttendJob& job = jobs.emplace_back();
        job.params.kv.k = At(p.k, key, p.kv_dtype);
        job.params.kv.v = At(p.v, key, p.kv_dtype);
        job.params.kv.row_bytes = size_t(p.kv_heads) * p.head_dim * SizeOf(p.kv_dtype);
        job.params.kv_dtype = p.kv_dtype;
        job.params.head_dim = p.head_dim;
        job.params.queries = {.q = At(p.q, query, p.q_dtype),
                              .row_bytes = size_t(p.q_heads) * p.head_dim * SizeOf(p.q_dtype),
                              .dtype = p.q_dtype,
                              .rows = std::min(RowsPerBlock(group), entry.row_count - first),
                              .heads = std::min((kv_head + 1) * group, head_end) - head,
                              .keys = p.keys + row};
        job.params.sm_scale = p.sm_scale;
        job.params.soft_cap = p.soft_cap;
        job.o = p.o + at * p.head_dim;
        job.lse = p.lse + at;
        job.o_heads = p.head_count;
      }
    }
  }
  Attend(jobs, pool);
  return Status::Ok();
}

Status MergePartials(const MergeParams& p, ThreadPool& pool) {
  if (Status status = Validate(p); !status.ok()) return status;
  const int64_t items = int64_t{p.rows} * p.heads;
  const int64_t elements = static_cast<int64_t>(p.o.size()) * p.head_dim;
  ParallelFor(items, elements, pool, [&](int64_t begin, int64_t end) {
    std::vector<float> weights(p.o.size());
    for (int64_t at = begin; at < end; ++at) {
      const float lse = SourceWeights(p, at, weights);
      float scale = 1.0f;
      if (p.sinks != nullptr && lse != EmptyLse<float>()) {
        scale = SinkScale(lse, p.sinks[at % p.heads]);
      }
      WeighOutputs(p, at, weights, scale);
      if (p.lse_out != nullptr) p.lse_out[at] = lse;
    }
  });
  return Status::Ok();
}

void Convert(DType from, const void* src, DType to, void* dst, size_t n) {
  QuantizeRow(from, src, 1.0f, to, dst, n);
}

}  // namespace tributary::cpu
