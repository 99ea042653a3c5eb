#include "kernels/cuda/plan.h"

#include <algorithm>

#include "kernels/cuda/page_layout.h"

namespace tributary::cuda {
namespace {

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A block of columns of one sequence, the same for each of its kv heads.
struct ColumnBlock {
  WorkItem item;
  int64_t shares = 1;  // a job without keys still has to write its empty result
};

KeyRange RangeOfRow(KeyRange keys) { return Empty(keys) ? KeyRange{0, 0} : keys; }

ColumnBlock MakeColumnBlock(const PlanShape& shape, const PlanEntry& entry, int32_t column_begin,
                            std::span<const KeyRange> keys) {
  ColumnBlock block;
  WorkItem& item = block.item;
  item.page_table = entry.page_table;
  item.row_begin = entry.row_begin;
  item.column_begin = column_begin;
  item.column_count =
      std::min(shape.columns_per_block, entry.row_count * shape.group - column_begin);
  const int32_t first = column_begin / shape.group;
  const int32_t last = (column_begin + item.column_count - 1) / shape.group;
  KeyRange any{INT32_MAX, 0};
  KeyRange all{0, INT32_MAX};
  for (int32_t row = first; row <= last; ++row) {
    const KeyRange range = RangeOfRow(keys[entry.row_begin + row]);
    all = {std::max(all.lo, range.lo), std::min(all.hi, range.hi)};
    if (!Empty(range)) any = {std::min(any.lo, range.lo), std::max(any.hi, range.hi)};
  }
  if (Empty(any)) return block;
  item.key_begin = static_cast<int32_t>(any.lo);
  item.key_end = static_cast<int32_t>(any.hi);
  item.dense_begin = static_cast<int32_t>(all.lo);
  item.dense_end = static_cast<int32_t>(std::max(all.lo, all.hi));
  item.group_begin = item.key_begin / kGroupTokens;
  item.group_end = static_cast<int32_t>(CeilDiv(item.key_end, kGroupTokens));
  block.shares = CeilDiv(item.group_end - item.group_begin, shape.share_groups);
  return block;
}

// The most shares a block may take so that no job need be cut: at most a sixteenth above an equal
// share, since cutting and merging cost about that. 0 when there is no such number.
int64_t WholeJobQuota(const PlanShape& shape, std::span<const ColumnBlock> columns,
                      int64_t shares) {
  const int64_t quota = shares * 17 / (int64_t{shape.blocks} * 16);
  int64_t blocks = 1;
  int64_t dealt = 0;
  for (const ColumnBlock& block : columns) {
    if (block.shares > quota) return 0;
    for (int32_t head = 0; head < shape.kv_heads; ++head) {
      if (dealt + block.shares > quota) {
        ++blocks;
        dealt = 0;
      }
      dealt += block.shares;
    }
  }
  return blocks <= shape.blocks ? quota : 0;
}

// Deals jobs out to the blocks of the grid, in order.
class Dealer {
 public:
  // Cuts nothing when `whole_job_quota` is not 0.
  Dealer(const PlanShape& shape, int64_t shares, int64_t whole_job_quota, Plan* plan)
      : shape_(shape), plan_(*plan), whole_job_quota_(whole_job_quota) {
    plan_.blocks = static_cast<int32_t>(std::min<int64_t>(shape.blocks, shares));
    plan_.items.resize(shape.blocks);
    shares_ = shares;
    quota_end_ = QuotaEnd(0);
  }

  void Deal(const ColumnBlock& block) {
    for (int32_t head = 0; head < shape_.kv_heads; ++head) {
      WorkItem item = block.item;
      item.kv_head = head;
      if (whole_job_quota_ > 0) {
        DealWhole(item, block.shares);
        continue;
      }
      shape_.batch_invariant ? CutAtFixedPlaces(item) : CutAtQuotas(item, block.shares);
    }
  }

 private:
  // The share before which block_ stops.
  int64_t QuotaEnd(int64_t block) const { return (block + 1) * shares_ / plan_.blocks; }

  void DealWhole(const WorkItem& job, int64_t shares) {
    if (dealt_ + shares > whole_job_quota_) {
      ++block_;
      last_of_block_ = -1;
      dealt_ = 0;
    }
    AddPiece(job, 0, shares * shape_.share_groups);
    pieces_.clear();
    dealt_ += shares;
  }

  void CutAtQuotas(const WorkItem& job, int64_t shares) {
    const size_t first = pieces_.size();
    for (int64_t done = 0; done < shares;) {
      NextBlockIfFull();
      const int64_t take = std::min(shares - done, quota_end_ - dealt_);
      AddPiece(job, done * shape_.share_groups, (done + take) * shape_.share_groups);
      done += take;
      dealt_ += take;
    }
    FinishJob(first);
  }

