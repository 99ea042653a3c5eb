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
  return static_cast<const std::byte*>(data) + BytesOf(type, static_cast<int64_t>(element));
}

float ScaleOf(const float* scales, int32_t head) { return scales == nullptr ? 1.0f : scales[head]; }

// Room for a row of elements with its block scales, and for the numbers that it is made of.
struct RowRoom {
  explicit RowRoom(const KvGeometry& g) : row(std::max(StoredKeyBytes(g), StoredValueBytes(g))) {
    if (g.dtype == DType::kNvfp4) wide.resize(std::max(g.key_dim, g.value_dim));
  }
  std::vector<std::byte> row;
  std::vector<float> wide;  // NVFP4 only
};

// A row of `dim` elements at `from` as the cache holds it, to room.row.
void EncodeRow(DType from_type, const std::byte* from, float scale, DType to, int32_t dim,
               RowRoom* room) {
  if (to != DType::kNvfp4) return QuantizeRow(from_type, from, scale, to, room->row.data(), dim);
  QuantizeRow(from_type, from, 1.0f, DType::kF32, room->wide.data(), dim);
  QuantizeNvfp4(room->wide.data(), scale, room->row.data(), room->row.data() + BytesOf(to, dim),
                dim);
}

// Calls visit(place in the cache, row as the cache would hold it) for the key and the value of
// every head of token t.
template <typename Visit>
void ForEachRow(const AppendParams& p, int32_t t, RowRoom& room, const Visit& visit) {
  const PagedKv& kv = p.kv;
  const KvGeometry& g = kv.geometry;
  RowPlace place;
  place.page = static_cast<int32_t>(p.slots[t] / kv.page_size);
  place.token = static_cast<int32_t>(p.slots[t] % kv.page_size);
  for (place.head = 0; place.head < g.kv_heads; ++place.head) {
    const size_t from = size_t(t) * g.kv_heads + place.head;
    const auto visit_row = [&](RowKind kind, const void* source, int32_t dim, const float* scales) {
      place.kind = kind;
      EncodeRow(p.input_dtype, At(source, from * dim, p.input_dtype), ScaleOf(scales, place.head),
                g.dtype, dim, &room);
      visit(place, room.row.data());
    };
    visit_row(RowKind::kKey, p.k, g.key_dim, kv.k_scale);
    visit_row(RowKind::kValue, p.v, g.value_dim, kv.v_scale);
  }
}

// Attention reads the keys and values of `head` and of those after it by this.
KeyValueSource SourceOf(const PagedKv& kv, const AttentionEntry& entry, int32_t head) {
  KeyValueSource source;
  source.k = kv.base + KeyBlockOffset(kv, head, 0);
  source.v = kv.base + ValueBlockOffset(kv, head, 0);
  source.key_head_bytes = KeyBlockBytes(kv);
  source.value_head_bytes = ValueBlockBytes(kv);
  source.pages = entry.pages.data();
  source.page_bytes = PageBytes(kv);
  source.page_shift = std::countr_zero(static_cast<uint32_t>(kv.page_size));
  source.block_shift = std::countr_zero(static_cast<uint32_t>(BlockTokens(kv.page_size)));
  source.block_bytes = BlockBytes(kv);
  return source;
}

// Rows that read the same pages: those of an entry, or those of several brought together.
struct RowGroup {
  const AttentionEntry* pages = nullptr;  // whose pages
  const std::byte* q = nullptr;           // [row_count, q_heads, key_dim]
  const KeyRange* keys = nullptr;         // [row_count]
  int32_t row_count = 0;
  int32_t row_begin = 0;          // in o and lse
  const int32_t* rows = nullptr;  // [row_count] in o and lse; then row_begin is 0
};

RowGroup GroupOf(const AttentionParams& p, const AttentionEntry& entry, const KeyRange* keys) {
  const size_t first = size_t(entry.row_begin) * p.q_heads * p.kv.geometry.key_dim;
  return {.pages = &entry,
          .q = At(p.q, first, p.q_dtype),
          .keys = keys + entry.row_begin,
          .row_count = entry.row_count,
          .row_begin = entry.row_begin};
}

