#include "kernels/cpu/backend.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/cpu/attend.h"
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

// Calls write(source row, scale, cache row) for the key and the value of every head of token t.
template <typename Visit>
void ForEachRow(const AppendParams& p, int32_t t, const Visit& visit) {
  const PagedKv& kv = p.kv;
  const auto page = static_cast<int32_t>(p.slots[t] / kv.page_size);
  const size_t in_plane = size_t(p.slots[t] % kv.page_size) * kv.head_dim * SizeOf(kv.dtype);
  for (int32_t h = 0; h < kv.kv_heads; ++h) {
    const size_t from = (size_t(t) * kv.kv_heads + h) * kv.head_dim;
    visit(At(p.k, from, p.input_dtype), ScaleOf(kv.k_scale, h), KeyPlane(kv, page, h) + in_plane);
    visit(At(p.v, from, p.input_dtype), ScaleOf(kv.v_scale, h), ValuePlane(kv, page, h) + in_plane);
  }
}

int64_t ElementsPerToken(const PagedKv& kv) { return int64_t{2} * kv.kv_heads * kv.head_dim; }

// Attention reads the rows of `head` and of those after it by this.
KeyValueRows RowsOf(const PagedKv& kv, const AttentionEntry& entry, int32_t head) {
  KeyValueRows rows;
  rows.k = KeyPlane(kv, 0, head);
  rows.v = ValuePlane(kv, 0, head);
  rows.row_bytes = size_t(kv.head_dim) * SizeOf(kv.dtype);
  rows.pages = entry.pages.data();
  rows.page_bytes = PageBytes(kv);
  rows.page_shift = std::countr_zero(static_cast<uint32_t>(kv.page_size));
  rows.head_bytes = HeadPlaneBytes(kv);
  return rows;
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
    for (int64_t t = begin; t < end; ++t) {
      if (p.slots[t] == kPadSlot) continue;
      ForEachRow(p, t, [&](const std::byte* from, float scale, std::byte* to) {
        QuantizeRow(p.input_dtype, from, scale, p.kv.dtype, to, p.kv.head_dim);
      });
    }
  });
  return Status::Ok();
}

Status MatchesCache(const AppendParams& p, ThreadPool& pool, uint8_t* matches) {
  if (Status status = Validate(p); !status.ok()) return status;
  if (p.tokens > 0 && matches == nullptr) return InvalidArgument("matches: is null");
  ParallelFor(p.tokens, ElementsPerToken(p.kv), pool, [&](int64_t begin, int64_t end) {
    std::vector<std::byte> expected(size_t(p.kv.head_dim) * SizeOf(p.kv.dtype));
    for (int64_t t = begin; t < end; ++t) {
      bool same = true;
      if (p.slots[t] != kPadSlot) {
        ForEachRow(p, t, [&](const std::byte* from, float scale, const std::byte* held) {
          if (!same) return;
          QuantizeRow(p.input_dtype, from, scale, p.kv.dtype, expected.data(), p.kv.head_dim);
          same = std::memcmp(expected.data(), held, expected.size()) == 0;
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
        job.params.kv = RowsOf(p.kv, entry, head);
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
