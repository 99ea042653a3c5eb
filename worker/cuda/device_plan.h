// A step's plan as the device takes it: one block of bytes that the host fills and copies over once
// a step, whatever the number of layers.
//
// Pure host arithmetic over a StepPlan; no GPU is looked at. Sections of the block have room for a
// little more than is in them, in coarse steps, so that the next steps find theirs in the same
// places: a captured graph goes on fitting.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "collective/exchange/exchange.h"
#include "kernels/cuda/decode/attention.h"
#include "kernels/cuda/decode/block_attention.h"
#include "kernels/cuda/prefill/prefill.h"
#include "worker/cache_spec.h"
#include "worker/plan.h"

namespace tributary::worker {

// `count`, or a little more: at most a quarter, in steps of which a doubling has four. Up to 8 it
// is exact.
int32_t PaddedCount(int32_t count);

// Elements of a section in the block.
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

// One launch of the prefill kernels: over the context of a pass, or the new tokens of the step over
// each other.
struct PrefillLaunch {
  cuda::PrefillShape shape;
  cuda::PrefillChoice choice;
  std::vector<cuda::PrefillPass> rounds;
  Section items;    // PrefillItem
  Section gathers;  // PrefillGather
  Section keys;     // RowKeys
  Section tables;   // int32; context only
  int64_t workspace_slots = 0;
  size_t workspace_bytes = 0;
};

// A draft's block over itself, the rows of a pass.
struct BlockLaunch {
  Section entries;        // BlockEntry, rows counted from the pass's first
  int32_t most_rows = 0;  // of an entry
};

// The rows of a pass over the context: few of each sequence, or many.
struct PassLaunch {
  bool many_rows = false;
  AttentionLaunch few;
  PrefillLaunch many;
  BlockLaunch block;  // of a draft
};

// What a device plan depends on besides the step's plan.
struct StepTypes {
  DType q = DType::kBf16;
  LayerGeometry geometry;       // of the layer
  DType new_kv = DType::kBf16;  // as the new tokens are attended to: bf16 or f16
  collective::HeadSlice heads;  // of the new tokens' part
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

// Whether a pass with so many rows of one sequence is one of many rows. Batch-invariant results
// take the same kernel whoever is in the batch.
bool ManyRows(int32_t most_rows, const cuda::KernelOptions& kernels);

class DevicePlan {
 public:
  // Makes the plan in place; memory is reused.
  void Make(const CacheSpec& spec, const StepPlan& plan, const StepTypes& types,
            const DevicePlanOptions& options);

  // Whether it was made from these.
  bool IsOf(const StepPlan& plan, const StepTypes& types) const {
    return id_ != 0 && id_ == plan.id && types_ == types;
  }
  // Forgets what it was made from.
  void Clear() { id_ = 0; }

  // Tokens and rows that launches are made for; slots of tokens beyond the plan's are kPadSlot, and
  // no work item has rows beyond.
  int32_t padded_tokens() const { return padded_tokens_; }
  int32_t padded_rows() const { return padded_rows_; }
  // The rows of a pass that launches are made for: more than it has only when it is the only one.
  int32_t RowsOf(const RowPass& pass) const {
    return passes_.size() == 1 ? padded_rows_ : pass.row_count;
  }

  const Section& write_slots() const { return write_slots_; }        // int64; empty: no writing
  const Section& compare_slots() const { return compare_slots_; }    // int64; empty: no comparing
  const Section& entry_of_token() const { return entry_of_token_; }  // int32; with compare_slots
  int32_t entries() const { return entries_; }                       // with compare_slots
  const PassLaunch& pass(size_t index) const { return passes_[index]; }
  // Of a prefill. Null when the step has no such part, or no heads of it on this rank.
  const PrefillLaunch* new_tokens() const { return has_new_tokens_ ? &new_tokens_ : nullptr; }
  const Section& block_keys() const { return block_keys_; }  // RowKeys [rows], tokens; a draft's
  // The most that any launch needs.
  int64_t partial_columns() const { return partial_columns_; }
  int32_t arrivals() const { return arrivals_; }
  size_t workspace_bytes() const { return workspace_bytes_; }

  // The block. Write fills it; `to` has bytes() bytes.
  size_t bytes() const { return bytes_; }
  void Write(std::byte* to) const;

  // Whether launches depend on nothing but the block and the signature: then a step can be a graph.
  bool repeatable() const;
  // Of a repeatable plan: equal for two whose launches are the same but for what the block holds.
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
    cuda::PrefillPlan many;
    std::vector<int32_t> tables;
    std::vector<cuda::BlockEntry> blocks;
  };

  void MakePass(const CacheSpec& spec, const StepPlan& plan, const RowPass& pass,
                const DevicePlanOptions& options, size_t index);
  void MakeFewRows(const CacheSpec& spec, const RowPass& pass, std::span<const KeyRange> keys,
                   const DevicePlanOptions& options, AttentionLaunch* launch, Host* host);
  void MakeManyRows(const CacheSpec& spec, const RowPass& pass, std::span<const KeyRange> keys,
                    const DevicePlanOptions& options, PrefillLaunch* launch, Host* host);
  void MakeNewTokens(const StepPlan& plan, const DevicePlanOptions& options);
  // The part of a draft's block of every pass.
  void MakeBlocks(const StepPlan& plan);
  void PlacePrefill(const cuda::PrefillPlan& made, int64_t rows, PrefillLaunch* launch);
  template <typename T>
  Section Place(const T* data, size_t count, size_t room);

  uint64_t id_ = 0;
  StepTypes types_;
  int32_t padded_tokens_ = 0;
  int32_t padded_rows_ = 0;
  int32_t entries_ = 0;
  Section write_slots_;
  Section compare_slots_;
  Section entry_of_token_;
  std::vector<PassLaunch> passes_;
  PrefillLaunch new_tokens_;
  bool has_new_tokens_ = false;
  std::vector<cuda::RowKeys> block_rows_;
  Section block_keys_;
  int64_t partial_columns_ = 0;
  int32_t arrivals_ = 0;
  size_t workspace_bytes_ = 0;
  size_t bytes_ = 0;

  std::vector<Host> hosts_;  // of the passes, then of the new tokens
  std::vector<cuda::PlanEntry> plan_entries_;
  std::vector<cuda::PrefillEntry> prefill_entries_;
  std::vector<Copy> copies_;
};

}  // namespace tributary::worker