// Chunks of every block of rows and every kv head.
int64_t HeadChunks(const AttentionParams& p, std::span<const RowGroup> groups) {
  const int32_t step = RowsPerBlock(p.q_heads / p.kv.geometry.kv_heads);
  int64_t chunks = 0;
  for (const RowGroup& group : groups) {
    for (int32_t row = 0; row < group.row_count; row += step) {
      chunks += ChunksOf(group.keys[row]).count;
    }
  }
  return chunks * p.kv.geometry.kv_heads;
}

// The jobs of a group, cut into blocks of rows and of heads.
void AddJobs(const AttentionParams& p, const RowGroup& group, int64_t head_chunks, int threads,
             std::vector<AttendJob>* jobs) {
  const KvGeometry& g = p.kv.geometry;
  const int32_t gqa_ratio = p.q_heads / g.kv_heads;
  const size_t row_bytes = BytesOf(p.q_dtype, int64_t{p.q_heads} * g.key_dim);
  for (int32_t first = 0; first < group.row_count; first += RowsPerBlock(gqa_ratio)) {
    const int32_t rows = std::min(RowsPerBlock(gqa_ratio), group.row_count - first);
    const int32_t heads = HeadsPerJob(g.kv_heads, rows * gqa_ratio, head_chunks, threads);
    for (int32_t head = 0; head < g.kv_heads; head += heads) {
      const size_t query_head = size_t(head) * gqa_ratio;
      const size_t row = group.rows == nullptr ? size_t(group.row_begin) + first : 0;
      AttendJob& job = jobs->emplace_back();
      job.params.kv = SourceOf(p.kv, *group.pages, head);
      job.params.kv_dtype = g.dtype;
      job.params.kv_heads = std::min(heads, g.kv_heads - head);
      job.params.key_dim = g.key_dim;
      job.params.value_dim = g.value_dim;
      job.params.queries = {.q = At(group.q + first * row_bytes, query_head * g.key_dim, p.q_dtype),
                            .row_bytes = row_bytes,
                            .dtype = p.q_dtype,
                            .rows = rows,
                            .heads = gqa_ratio,
                            .keys = group.keys + first};
      job.params.sm_scale = p.sm_scale;
      job.params.soft_cap = p.soft_cap;
      job.params.k_scale = p.kv.k_scale == nullptr ? nullptr : p.kv.k_scale + head;
      job.params.v_scale = p.kv.v_scale == nullptr ? nullptr : p.kv.v_scale + head;
      job.o = p.o + (row * p.q_heads + query_head) * g.value_dim;
      job.lse = p.lse + row * p.q_heads + query_head;
      job.o_heads = p.q_heads;
      job.rows = group.rows == nullptr ? nullptr : group.rows + first;
    }
  }
}

std::vector<AttendJob> JobsOf(const AttentionParams& p, std::span<const RowGroup> groups,
                              int threads) {
  const int64_t head_chunks = HeadChunks(p, groups);
  std::vector<AttendJob> jobs;
  for (const RowGroup& group : groups) AddJobs(p, group, head_chunks, threads, &jobs);
  return jobs;
}

// The rows of the entries of a run, brought together.
struct SharedRows {
  std::vector<std::byte> q;
  std::vector<KeyRange> keys;
  std::vector<int32_t> rows;
  const AttentionEntry* pages = nullptr;
};

// Rows that see nothing of the run are left out.
SharedRows Bring(const AttentionParams& p, const SharedPages& run) {
  const size_t row_bytes = BytesOf(p.q_dtype, int64_t{p.q_heads} * p.kv.geometry.key_dim);
  SharedRows together;
  for (const int32_t index : run.entries) {
    const AttentionEntry& entry = p.entries[index];
    // A list of pages ends where its rows' keys end: the longest has them all.
    if (together.pages == nullptr || entry.pages.size() > together.pages->pages.size()) {
      together.pages = &entry;
    }
    for (int32_t row = entry.row_begin; row < entry.row_begin + entry.row_count; ++row) {
      const KeyRange seen = {std::max(p.keys[row].lo, run.slots.lo),
                             std::min(p.keys[row].hi, run.slots.hi)};
      if (Empty(seen)) continue;
      together.keys.push_back(seen);
      together.rows.push_back(row);
    }
  }
  together.q.resize(together.rows.size() * row_bytes);
  for (size_t i = 0; i < together.rows.size(); ++i) {
    std::memcpy(together.q.data() + i * row_bytes,
                static_cast<const std::byte*>(p.q) + together.rows[i] * row_bytes, row_bytes);
  }
  return together;
}

