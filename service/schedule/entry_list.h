// The entries of a call or of a session's step, checked as far as that goes without looking at any
// sequence.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "service/data/resolve_spec.h"
#include "worker/backends.h"
#include "worker/command.h"

namespace tributary::service {

// Collects entries. INVALID_ARGUMENT names the field, "entries[i].*".
class EntryList {
 public:
  // An entry of a step with query rows. `draft`: it is a draft's block.
  absl::Status AddRows(uint64_t sequence, int64_t first_position, int32_t query_rows,
                       int32_t new_tokens, bool draft);
  // An entry of a step that computes nothing. A sequence may have several of them, one behind the
  // other and in the order of their positions, that bring lost tokens again (SequenceTable).
  // `field`: what the request calls their number.
  absl::Status AddTokens(uint64_t sequence, int64_t first_position, int32_t tokens,
                         const char* field);

  const std::vector<worker::StepEntry>& entries() const { return entries_; }
  std::vector<worker::StepEntry> TakeEntries() { return std::move(entries_); }
  int32_t query_rows() const { return query_rows_; }  // sums over entries
  int32_t new_tokens() const { return new_tokens_; }
  // Of the entries that are not draft blocks.
  worker::StepKind Kind() const;

 private:
  absl::Status Add(uint64_t sequence, int64_t first_position, int32_t query_rows,
                   int32_t new_tokens, const char* tokens_field);

  std::vector<worker::StepEntry> entries_;
  // Whether an entry of the sequence was added.
  bool Has(uint64_t sequence);

  absl::flat_hash_set<uint64_t> sequences_;  // of the entries, once there are more than a few
  int32_t query_rows_ = 0;
  int32_t new_tokens_ = 0;
  int32_t most_rows_ = 0;  // of an entry
  int32_t most_tokens_ = 0;
};

// FAILED_PRECONDITION, with the reasons, unless a cache serves the mode: its backends were chosen
// when it was created, and not every mode need have one.
absl::Status CheckMode(worker::AttentionMode mode, const CacheTerms& terms,
                       const worker::CacheBackends& backends);

}  // namespace tributary::service
