#include "kernels/cuda/plan/plan.h"

#include <algorithm>

#include "kernels/cuda/layout/page_layout.h"

namespace tributary::cuda {
namespace {

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

KeyRange RangeOfRow(KeyRange keys) { return Empty(keys) ? KeyRange{0, 0} : keys; }

// Fills *columns, which is as new.
void MakeColumns(const PlanShape& shape, const PlanEntry& entry, int32_t column_begin,
                 std::span<const KeyRange> keys, PlannedColumns* columns) {
  WorkItem& item = columns->item;
  item.page_table = entry.page_table;
  item.row_begin = entry.row_begin;
  item.column_begin = column_begin;
  const int32_t columns_left = entry.row_count * shape.group - column_begin;
  item.column_count = std::min(shape.columns_per_block, columns_left);
  // (Divisions are slow enough to be seen: most sequences have one block of columns.)
  int32_t first = 0;
  int32_t last = entry.row_count - 1;
  if (item.column_count < entry.row_count * shape.group) {
    first = column_begin / shape.group;
    last = (column_begin + item.column_count - 1) / shape.group;
  }
  KeyRange any{INT32_MAX, 0};
  KeyRange all{0, INT32_MAX};
  for (int32_t row = first; row <= last; ++row) {
    const KeyRange range = RangeOfRow(keys[entry.row_begin + row]);
    all = {std::max(all.lo, range.lo), std::min(all.hi, range.hi)};
    if (!Empty(range)) any = {std::min(any.lo, range.lo), std::max(any.hi, range.hi)};
  }
  if (Empty(any)) return;
  item.key_begin = static_cast<int32_t>(any.lo);
  item.key_end = static_cast<int32_t>(any.hi);
  item.dense_begin = static_cast<int32_t>(all.lo);
  item.dense_end = static_cast<int32_t>(std::max(all.lo, all.hi));
  item.group_begin = item.key_begin / kGroupTokens;
  item.group_end = static_cast<int32_t>(CeilDiv(item.key_end, kGroupTokens));
  const auto groups = static_cast<uint32_t>(item.group_end - item.group_begin);
  const auto share = static_cast<uint32_t>(shape.share_groups);
  columns->shares = (groups + share - 1) / share;
}

// Cutting a job and merging its pieces costs about as much as a block needs for so many shares.
constexpr int64_t kCutShares = 2;
// And where lone pieces are merged faster, a block that ends one job and begins another loses about
// as much as so many take.
constexpr int64_t kMisfitShares = 6;

// All jobs of a call.
struct Jobs {
  int64_t count = 0;
  int64_t shares = 0;
  bool alike = false;  // of one size
};

// What the pieces of jobs cost a block.
struct Costs {
  int32_t share_bits = 0;  // a share costs 2^share_bits
  int64_t piece = 0;       // and a piece so much more than its shares

  int64_t Of(int64_t pieces, int64_t shares) const {
    return pieces * piece + (shares << share_bits);
  }
  int64_t Of(int64_t shares) const { return Of(1, shares); }
  int64_t HalfShare() const { return int64_t{1} << share_bits >> 1; }
  // The shares of the piece whose cost comes closest to `room`.
  int64_t SharesFor(int64_t room) const { return (room - piece + HalfShare()) >> share_bits; }
};

// Shares are all that counts where blocks have about as many pieces each.
constexpr Costs kOfSharesAlone{};

// The most that a block's items may cost so that no job need be cut: at most a sixteenth above an
// equal part, but for single jobs of up to kCutShares. 0 when there is no such number.
int64_t WholeJobQuota(const PlanShape& shape, std::span<const PlannedColumns> all_columns,
                      const Jobs& jobs, const Costs& costs) {
  const int64_t cost = costs.Of(jobs.count, jobs.shares);
  const int64_t quota = std::max<int64_t>(1, cost * 17 / (int64_t{shape.blocks} * 16));
  const int64_t largest = std::max(quota, costs.Of(kCutShares));
  int64_t blocks = 1;
  int64_t dealt = 0;
  for (const PlannedColumns& columns : all_columns) {
    const int64_t of_job = costs.Of(columns.shares);
    if (of_job > largest) return 0;
    for (int32_t head = 0; head < shape.kv_heads; ++head) {
      if (dealt > 0 && dealt + of_job > quota) {
        ++blocks;
        dealt = 0;
      }
      dealt += of_job;
    }
    if (blocks > shape.blocks) return 0;
  }
  return quota;
}

// How many blocks get work when jobs of one size are cut alike, so that a block has one piece, not
// the end of one job and the beginning of another. 0 when the blocks that this leaves idle cost
// more.
int32_t BlocksCutAlike(const PlanShape& shape, const Jobs& jobs, int64_t blocks) {
  const int64_t even = blocks / jobs.count * jobs.count;
  if (!jobs.alike || even == 0) return 0;
  // Cut elsewhere, each job has about one piece more, and merging costs as much again.
  const bool pays = shape.lone_pieces ? jobs.shares / even - jobs.shares / blocks <= kMisfitShares
                                      : (jobs.shares << kShareBits) * (blocks - even) <=
                                            2 * shape.piece_cost * jobs.count * even;
  return static_cast<int32_t>(pays ? even : 0);
}

// Into how many pieces a job is cut whatever else there is.
int32_t InvariantPieces(const WorkItem& job) {
  const int32_t groups = job.group_end - job.group_begin;
  return static_cast<int32_t>(CeilDiv(std::max(1, groups), kInvariantGroups));
}

// Deals jobs out to the blocks of the grid, in order.
class Dealer {
 public:
  // `cost`: of all pieces. Cuts nothing when `whole_job_quota` is not 0.
  Dealer(const PlanShape& shape, const Costs& costs, int64_t cost, int32_t blocks,
         int64_t whole_job_quota, Plan* plan)
      : shape_(shape),
        costs_(costs),
        least_room_(costs.Of(1) - costs.HalfShare()),
        plan_(*plan),
        whole_job_quota_(whole_job_quota) {
    plan_.blocks = blocks;
    plan_.items.resize(shape.blocks);
    quota_ = CeilDiv(cost << kQuotaBits, blocks);
    quota_end_ = EndOfBlock();
  }

