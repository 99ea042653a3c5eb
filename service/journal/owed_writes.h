// What a full or failing disk has not taken, and is still to be written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "service/journal/sqlite.h"

namespace tributary::service {

struct JournalWrite {
  const char* sql = nullptr;
  std::vector<SqlValue> parameters;
  // What it is about: a later write of the same key takes its place. "": if it fails, whoever asked
  // for it does without, and it is not made later.
  std::string key;
  // Where too many such writes are owed, the oldest of them are given up.
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
  void Clear();

  bool empty() const { return writes_.empty(); }
  // By the order in which they came.
  const std::map<uint64_t, JournalWrite>& writes() const { return writes_; }

 private:
  void Remove(uint64_t number);

  const size_t most_;
  uint64_t next_ = 0;
  std::map<uint64_t, JournalWrite> writes_;
  absl::flat_hash_map<std::string, uint64_t> of_key_;
  std::set<uint64_t> dispensable_;
};

}  // namespace tributary::service
