#include "kernels/cpu/attend.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include "base/sync/mutex.h"
#include "kernels/cpu/page_layout.h"
#include "kernels/cpu/tiling.h"
#include "kernels/lse.h"

namespace tributary::cpu {
namespace {

// Partials kept at once while jobs are split: bounds the memory of a very long sequence.
constexpr int64_t kPartialFloats = int64_t{8} << 20;

// Query heads of a row.
int32_t Heads(const AttendJob& job) { return job.params.kv_heads * job.params.queries.heads; }
int32_t Vectors(const AttendJob& job) { return job.params.queries.rows * Heads(job); }
int64_t PartialFloats(const AttendJob& job) {
  return int64_t{Vectors(job)} * (job.params.value_dim + 1);
}

// Where the first head of a row of the job's block lies in o (in units of value_dim) and lse.
size_t RowAt(const AttendJob& job, int32_t row) {
  return size_t(job.rows == nullptr ? row : job.rows[row]) * job.o_heads;
}

// The slots some row of the job sees lie within this.
KeyRange Hull(const QueryBlock& queries) {
  KeyRange hull;
  for (int32_t r = 0; r < queries.rows; ++r) {
    const KeyRange range = queries.keys[r];
    if (Empty(range)) continue;
    hull = Empty(hull) ? range : KeyRange{std::min(hull.lo, range.lo), std::max(hull.hi, range.hi)};
  }
  return hull;
}

bool SeesAny(const QueryBlock& queries, KeyRange slots) {
  return std::any_of(queries.keys, queries.keys + queries.rows, [&](KeyRange range) {
    return !Empty(range) && range.lo < slots.hi && range.hi > slots.lo;
  });
}

// One chunk of one job.
struct ChunkTask {
  int32_t job = 0;
  int64_t chunk = 0;
};

// The chunk's partial into o [vectors, value_dim] and lse [vectors]. False if no row sees any of
// it.
bool RunChunk(const AttendJob& job, int64_t chunk, const Workspace& workspace, float* o,
              float* lse) {
  ChunkParams params = job.params;
  params.chunk = {chunk * kChunkKeys, (chunk + 1) * kChunkKeys};
  if (!SeesAny(params.queries, params.chunk)) return false;
  AttendChunk(params, workspace, o, lse);
  return true;
}

void Clear(const AttendJob& job) {
  const QueryBlock& queries = job.params.queries;
  for (int32_t r = 0; r < queries.rows; ++r) {
    std::fill_n(job.o + RowAt(job, r) * job.params.value_dim,
                size_t(Heads(job)) * job.params.value_dim, 0.0f);
    std::fill_n(job.lse + RowAt(job, r), Heads(job), EmptyLse<float>());
  }
}

// out = w.a * out + w.b * o. The count is a constant so that the compiler makes vectors of it.
template <int32_t kColumns>
inline void FoldColumns(const MergeWeights<float>& w, const float* o, float* out) {
  for (int32_t d = 0; d < kColumns; ++d) out[d] = w.a * out[d] + w.b * o[d];
}

// Merges a chunk's partial into the job's result.
void Fold(const AttendJob& job, const float* o, const float* lse) {
  const int32_t value_dim = job.params.value_dim;
  const QueryBlock& queries = job.params.queries;
  for (int32_t vector = 0; vector < Vectors(job); ++vector, o += value_dim, ++lse) {
    if (*lse == EmptyLse<float>()) continue;
    const int32_t kv_head = vector / (queries.rows * queries.heads);
    const int32_t row = vector / queries.heads % queries.rows;
    const size_t at = RowAt(job, row) + kv_head * queries.heads + vector % queries.heads;
    const MergeWeights<float> w = Merge(job.lse[at], *lse);
    float* out = job.o + at * value_dim;
    int32_t d = 0;
    for (; d + kValueColumns <= value_dim; d += kValueColumns) {
      FoldColumns<kValueColumns>(w, o + d, out + d);
    }
    for (; d < value_dim; d += kCellColumns) FoldColumns<kCellColumns>(w, o + d, out + d);
    job.lse[at] = w.lse;
  }
}

// Scratch for any of the jobs.
Workspace MakeWorkspace(std::span<const AttendJob> jobs) {
  int32_t vectors = 0, key_dim = 0, value_dim = 0;
  for (const AttendJob& job : jobs) {
    vectors = std::max(vectors, Vectors(job));
    key_dim = std::max(key_dim, job.params.key_dim);
    value_dim = std::max(value_dim, job.params.value_dim);
  }
  return Workspace(vectors, key_dim, value_dim);
}

// Calls body(index, workspace) for every index in [0, count), on any thread.
template <typename Body>
void ForEach(int64_t count, std::span<const AttendJob> jobs, ThreadPool& pool, const Body& body) {
  std::atomic<int64_t> next{0};
  const int workers = static_cast<int>(std::min<int64_t>(pool.threads(), count));
  pool.Run(workers, [&](int) {
    const Workspace workspace = MakeWorkspace(jobs);
    for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) body(i, workspace);
  });
}

// Runs each job's chunks in order, jobs in parallel.
void RunWholeJobs(std::span<const AttendJob> jobs, const std::vector<int32_t>& which,
                  ThreadPool& pool) {
  ForEach(which.size(), jobs, pool, [&](int64_t i, const Workspace& workspace) {
    const AttendJob& job = jobs[which[i]];
    std::vector<float> partial(PartialFloats(job));
    float* lse = partial.data() + int64_t{Vectors(job)} * job.params.value_dim;
    const ChunkSpan span = ChunksOf(Hull(job.params.queries));
    for (int64_t chunk = span.first; chunk < span.first + span.count; ++chunk) {
      if (RunChunk(job, chunk, workspace, partial.data(), lse)) Fold(job, partial.data(), lse);
    }
  });
}

// Folds partials in the order of their tasks, whichever is done first: a thread that brings the one
// that is due folds it and those after it that wait, another leaves its own behind and goes on. So
// threads fold while others compute, and the order never depends on them.
class OrderedFold {
 public:
  explicit OrderedFold(size_t tasks) : brought_(tasks) {}

