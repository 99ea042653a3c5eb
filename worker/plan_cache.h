// Plans of the last few steps, so that the layers of a step plan once.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "worker/plan.h"

namespace tributary::worker {

// Of one cache on one rank. Steps of several hosts, each with its own batch, may alternate layer by
// layer, and a model may have two windows: hence a few plans, not one.
class PlanCache {
 public:
  // Plans of so many kinds are kept.
  static constexpr size_t kPlans = 16;

  PlanCache() { slots_.reserve(kPlans); }

  // The plan of a step: found, or made in place of the one unused longest. Valid until plans of
  // kPlans other kinds have been asked for. Arguments as for PlanStep.
  const StepPlan& Get(const PlanShape& shape, const DcpLayout& layout,
                      std::span<const StepEntry> entries, TableOfEntry tables);

  // How often Get made a plan, and how often it found one.
  int64_t made() const { return made_; }
  int64_t reused() const { return reused_; }

 private:
  // A plan is a pure function of these (the layout and page size of a cache never change). A
  // table's version stands for its entries, so that finding a plan costs the batch, not the tables.
  struct EntryKey {
    uint64_t sequence = 0;
    uint64_t first_position = 0;
    uint64_t counts = 0;  // query rows and new tokens
    uint64_t first_row = 0;
    uint64_t table_version = 0;  // doubled, and one more for a repeat
  };
  struct Slot {
    StepKind kind = StepKind::kDecode;
    RowMask mask;
    int32_t ward = -1;
    std::vector<EntryKey> entries;
    StepPlan plan;
    int64_t used = 0;
  };

  static EntryKey KeyOf(const StepEntry& entry, const PageTable& table) {
    return {.sequence = entry.sequence,
            .first_position = static_cast<uint64_t>(entry.first_position),
            .counts = static_cast<uint64_t>(static_cast<uint32_t>(entry.new_tokens)) << 32 |
                      static_cast<uint32_t>(entry.query_rows),
            .first_row = static_cast<uint64_t>(entry.first_row),
            .table_version = table.version() << 1 | (entry.replay ? 1 : 0)};
  }

  static bool Matches(const Slot& slot, const PlanShape& shape, std::span<const StepEntry> entries,
                      TableOfEntry tables);

  std::vector<Slot> slots_;  // never grows beyond what it has reserved
  int64_t clock_ = 0;
  int64_t made_ = 0;
  int64_t reused_ = 0;
};

}  // namespace tributary::worker