  void CutAtFixedPlaces(const WorkItem& job) {
    const size_t first = pieces_.size();
    const int64_t groups = std::max(1, job.group_end - job.group_begin);
    int64_t dealt_of_job = 0;
    for (int64_t begin = 0; begin < groups; begin += kInvariantGroups) {
      NextBlockIfFull();
      const int64_t end = std::min<int64_t>(groups, begin + kInvariantGroups);
      AddPiece(job, begin, end);
      const int64_t total = CeilDiv(end, shape_.share_groups);
      dealt_ += total - dealt_of_job;
      dealt_of_job = total;
    }
    FinishJob(first);
  }

  void NextBlockIfFull() {
    while (dealt_ >= quota_end_ && block_ + 1 < plan_.blocks) {
      quota_end_ = QuotaEnd(++block_);
      last_of_block_ = -1;
    }
  }

  // Groups [begin, end) of the job, counted from its first.
  void AddPiece(const WorkItem& job, int64_t begin, int64_t end) {
    WorkItem item = job;
    item.group_begin = static_cast<int32_t>(job.group_begin + begin);
    item.group_end = static_cast<int32_t>(std::min<int64_t>(job.group_end, job.group_begin + end));
    int32_t index = block_;
    if (last_of_block_ < 0) {
      plan_.items[block_] = item;
    } else {
      index = static_cast<int32_t>(plan_.items.size());
      plan_.items[last_of_block_].next = index;
      plan_.items.push_back(item);
    }
    last_of_block_ = index;
    pieces_.push_back(index);
  }

  void FinishJob(size_t first) {
    const int32_t count = static_cast<int32_t>(pieces_.size() - first);
    if (count > 1) {
      for (int32_t i = 0; i < count; ++i) {
        WorkItem& item = plan_.items[pieces_[first + i]];
        item.job = plan_.jobs_cut;
        item.partial_begin = plan_.partials;
        item.partial_index = i;
        item.partial_count = count;
      }
      plan_.cut_items.push_back(pieces_[first]);
      ++plan_.jobs_cut;
      plan_.partials += count;
    }
    pieces_.resize(first);
  }

  const PlanShape& shape_;
  Plan& plan_;
  const int64_t whole_job_quota_;
  int64_t shares_ = 0;
  int64_t quota_end_ = 0;
  int64_t dealt_ = 0;
  int32_t block_ = 0;
  int32_t last_of_block_ = -1;
  std::vector<int32_t> pieces_;  // of the job being dealt, as indices of items
};

int64_t BlocksOfColumns(const PlanShape& shape, int64_t rows) {
  return CeilDiv(rows * shape.group, shape.columns_per_block);
}

}  // namespace

void PlanAttention(const PlanShape& shape, std::span<const PlanEntry> entries,
                   std::span<const KeyRange> keys, Plan* plan) {
  plan->items.clear();
  plan->keys.clear();
  plan->cut_items.assign(1, 0);
  plan->blocks = 0;
  plan->jobs_cut = 0;
  plan->partials = 0;
  for (const KeyRange& range : keys) {
    const KeyRange r = RangeOfRow(range);
    plan->keys.push_back({static_cast<int32_t>(r.lo), static_cast<int32_t>(r.hi)});
  }
  std::vector<ColumnBlock> columns;
  int64_t shares = 0;
  for (const PlanEntry& entry : entries) {
    for (int32_t c = 0; c < entry.row_count * shape.group; c += shape.columns_per_block) {
      columns.push_back(MakeColumnBlock(shape, entry, c, keys));
      shares += columns.back().shares * shape.kv_heads;
    }
  }
  if (shares > 0) {
    const int64_t whole = shape.batch_invariant ? 0 : WholeJobQuota(shape, columns, shares);
    Dealer dealer(shape, shares, whole, plan);
    for (const ColumnBlock& block : columns) dealer.Deal(block);
  } else {
    plan->items.resize(shape.blocks);  // of no columns: nothing to do
  }
  plan->cut_items[0] = plan->jobs_cut;
}

PlanBounds BoundPlan(const PlanShape& shape, int64_t max_entries, int64_t max_rows,
                     int64_t max_keys_in_batch) {
  // Each entry wastes at most one block of columns, and each cut adds one item.
  const int64_t column_blocks = BlocksOfColumns(shape, max_rows) + max_entries;
  const int64_t jobs = column_blocks * shape.kv_heads;
  PlanBounds bounds;
  int64_t cuts = shape.blocks;
  if (shape.batch_invariant) {
    const int64_t blocks_of_a_row = BlocksOfColumns(shape, max_rows);
    cuts = std::max<int64_t>(cuts, blocks_of_a_row * shape.kv_heads *
                                       CeilDiv(max_keys_in_batch, kInvariantGroups * kGroupTokens));
  }
  bounds.items = shape.blocks + jobs + cuts;
  bounds.partials = 2 * cuts;
  bounds.jobs_cut = std::min(jobs, cuts);
  return bounds;
}

}  // namespace tributary::cuda
