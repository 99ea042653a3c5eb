// A step's plan as the device takes it: one array of bytes, which the host fills and copies to the
// device once per step, whatever the number of layers.
//
// The plan is made by host arithmetic over a StepPlan alone; no GPU is looked at. Sections of the
// array have room for a little more than they hold, in coarse steps. The sections of the next steps
// then lie in the same places, and a captured graph goes on fitting.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "collective/exchange/exchange.h"
#include "kernels/cuda/append/append_list.h"
#include "kernels/cuda/decode/attention.h"
#include "kernels/cuda/decode/block_attention.h"
#include "kernels/cuda/decode/shared_attention.h"
#include "kernels/cuda/decode/side_by_side.h"
#include "kernels/cuda/prefill/prefill.h"
#include "worker/cache_spec.h"
#include "worker/plan.h"

namespace tributary::worker {

// Rounds `count` up to one of four sizes per doubling, so by less than a quarter. Counts up to 8
// stay as they are.
int32_t PaddedCount(int32_t count);

// Where a section lies in the array, and how many elements it holds.
struct Section {
  size_t offset = 0;  // bytes
  size_t count = 0;
};

// One launch of the attention kernels.
struct AttentionLaunch {
  cuda::AttentionShape shape;
  cuda::KernelChoice choice;
  int32_t blocks = 0;
  Section items;   // WorkItem
  Section keys;    // RowKeys
  Section tables;  // int32
};

// What sequences of a pass have alike, attended to once for all of their rows
// (kernels/cuda/decode/shared_attention.h).
struct SharedLaunch {
  AttentionLaunch launch;  // over gathered rows; its tables are those of the pass
  int32_t rows = 0;        // gathered rows that launches are made for; 0: nothing is shared
  // int32 [rows]: which row of the pass each is. Without elements: they are the rows from first_row
  // on.
  Section gathered;
  int32_t first_row = 0;
  Section parts;      // RowParts [rows of the pass]
  Section part_rows;  // int32
  // The launch over the rest runs beside it. Then what this launch uses of the workspace lies
  // behind what that one uses: from this partial of one row on, and from this arrival counter.
  bool side_by_side = false;
  int64_t first_partial_row = 0;
  int32_t first_arrival = 0;
};

// One launch of the prefill kernels: over the context of a pass, or over the new tokens of the
// step, which see each other.
struct PrefillLaunch {
  cuda::PrefillShape shape;
  cuda::PrefillChoice choice;
  std::vector<cuda::PrefillPass> rounds;
  Section items;    // PrefillItem
  Section gathers;  // PrefillGather
  Section keys;     // RowKeys
  Section tables;   // int32; a launch over new tokens has none
  int64_t workspace_slots = 0;
  size_t workspace_bytes = 0;
};

// The launch in which the rows of a draft's block see each other.
struct BlockLaunch {
  Section entries;        // BlockEntry; rows are counted from the pass's first
  int32_t most_rows = 0;  // the most rows of one entry
};

// How the rows of a pass see the context: by the kernels for few rows of each sequence, or by those
// for many.
struct PassLaunch {
  bool many_rows = false;
  AttentionLaunch few;
  SharedLaunch shared;  // beside `few`, which then has what is not shared
  PrefillLaunch many;
  BlockLaunch block;  // where the step is a draft
};

// What a device plan depends on besides the step's plan.
struct StepTypes {
  DType q = DType::kBf16;
  LayerGeometry geometry;       // the layer's
  DType new_kv = DType::kBf16;  // what new tokens are attended to in: bf16 or f16
  collective::HeadSlice heads;  // for which this rank attends to new tokens
  bool draft = false;           // new tokens are merged with the context of all heads
  bool operator==(const StepTypes& other) const {
    return q == other.q && geometry == other.geometry && new_kv == other.new_kv &&
           heads.begin == other.heads.begin && heads.count == other.heads.count &&
           draft == other.draft;
  }
};

struct DevicePlanOptions {
  cuda::DeviceProperties device;
  cuda::KernelOptions kernels;
};

class DevicePlan {
 public:
  // Makes the plan in place. The memory of the plan before is used again.
  void Make(const CacheSpec& spec, const StepPlan& plan, const StepTypes& types,
            const DevicePlanOptions& options);

  // Whether it was made from these.
  bool IsOf(const StepPlan& plan, const StepTypes& types) const {
    return id_ != 0 && id_ == plan.id && types_ == types;
  }
  // Forgets what it was made from.
  void Clear() { id_ = 0; }

  // How many tokens and rows launches are made for. Slots of tokens beyond the plan's own are
  // kPadSlot, and no work item has rows beyond the plan's own.
  int32_t padded_tokens() const { return padded_tokens_; }
  int32_t padded_rows() const { return padded_rows_; }
  // How many rows of a pass launches are made for. They are more than the pass has only when it is
  // the only one.
  int32_t RowsOf(const RowPass& pass) const {
    return passes_.size() == 1 ? padded_rows_ : pass.row_count;
  }

