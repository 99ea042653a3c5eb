#include "kernels/cuda/plan/plan.h"

#include <algorithm>

#include "kernels/cuda/layout/page_layout.h"

namespace tributary::cuda {
namespace {

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

KeyRange RangeOfRow(KeyRange keys) { return Empty(keys) ? KeyRange{0, 0} : keys; }

// Fills *tile, which must be as new, with the query tile that begins at packed_begin.
void MakeTile(const DecodePlanShape& shape, const PlanEntry& entry, int32_t packed_begin,
              std::span<const KeyRange> keys, PlannedTile* tile) {
  WorkItem& item = tile->item;
  item.page_table = entry.page_table;
  item.row_begin = entry.row_begin;
  item.packed_begin = packed_begin;
  const int32_t packed_left = entry.row_count * shape.gqa_ratio - packed_begin;
  item.packed_count = std::min(shape.tile_rows, packed_left);
  // (Divisions take time that can be measured, and most sequences have one tile.)
  int32_t first = 0;
  int32_t last = entry.row_count - 1;
  if (item.packed_count < entry.row_count * shape.gqa_ratio) {
    first = packed_begin / shape.gqa_ratio;
    last = (packed_begin + item.packed_count - 1) / shape.gqa_ratio;
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
  item.strip_begin = item.key_begin / kStripSlots;
  item.strip_end = static_cast<int32_t>(CeilDiv(item.key_end, kStripSlots));
  const auto strips = static_cast<uint32_t>(item.strip_end - item.strip_begin);
  const auto share = static_cast<uint32_t>(shape.share_strips);
  tile->shares = (strips + share - 1) / share;
}

// Splitting a job and merging its splits costs about as much as a thread block needs for so many
// shares.
constexpr int64_t kCutShares = 2;
// Where lone splits are merged faster, a thread block that ends one job and begins another loses
// about as much time as so many shares take.
constexpr int64_t kMisfitShares = 6;

// All jobs of a call.
struct Jobs {
  int64_t count = 0;
  int64_t shares = 0;
  bool alike = false;  // all of one size
};

// What the splits of jobs cost a thread block.
struct Costs {
  int32_t share_bits = 0;  // a share costs 2^share_bits
  int64_t split = 0;       // and a split costs so much more than its shares

  int64_t Of(int64_t splits, int64_t shares) const {
    return splits * split + (shares << share_bits);
  }
  int64_t Of(int64_t shares) const { return Of(1, shares); }
  int64_t HalfShare() const { return int64_t{1} << share_bits >> 1; }
  // The shares of the split whose cost comes closest to `room`.
  int64_t SharesFor(int64_t room) const { return (room - split + HalfShare()) >> share_bits; }
};

// Shares are all that counts if all thread blocks have about as many splits.
constexpr Costs kOfSharesAlone{};

// The most that a thread block's items may cost so that no job need be split: at most a sixteenth
// above an equal part, except for single jobs of up to kCutShares. 0 if there is no such number.
int64_t WholeJobQuota(const DecodePlanShape& shape, std::span<const PlannedTile> tiles,
                      const Jobs& jobs, const Costs& costs) {
  const int64_t cost = costs.Of(jobs.count, jobs.shares);
  const int64_t quota = std::max<int64_t>(1, cost * 17 / (int64_t{shape.blocks} * 16));
  const int64_t largest = std::max(quota, costs.Of(kCutShares));
  int64_t blocks = 1;
  int64_t dealt = 0;
  for (const PlannedTile& tile : tiles) {
    const int64_t of_job = costs.Of(tile.shares);
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

// How many thread blocks get work if jobs of one size are split alike, so that a thread block has
// one split and not the end of one job and the beginning of another. 0 if the thread blocks that
// this leaves idle cost more.
int32_t BlocksCutAlike(const DecodePlanShape& shape, const Jobs& jobs, int64_t blocks) {
  const int64_t even = blocks / jobs.count * jobs.count;
  if (!jobs.alike || even == 0) return 0;
  // Split elsewhere, each job has about one split more, and merging costs as much again.
  const bool pays = shape.lone_splits ? jobs.shares / even - jobs.shares / blocks <= kMisfitShares
                                      : (jobs.shares << kShareBits) * (blocks - even) <=
                                            2 * shape.split_cost * jobs.count * even;
  return static_cast<int32_t>(pays ? even : 0);
}

// Into how many splits a batch-invariant plan cuts a job.
int32_t InvariantSplits(const WorkItem& job) {
  const int32_t strips = job.strip_end - job.strip_begin;
  return static_cast<int32_t>(CeilDiv(std::max(1, strips), kInvariantStrips));
}

// Deals jobs out to the thread blocks of the grid, in order.
class Dealer {
 public:
  // `cost`: of all splits. Splits nothing if `whole_job_quota` is not 0.
  Dealer(const DecodePlanShape& shape, const Costs& costs, int64_t cost, int32_t blocks,
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

  void Deal(const PlannedTile& tile) {
    for (int32_t head = 0; head < shape_.kv_heads; ++head) {
      if (whole_job_quota_ > 0) {
        DealWhole(tile, head);
      } else if (shape_.batch_invariant) {
        CutAtFixedPlaces(tile, head);
      } else {
        CutAtQuotas(tile, head);
      }
    }
  }

 private:
  void DealWhole(const PlannedTile& job, int32_t head) {
    const int64_t cost = costs_.Of(job.shares);
    if (dealt_ > 0 && dealt_ + cost > whole_job_quota_) {
      ++block_;
      last_of_block_ = -1;
      dealt_ = 0;
    }
    AddSplit(job, head);
    dealt_ += cost;
  }

  void CutAtQuotas(const PlannedTile& job, int32_t head) {
    NextBlockIfFull();
    const int64_t cost = costs_.Of(job.shares);
    if (cost <= quota_end_ - dealt_ + costs_.HalfShare()) {
      AddSplit(job, head);
      dealt_ += cost;
      return;
    }
    const int32_t first_block = block_;
    int32_t first = 0;
    int32_t count = 0;
    int32_t strip = job.item.strip_begin;
    for (int64_t left = job.shares; left > 0; ++count) {
      NextBlockIfFull();
      const int64_t take = std::min(left, Room());
      left -= take;
      dealt_ += costs_.Of(take);
      WorkItem& split = AddSplit(job, head);
      split.strip_begin = strip;
      if (left > 0) split.strip_end = strip += static_cast<int32_t>(take) * shape_.share_strips;
      split.partial_begin = plan_.partials;
      split.split_index = count;
      split.arrivals = plan_.arrivals;
      if (count == 0) first = last_of_block_;
    }
    // Every other split is the first item of its thread block.
    plan_.items[first].split_count = count;
    for (int32_t block = first_block + 1; block <= block_; ++block) {
      plan_.items[block].split_count = count;
    }
    AddCutJob(count);
  }

  void CutAtFixedPlaces(const PlannedTile& job, int32_t head) {
    const int32_t job_begin = job.item.strip_begin;
    const int32_t strips = std::max(1, job.item.strip_end - job_begin);
    const int32_t count = InvariantSplits(job.item);
    int64_t dealt_of_job = 0;
    for (int32_t i = 0; i < count; ++i) {
      NextBlockIfFull();
      const int32_t end = std::min(strips, (i + 1) * kInvariantStrips);
      WorkItem& split = AddSplit(job, head);
      split.strip_begin = job_begin + i * kInvariantStrips;
      split.strip_end = std::min(job.item.strip_end, job_begin + end);
      if (count > 1) {
        split.partial_begin = plan_.partials;
        split.split_index = i;
        split.split_count = count;
        split.arrivals = plan_.arrivals;
      }
      const int64_t total = CeilDiv(end, shape_.share_strips);
      dealt_ += costs_.Of(total - dealt_of_job);
      dealt_of_job = total;
    }
    if (count > 1) AddCutJob(count);
  }

  // Shares of one more split for which the thread block has room.
  int64_t Room() const { return costs_.SharesFor(quota_end_ - dealt_); }

  // Thread block b stops at (b + 1) * cost / blocks, or less than half a share and a split from
  // there. The next one makes up for it. Every one has room for a share, and the last one for all
  // that is left.
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

  // Adds the whole job as the thread block's next item; the caller narrows it.
  WorkItem& AddSplit(const PlannedTile& job, int32_t head) {
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

  void AddCutJob(int32_t splits) {
    plan_.arrivals += shape_.cluster_size;
    plan_.partials += splits;
  }

  static constexpr int kQuotaBits = 24;

  const DecodePlanShape& shape_;
  const Costs costs_;
  const int64_t least_room_;
  Plan& plan_;
  const int64_t whole_job_quota_;
  // What a thread block's splits may cost, in units of 2^-kQuotaBits, rounded up: exact for whole
  // units, as long as there are no more than 2^(kQuotaBits / 2) thread blocks.
  int64_t quota_ = 0;
  int64_t quota_end_ = 0;  // where block_ stops
  int64_t dealt_ = 0;
  int32_t block_ = 0;
  int32_t last_of_block_ = -1;
};

// Deals plan->tiles out.
void DealJobs(const DecodePlanShape& shape, const Jobs& jobs, Plan* plan) {
  const auto deal = [&](const Costs& costs, int64_t cost, int64_t blocks, int64_t whole_job_quota) {
    Dealer dealer(shape, costs, cost, static_cast<int32_t>(blocks), whole_job_quota, plan);
    for (const PlannedTile& tile : plan->tiles) dealer.Deal(tile);
  };
  const int64_t blocks = std::min<int64_t>(shape.blocks, jobs.shares);
  const Costs of_splits{kShareBits, shape.split_cost};
  const Costs& of_jobs = jobs.alike ? kOfSharesAlone : of_splits;
  if (shape.batch_invariant) {
    int64_t splits = 0;
    for (const PlannedTile& tile : plan->tiles) splits += InvariantSplits(tile.item);
    return deal(of_jobs, of_jobs.Of(splits * shape.kv_heads, jobs.shares), blocks, 0);
  }
  if (const int64_t quota = WholeJobQuota(shape, plan->tiles, jobs, of_jobs); quota > 0) {
    return deal(of_jobs, of_jobs.Of(jobs.count, jobs.shares), blocks, quota);
  }
  if (const int32_t even = BlocksCutAlike(shape, jobs, blocks); even > 0) {
    return deal(kOfSharesAlone, jobs.shares, even, 0);
  }
  // Thread blocks with the end of one job, others of the same size and the beginning of another
  // have about as many splits each.
  const bool shares_alone = jobs.alike && (shape.lone_splits || jobs.count >= blocks);
  const Costs& costs = shares_alone ? kOfSharesAlone : of_splits;
  // Every thread block but the first may add one split to the number of jobs.
  deal(costs, costs.Of(jobs.count + blocks, jobs.shares), blocks, 0);
}

int64_t TilesOf(const DecodePlanShape& shape, int64_t rows) {
  return CeilDiv(rows * shape.gqa_ratio, shape.tile_rows);
}

}  // namespace

void PlanAttention(const DecodePlanShape& shape, std::span<const PlanEntry> entries,
                   std::span<const KeyRange> keys, Plan* plan) {
  plan->items.clear();
  plan->tiles.clear();
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
    for (int32_t p = 0; p < entry.row_count * shape.gqa_ratio; p += shape.tile_rows) {
      MakeTile(shape, entry, p, keys, &plan->tiles.emplace_back());
      const int64_t of_job = plan->tiles.back().shares;
      jobs.shares += of_job * shape.kv_heads;
      largest = std::max(largest, of_job);
      smallest = std::min(smallest, of_job);
    }
  }
  if (jobs.shares == 0) {
    plan->items.resize(shape.blocks);  // without packed rows: nothing to do
    return;
  }
  jobs.count = static_cast<int64_t>(plan->tiles.size()) * shape.kv_heads;
  jobs.alike = smallest == largest;
  DealJobs(shape, jobs, plan);
}

PlanBounds BoundPlan(const DecodePlanShape& shape, int64_t max_entries, int64_t max_rows,
                     int64_t max_keys_in_batch) {
  // Each entry wastes at most one query tile, and each cut adds one item.
  const int64_t tiles = TilesOf(shape, max_rows) + max_entries;
  const int64_t jobs = tiles * shape.kv_heads;
  PlanBounds bounds;
  int64_t cuts = shape.blocks;
  if (shape.batch_invariant) {
    const int64_t tiles_of_a_sequence = TilesOf(shape, max_rows);
    cuts = std::max<int64_t>(cuts, tiles_of_a_sequence * shape.kv_heads *
                                       CeilDiv(max_keys_in_batch, kInvariantStrips * kStripSlots));
  }
  bounds.items = shape.blocks + jobs + cuts;
  bounds.partials = 2 * cuts;
  bounds.arrivals = std::min(jobs, cuts) * shape.cluster_size;
  return bounds;
}

}  // namespace tributary::cuda