  void Deal(const PlannedColumns& columns) {
    for (int32_t head = 0; head < shape_.kv_heads; ++head) {
      if (whole_job_quota_ > 0) {
        DealWhole(columns, head);
      } else if (shape_.batch_invariant) {
        CutAtFixedPlaces(columns, head);
      } else {
        CutAtQuotas(columns, head);
      }
    }
  }

 private:
  void DealWhole(const PlannedColumns& job, int32_t head) {
    const int64_t cost = costs_.Of(job.shares);
    if (dealt_ > 0 && dealt_ + cost > whole_job_quota_) {
      ++block_;
      last_of_block_ = -1;
      dealt_ = 0;
    }
    AddPiece(job, head);
    dealt_ += cost;
  }

  void CutAtQuotas(const PlannedColumns& job, int32_t head) {
    NextBlockIfFull();
    const int64_t cost = costs_.Of(job.shares);
    if (cost <= quota_end_ - dealt_ + costs_.HalfShare()) {
      AddPiece(job, head);
      dealt_ += cost;
      return;
    }
    const int32_t first_block = block_;
    int32_t first = 0;
    int32_t count = 0;
    int32_t group = job.item.group_begin;
    for (int64_t left = job.shares; left > 0; ++count) {
      NextBlockIfFull();
      const int64_t take = std::min(left, Room());
      left -= take;
      dealt_ += costs_.Of(take);
      WorkItem& piece = AddPiece(job, head);
      piece.group_begin = group;
      if (left > 0) piece.group_end = group += static_cast<int32_t>(take) * shape_.share_groups;
      piece.partial_begin = plan_.partials;
      piece.partial_index = count;
      piece.arrivals = plan_.arrivals;
      if (count == 0) first = last_of_block_;
    }
    // Every other piece is the first of its block.
    plan_.items[first].partial_count = count;
    for (int32_t block = first_block + 1; block <= block_; ++block) {
      plan_.items[block].partial_count = count;
    }
    AddCutJob(count);
  }

  void CutAtFixedPlaces(const PlannedColumns& job, int32_t head) {
    const int32_t job_begin = job.item.group_begin;
    const int32_t groups = std::max(1, job.item.group_end - job_begin);
    const int32_t count = InvariantPieces(job.item);
    int64_t dealt_of_job = 0;
    for (int32_t i = 0; i < count; ++i) {
      NextBlockIfFull();
      const int32_t end = std::min(groups, (i + 1) * kInvariantGroups);
      WorkItem& piece = AddPiece(job, head);
      piece.group_begin = job_begin + i * kInvariantGroups;
      piece.group_end = std::min(job.item.group_end, job_begin + end);
      if (count > 1) {
        piece.partial_begin = plan_.partials;
        piece.partial_index = i;
        piece.partial_count = count;
        piece.arrivals = plan_.arrivals;
      }
      const int64_t total = CeilDiv(end, shape_.share_groups);
      dealt_ += costs_.Of(total - dealt_of_job);
      dealt_of_job = total;
    }
    if (count > 1) AddCutJob(count);
  }

  // Shares of one more piece for which the block has room.
  int64_t Room() const { return costs_.SharesFor(quota_end_ - dealt_); }

  // Block b stops at (b + 1) * cost / blocks, or less than half a share and a piece from there. The
  // next one makes up for it; every block has room for a share, and the last for all that is left.
  void NextBlockIfFull() {
    while (quota_end_ - dealt_ < least_room_) {
      ++block_;
      last_of_block_ = -1;
      quota_end_ = EndOfBlock();
    }
  }