  // Task `i` is done. Calls fold(task) for every task that is due.
  template <typename Body>
  void Bring(size_t i, const Body& fold) {
    MutexLock lock(mutex_);
    brought_[i] = true;
    if (folding_) return;  // that thread looks again before it leaves
    folding_ = true;
    for (; next_ < brought_.size() && brought_[next_]; ++next_) {
      const size_t due = next_;
      lock.Unlock();
      fold(due);
      lock.Lock();
    }
    folding_ = false;
  }

 private:
  Mutex mutex_;
  std::vector<bool> brought_ TRIBUTARY_GUARDED_BY(mutex_);
  size_t next_ TRIBUTARY_GUARDED_BY(mutex_) = 0;
  bool folding_ TRIBUTARY_GUARDED_BY(mutex_) = false;
};

// Memory for partials. What was folded is taken again first, while it is still in a cache.
class PartialPool {
 public:
  using Partial = std::unique_ptr<float[]>;
  explicit PartialPool(int64_t floats) : floats_(floats) {}

  Partial Take() {
    const MutexLock lock(mutex_);
    if (free_.empty()) return std::make_unique_for_overwrite<float[]>(floats_);
    Partial partial = std::move(free_.back());
    free_.pop_back();
    return partial;
  }
  void GiveBack(Partial partial) {
    const MutexLock lock(mutex_);
    free_.push_back(std::move(partial));
  }

 private:
  const int64_t floats_;
  Mutex mutex_;
  std::vector<Partial> free_ TRIBUTARY_GUARDED_BY(mutex_);
};

// Runs tasks in parallel and folds them in order.
void RunTasks(std::span<const AttendJob> jobs, std::span<const ChunkTask> tasks, ThreadPool& pool) {
  int64_t floats = 0;
  for (const ChunkTask& task : tasks) floats = std::max(floats, PartialFloats(jobs[task.job]));
  PartialPool partials(floats);
  // Of the tasks that are done and not folded; null where no row saw a key.
  std::vector<PartialPool::Partial> done(tasks.size());
  const auto lse_of = [&](size_t i) {
    const AttendJob& job = jobs[tasks[i].job];
    return done[i].get() + int64_t{Vectors(job)} * job.params.value_dim;
  };
  OrderedFold fold(tasks.size());
  ForEach(tasks.size(), jobs, pool, [&](int64_t i, const Workspace& workspace) {
    done[i] = partials.Take();
    const bool seen =
        RunChunk(jobs[tasks[i].job], tasks[i].chunk, workspace, done[i].get(), lse_of(i));
    if (!seen) partials.GiveBack(std::move(done[i]));
    fold.Bring(i, [&](size_t due) {
      if (done[due] == nullptr) return;
      Fold(jobs[tasks[due].job], done[due].get(), lse_of(due));
      partials.GiveBack(std::move(done[due]));
    });
  });
}

// Runs the chunks of the jobs in parallel, as many at a time as their partials may take memory.
void RunSplitJobs(std::span<const AttendJob> jobs, const std::vector<int32_t>& which,
                  ThreadPool& pool) {
  std::vector<ChunkTask> tasks;
  int64_t largest = 0;  // partial of the tasks
  for (const int32_t index : which) {
    const ChunkSpan span = ChunksOf(Hull(jobs[index].params.queries));
    for (int64_t chunk = span.first; chunk < span.first + span.count; ++chunk) {
      const int64_t with_this = std::max(largest, PartialFloats(jobs[index]));
      if (with_this * (std::ssize(tasks) + 1) > kPartialFloats && !tasks.empty()) {
        RunTasks(jobs, tasks, pool);
        tasks.clear();
        largest = 0;
      }
      tasks.push_back({index, chunk});
      largest = std::max(largest, PartialFloats(jobs[index]));
    }
  }
  RunTasks(jobs, tasks, pool);
}

}  // namespace

void Attend(std::span<const AttendJob> jobs, ThreadPool& pool) {
  for (const AttendJob& job : jobs) Clear(job);
  AttendFurther(jobs, pool);
}

void AttendFurther(std::span<const AttendJob> jobs, ThreadPool& pool) {
  int64_t total = 0;
  for (const AttendJob& job : jobs) total += ChunksOf(Hull(job.params.queries)).count;
  std::vector<int32_t> whole, split;
  for (size_t i = 0; i < jobs.size(); ++i) {
    const int64_t chunks = ChunksOf(Hull(jobs[i].params.queries)).count;
    if (chunks == 0) continue;
    (ShouldSplit(chunks, total, pool.threads()) ? split : whole).push_back(i);
  }
  if (!split.empty()) RunSplitJobs(jobs, split, pool);
  if (!whole.empty()) RunWholeJobs(jobs, whole, pool);
}

}  // namespace tributary::cpu
