// What a full or failing disk has not taken, and is still to be written.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "service/journal/sqlite.h"

namespace tributary::service {

struct JournalWrite {
  const char* sql = nullptr;
  std::vector<SqlValue> parameters;
  // What it is about: a later write of the same key takes its place. "": if it fails, whoever asked
  // for it does without, and it is not made later.
  std::string key;
  // Of too many writes that are owed the oldest of these are given up.
  bool dispensable = false;
  std::function<void(const absl::Status&)> done;  // may be null
};

// In order, the last of each key. Used from one thread at a time.
class OwedWrites {
 public:
  // `most`: of the dispensable ones.
  explicit OwedWrites(size_t most) : most_(most) {}

  // Adds, behind the others, those of these writes that have a key.
  void Add(const std::deque<JournalWrite>& failed);
  void Clear() { writes_.clear(); }

  bool empty() const { return writes_.empty(); }
  const std::deque<JournalWrite>& writes() const { return writes_; }

 private:
  const size_t most_;
  std::deque<JournalWrite> writes_;
};

}  // namespace tributary::service
