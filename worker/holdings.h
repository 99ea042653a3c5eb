// What a rank holds, as it tells a coordinator that has restarted.
//
// Workers are told tables in any case. Lengths follow from the steps that a worker carries out;
// what else becomes of a sequence comes to the worker as a Standing. So the ranks together know
// what the coordinator knew.
//
// Ranks carry out the same commands in the same order, but one may be ahead of another when the
// coordinator dies. Each therefore remembers how to undo what its peers may not have done: then all
// of them can be brought back to the last command that every one of them has carried out.
#pragma once

#include <compare>
#include <cstdint>
#include <deque>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "worker/cache_spec.h"
#include "worker/command.h"
#include "worker/page_tables.h"

namespace tributary::worker {

// A command's place in the order that all ranks share.
struct CommandMark {
  uint64_t epoch = 0;
  uint64_t number = 0;
  friend auto operator<=>(const CommandMark&, const CommandMark&) = default;
};

struct HeldSequence {
  SequenceId id = 0;
  std::vector<int32_t> pages;
  int32_t given_up = 0;            // leading entries of `pages` that are not its own any more
  std::vector<int64_t> lengths;    // [layers of the cache], tokens
  std::vector<int64_t> last_step;  // [layers of the cache], where the last step's tokens began
};

// What one command changed in one sequence: how it was before.
struct Undo {
  CommandMark mark;
  SequenceId sequence = 0;
  int32_t layer = -1;  // whose length changed; -1 where the table changed
  int64_t length = 0;
  int64_t last_step = 0;
  int32_t table_size = 0;
  int32_t first_index = 0;
  std::vector<int32_t> pages;  // the entries from first_index on
};

struct HeldCache {
  CacheId id = 0;
  CacheSpec spec;
  // Whether the rank joined late and has not been told yet that all pages of its share are there,
  // or all pages of the replica that it keeps.
  bool lacks_pages = false;
  bool replica_lacks_pages = false;
  std::vector<HeldSequence> sequences;
  std::vector<Undo> undo;  // in the order in which it was done
};

struct Holdings {
  int rank = -1;              // its rank when it took them; -1: it was never in a group
  uint64_t joined_epoch = 0;  // the last group that it connected to
  CommandMark last;           // the last command that it carried out
  std::vector<HeldCache> caches;
};

// The lengths of a cache's sequences on one rank. An operation takes time for those that it names.
class SequenceRecords {
 public:
  explicit SequenceRecords(int32_t layers) : layers_(layers) {}

  // kInvalidArgument naming "<field>[i]...".
  absl::Status Check(const std::vector<Standing>& standings, const char* field) const;
  // Must have passed Check.
  void Tell(const std::vector<Standing>& standings);

  // The caller is about to replace the table by what the coordinator holds to be true. Nothing that
  // was done to it before will be undone any more.
  void Settle(SequenceId sequence);
  void Drop(SequenceId sequence);
  // All ranks have carried out the commands of the epoch up to `mark`.
  void SettleUpTo(CommandMark mark);

  // Notes how to undo what a step is about to change in tables.
  void BeforeUpdates(CommandMark mark, const std::vector<PageUpdate>& updates,
                     const PageTables& tables);
  // Notes the lengths after a step that has been carried out.
  void AfterStep(CommandMark mark, const StepCommand& step);

  void Report(const PageTables& tables, HeldCache* held) const;

 private:
  struct Record {
    int32_t given_up = 0;
    std::vector<int64_t> lengths;
    std::vector<int64_t> last_step;
  };
  Record& Of(SequenceId sequence);

  const int32_t layers_;
  absl::flat_hash_map<SequenceId, Record> records_;
  std::deque<Undo> undo_;
};

}  // namespace tributary::worker