  int64_t EndOfBlock() const {
    return block_ + 1 < plan_.blocks ? (block_ + 1) * quota_ >> kQuotaBits : INT64_MAX / 2;
  }

  // The whole job, as the block's next item; the caller narrows it.
  WorkItem& AddPiece(const PlannedColumns& job, int32_t head) {
    int32_t index = block_;
    if (last_of_block_ < 0) {
      plan_.items[index] = job.item;
    } else {
      index = static_cast<int32_t>(plan_.items.size());
      plan_.items[last_of_block_].next = index;
      plan_.items.push_back(job.item);
    }
    last_of_block_ = index;
    plan_.items[index].kv_head = head;
    return plan_.items[index];
  }

  void AddCutJob(int32_t pieces) {
    plan_.arrivals += shape_.cluster_size;
    plan_.partials += pieces;
  }

  static constexpr int kQuotaBits = 24;

  const PlanShape& shape_;
  const Costs costs_;
  const int64_t least_room_;
  Plan& plan_;
  const int64_t whole_job_quota_;
  // What a block's pieces cost, in units of 2^-kQuotaBits, rounded up: exact for whole units, as
  // long as there are no more blocks than 2^(kQuotaBits / 2).
  int64_t quota_ = 0;
  int64_t quota_end_ = 0;  // where block_ stops
  int64_t dealt_ = 0;
  int32_t block_ = 0;
  int32_t last_of_block_ = -1;
};

// Deals plan->columns out.
void DealJobs(const PlanShape& shape, const Jobs& jobs, Plan* plan) {
  const auto deal = [&](const Costs& costs, int64_t cost, int64_t blocks, int64_t whole_job_quota) {
    Dealer dealer(shape, costs, cost, static_cast<int32_t>(blocks), whole_job_quota, plan);
    for (const PlannedColumns& columns : plan->columns) dealer.Deal(columns);
  };
  const int64_t blocks = std::min<int64_t>(shape.blocks, jobs.shares);
  const Costs of_pieces{kShareBits, shape.piece_cost};
  const Costs& of_jobs = jobs.alike ? kOfSharesAlone : of_pieces;
  if (shape.batch_invariant) {
    int64_t pieces = 0;
    for (const PlannedColumns& columns : plan->columns) pieces += InvariantPieces(columns.item);
    return deal(of_jobs, of_jobs.Of(pieces * shape.kv_heads, jobs.shares), blocks, 0);
  }
  if (const int64_t quota = WholeJobQuota(shape, plan->columns, jobs, of_jobs); quota > 0) {
    return deal(of_jobs, of_jobs.Of(jobs.count, jobs.shares), blocks, quota);
  }
  if (const int32_t even = BlocksCutAlike(shape, jobs, blocks); even > 0) {
    return deal(kOfSharesAlone, jobs.shares, even, 0);
  }
  // Blocks with the end of one job, others of the same size and the beginning of another have about
  // as many pieces each.
  const bool shares_alone = jobs.alike && (shape.lone_pieces || jobs.count >= blocks);
  const Costs& costs = shares_alone ? kOfSharesAlone : of_pieces;
  // All but the first block may have one more piece than there are jobs.
  deal(costs, costs.Of(jobs.count + blocks, jobs.shares), blocks, 0);
}

int64_t BlocksOfColumns(const PlanShape& shape, int64_t rows) {
  return CeilDiv(rows * shape.group, shape.columns_per_block);
}

}  // namespace

void PlanAttention(const PlanShape& shape, std::span<const PlanEntry> entries,
                   std::span<const KeyRange> keys, Plan* plan) {
  plan->items.clear();
  plan->columns.clear();
  plan->keys.resize(keys.size());
  plan->blocks = 0;
  plan->arrivals = 0;
  plan->partials = 0;
  for (size_t row = 0; row < keys.size(); ++row) {
    const KeyRange r = RangeOfRow(keys[row]);
    plan->keys[row] = {static_cast<int32_t>(r.lo), static_cast<int32_t>(r.hi)};
  }
  Jobs jobs;
  int64_t largest = 0;
  int64_t smallest = INT64_MAX;
  for (const PlanEntry& entry : entries) {
    for (int32_t c = 0; c < entry.row_count * shape.group; c += shape.columns_per_block) {
      MakeColumns(shape, entry, c, keys, &plan->columns.emplace_back());
      const int64_t of_job = plan->columns.back().shares;
      jobs.shares += of_job * shape.kv_heads;
      largest = std::max(largest, of_job);
      smallest = std::min(smallest, of_job);
    }
  }
  if (jobs.shares == 0) {
    plan->items.resize(shape.blocks);  // of no columns: nothing to do
    return;
  }
  jobs.count = static_cast<int64_t>(plan->columns.size()) * shape.kv_heads;
  jobs.alike = smallest == largest;
  DealJobs(shape, jobs, plan);
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
  bounds.arrivals = std::min(jobs, cuts) * shape.cluster_size;
  return bounds;
}

}  // namespace tributary::cuda