// Attends to the runs that are worth it, level by level of their tree. What is left of each row's
// keys is in `keys`.
void AttendShared(const AttentionParams& p, ThreadPool& pool, std::vector<KeyRange>* keys) {
  const int32_t gqa_ratio = p.q_heads / p.kv.geometry.kv_heads;
  std::vector<int64_t> taken(p.entries.size(), 0);  // slots before this
  std::vector<SharedRows> level;
  const auto run_level = [&] {
    std::vector<RowGroup> groups;
    for (const SharedRows& rows : level) {
      groups.push_back({.pages = rows.pages,
                        .q = rows.q.data(),
                        .keys = rows.keys.data(),
                        .row_count = static_cast<int32_t>(rows.rows.size()),
                        .rows = rows.rows.data()});
    }
    AttendFurther(JobsOf(p, groups, pool.threads()), pool);
    level.clear();
  };
  std::vector<char> in_level(p.entries.size(), 0);
  for (const SharedPages& run : p.shared) {
    std::vector<int32_t> rows;
    bool follows = true;  // on what was taken
    bool next_level = false;
    for (const int32_t entry : run.entries) {
      rows.push_back(p.entries[entry].row_count);
      follows &= taken[entry] == run.slots.lo;
      next_level |= in_level[entry] != 0;
    }
    if (!follows || !WorthSharing(rows, gqa_ratio)) continue;
    if (next_level) {
      run_level();
      std::fill(in_level.begin(), in_level.end(), 0);
    }
    level.push_back(Bring(p, run));
    for (const int32_t entry : run.entries) {
      taken[entry] = run.slots.hi;
      in_level[entry] = 1;
    }
  }
  if (!level.empty()) run_level();
  for (size_t i = 0; i < p.entries.size(); ++i) {
    const AttentionEntry& entry = p.entries[i];
    for (int32_t row = entry.row_begin; row < entry.row_begin + entry.row_count; ++row) {
      KeyRange& left = (*keys)[row];
      left.lo = std::max(left.lo, taken[i]);
      if (Empty(left)) left = {};
    }
  }
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
  for (int32_t begin = 0; begin < p.value_dim; begin += kBlock) {
    const int32_t n = std::min(kBlock, p.value_dim - begin);
    const size_t first = size_t(at) * p.value_dim + begin;
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
  ParallelFor(p.tokens, ElementsPerToken(p.kv.geometry), pool, [&](int64_t begin, int64_t end) {
    RowRoom room(p.kv.geometry);
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
  ParallelFor(p.tokens, ElementsPerToken(p.kv.geometry), pool, [&](int64_t begin, int64_t end) {
    RowRoom room(p.kv.geometry);
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
  std::vector<KeyRange> own;  // what is left of keys behind what is shared
  const KeyRange* keys = p.keys;
  if (!p.shared.empty() && p.rows > 0) {
    const size_t row_heads = size_t(p.rows) * p.q_heads;
    std::fill_n(p.o, row_heads * p.kv.geometry.value_dim, 0.0f);
    std::fill_n(p.lse, row_heads, EmptyLse<float>());
    own.assign(p.keys, p.keys + p.rows);
    AttendShared(p, pool, &own);
    keys = own.data();
  }
  std::vector<RowGroup> groups;
  for (const AttentionEntry& entry : p.entries) groups.push_back(GroupOf(p, entry, keys));
  const std::vector<AttendJob> jobs = JobsOf(p, groups, pool.threads());
  p.shared.empty() ? Attend(jobs, pool) : AttendFurther(jobs, pool);
  return Status::Ok();
}

Status NewTokens(const NewTokensParams& p, ThreadPool& pool) {
  if (Status status = Validate(p); !status.ok()) return status;
  const int32_t gqa_ratio = p.q_heads / p.kv_heads;
  const int32_t head_end = p.head_begin + p.head_count;
  std::vector<AttendJob> jobs;
  for (const NewTokensEntry& entry : p.entries) {
    for (int32_t first = 0; first < entry.row_count; first += RowsPerBlock(gqa_ratio)) {
      const int32_t row = entry.row_begin + first;
      // The slice may begin or end inside those of a KV head.
      for (int32_t head = p.head_begin; head < head_end;
           head = (head / gqa_ratio + 1) * gqa_ratio) {
        const int32_t kv_head = head / gqa_ratio;
        const size_t key = size_t(entry.row_begin) * p.kv_heads + kv_head;
        const size_t query = (size_t(row) * p.q_heads + head) * p.key_dim;
        const size_t at = size_t(row) * p.head_count + (head - p.head_begin);
        AttendJob& job = jobs.emplace_back();
        job.params.kv.k = At(p.k, key * p.key_dim, p.kv_dtype);
        job.params.kv.v = At(p.v, key * p.value_dim, p.kv_dtype);
        job.params.kv.key_row_bytes = BytesOf(p.kv_dtype, int64_t{p.kv_heads} * p.key_dim);
        job.params.kv.value_row_bytes = BytesOf(p.kv_dtype, int64_t{p.kv_heads} * p.value_dim);
        job.params.kv_dtype = p.kv_dtype;
        job.params.key_dim = p.key_dim;
        job.params.value_dim = p.value_dim;
        job.params.queries = {.q = At(p.q, query, p.q_dtype),
                              .row_bytes = BytesOf(p.q_dtype, int64_t{p.q_heads} * p.key_dim),
                              .dtype = p.q_dtype,
                              .rows = std::min(RowsPerBlock(gqa_ratio), entry.row_count - first),
                              .heads = std::min((kv_head + 1) * gqa_ratio, head_end) - head,
                              .keys = p.keys + row};
        job.params.sm_scale = p.sm_scale;
        job.params.soft_cap = p.soft_cap;
        job.o = p.o + at * p.value_dim;
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
  const int64_t elements = static_cast<int64_t>(p.o.size()) * p.value_dim;
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

namespace {

// How many elements one thread stores at a time; a multiple of NVFP4's block.
constexpr size_t kStoredAtOnce = size_t{16} << 10;

// Stores elements [first, first + count) of an output of n.
void StorePart(const OutputFormat& format, const float* values, size_t n, void* to, size_t first,
               size_t count) {
  auto* const bytes = static_cast<std::byte*>(to);
  std::byte* const elements = bytes + BytesOf(format.dtype, static_cast<int64_t>(first));
  if (format.dtype == DType::kNvfp4) {
    const size_t scales = Nvfp4ScalesOffset(static_cast<int64_t>(n)) + first / kNvfp4Block;
    return QuantizeNvfp4(values + first, format.scale, elements, bytes + scales, count);
  }
  if (format.dtype == DType::kF32) {
    std::memcpy(elements, values + first, count * sizeof(float));
    return;
  }
  const float scale = IsUnscaled(format.dtype) ? 1.0f : format.scale;
  QuantizeRow(DType::kF32, values + first, scale, format.dtype, elements, count);
}

}  // namespace

void StoreOutput(const OutputFormat& format, const float* values, size_t n, void* to) {
  StorePart(format, values, n, to, 0, n);
}

void StoreOutput(const OutputFormat& format, const float* values, size_t n, void* to,
                 ThreadPool& pool) {
  const size_t parts = (n + kStoredAtOnce - 1) / kStoredAtOnce;
  if (parts <= 1) return StorePart(format, values, n, to, 0, n);
  pool.Run(static_cast<int>(parts), [&](int part) {
    const size_t first = static_cast<size_t>(part) * kStoredAtOnce;
    StorePart(format, values, n, to, first, std::min(kStoredAtOnce, n - first));
  });
}

}  // namespace tributary::cpu