  // int64. Empty: the step writes nothing. There is one slot for each token in its order or, where
  // listed_tokens is not empty, for each of those (kernels/cuda/append/append_list.h).
  const Section& write_slots() const { return write_slots_; }
  const Section& listed_tokens() const { return listed_tokens_; }  // int32
  // How many of these slots an append is launched for.
  int32_t append_places() const { return append_places_; }
  // int64. Empty: the step compares nothing. The two below belong to it.
  const Section& compare_slots() const { return compare_slots_; }
  const Section& entry_of_token() const { return entry_of_token_; }  // int32
  // int64. Empty: the step writes nothing to a replica.
  const Section& kept_slots() const { return kept_slots_; }
  int32_t entries() const { return entries_; }
  const PassLaunch& pass(size_t index) const { return passes_[index]; }
  // The new tokens of a prefill. Null when the step has none, or this rank has no heads of them.
  const PrefillLaunch* new_tokens() const { return has_new_tokens_ ? &new_tokens_ : nullptr; }
  // RowKeys [rows]: the tokens of a draft's block that each row sees.
  const Section& block_keys() const { return block_keys_; }
  // The most that any launch of the plan needs.
  int64_t partial_columns() const { return partial_columns_; }
  int32_t arrivals() const { return arrivals_; }
  int32_t gathered_rows() const { return gathered_rows_; }
  size_t workspace_bytes() const { return workspace_bytes_; }

  // The size of the array in bytes. Write fills it; `to` has room for so many.
  size_t bytes() const { return bytes_; }
  void Write(std::byte* to) const;

  // Whether launches depend on nothing but the array and the signature. Then a step can be a graph.
  bool repeatable() const;
  // For repeatable plans. Two plans have the same signature when their launches differ in nothing
  // but what the array holds.
  std::vector<uint64_t> Signature() const;

 private:
  struct Copy {
    Section section;
    const void* from = nullptr;
    size_t bytes = 0;
    size_t padded_bytes = 0;  // the rest is filled with 0xff: kPadSlot
  };

  // The host's copies of what a launch's sections hold.
  struct Host {
    cuda::Plan few;
    cuda::SharedPlan shared;
    cuda::Plan gathered;
    cuda::PrefillPlan many;
    std::vector<int32_t> tables;
    std::vector<cuda::BlockEntry> blocks;
  };

  void MakePass(const CacheSpec& spec, const StepPlan& plan, const RowPass& pass,
                const DevicePlanOptions& options, size_t index);
  void MakeFewRows(const CacheSpec& spec, const RowPass& pass, std::span<const KeyRange> keys,
                   const DevicePlanOptions& options, PassLaunch* launch, Host* host);
  // What a launch uses of the workspace.
  struct Used {
    int64_t partial_columns = 0;
    int32_t arrivals = 0;
  };
  // Plans the launch over what is shared, host->shared. Returns what both launches use.
  Used MakeShared(const cuda::SharedChoice& choice, Used of_rest, SharedLaunch* shared, Host* host);
  // Plans launch->shape for launch->choice, on a device or a part of it.
  Used MakeLaunch(const cuda::DeviceProperties& device, std::span<const cuda::PlanEntry> entries,
                  std::span<const KeyRange> keys, AttentionLaunch* launch, cuda::Plan* made);
  void MakeManyRows(const CacheSpec& spec, const RowPass& pass, std::span<const KeyRange> keys,
                    const DevicePlanOptions& options, PrefillLaunch* launch, Host* host);
  void MakeNewTokens(const StepPlan& plan, const DevicePlanOptions& options);
  // For a draft: which rows of each pass see which tokens of the block.
  void MakeBlocks(const StepPlan& plan);
  void PlacePrefill(const cuda::PrefillPlan& made, int64_t rows, PrefillLaunch* launch);
  // After the passes.
  void PlaceWriteSlots(const std::vector<int64_t>& slots);
  template <typename T>
  Section Place(const T* data, size_t count, size_t room);

  uint64_t id_ = 0;
  StepTypes types_;
  int32_t padded_tokens_ = 0;
  int32_t padded_rows_ = 0;
  int32_t entries_ = 0;
  Section write_slots_;
  Section listed_tokens_;
  int32_t append_places_ = 0;
  Section compare_slots_;
  Section entry_of_token_;
  Section kept_slots_;
  std::vector<PassLaunch> passes_;
  PrefillLaunch new_tokens_;
  bool has_new_tokens_ = false;
  std::vector<cuda::RowKeys> block_rows_;
  Section block_keys_;
  int64_t partial_columns_ = 0;
  int32_t arrivals_ = 0;
  int32_t gathered_rows_ = 0;
  size_t workspace_bytes_ = 0;
  size_t bytes_ = 0;

  cuda::AppendList append_list_;
  std::vector<Host> hosts_;  // one per pass, then one for the new tokens
  std::vector<cuda::PlanEntry> plan_entries_;
  std::vector<int32_t> table_begins_;  // of the pass's entries
  std::vector<cuda::PrefillEntry> prefill_entries_;
  std::vector<Copy> copies_;
};

}  // namespace tributary::worker
