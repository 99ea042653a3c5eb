#include "service/schedule/entry_list.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status/errors.h"
#include "base/status/rpc_errors.h"
#include "base/status/status_macros.h"
#include "worker/choose_path.h"

namespace tributary::service {
namespace {

// Sums of rows and tokens stay int32: they are in commands and kernels.
absl::Status AddTo(int32_t count, FieldName field, int32_t* sum) {
  if (__builtin_add_overflow(*sum, count, sum)) {
    return InvalidField(field(), "rows of all entries leave 31 bits");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status EntryList::AddRows(uint64_t sequence, int64_t first_position, int32_t query_rows,
                                int32_t new_tokens, bool draft) {
  const int index = static_cast<int>(entries_.size());
  if (query_rows < 1) {
    return InvalidField(EntryField(index, "query_rows"),
                        absl::StrCat("must be >= 1, is ", query_rows));
  }
  if (draft && new_tokens != query_rows) {
    return InvalidField(EntryField(index, "new_tokens"),
                        absl::StrCat("a draft brings the K/V of its block: must be query_rows (",
                                     query_rows, "), is ", new_tokens));
  }
  if (new_tokens != 0 && new_tokens != query_rows) {
    return InvalidField(
        EntryField(index, "new_tokens"),
        absl::StrCat("must be 0 or query_rows (", query_rows, "), is ", new_tokens));
  }
  return Add(sequence, first_position, query_rows, new_tokens, "new_tokens");
}

bool EntryList::Has(uint64_t sequence) {
  constexpr size_t kFew = 8;
  const auto of = [sequence](const worker::StepEntry& entry) { return entry.sequence == sequence; };
  if (entries_.size() <= kFew) return std::any_of(entries_.begin(), entries_.end(), of);
  for (size_t i = sequences_.empty() ? 0 : entries_.size() - 1; i < entries_.size(); ++i) {
    sequences_.insert(entries_[i].sequence);
  }
  return sequences_.contains(sequence);
}

absl::Status EntryList::AddTokens(uint64_t sequence, int64_t first_position, int32_t tokens,
                                  const char* field) {
  const int index = static_cast<int>(entries_.size());
  if (tokens < 1) {
    return InvalidField(EntryField(index, field), absl::StrCat("must be >= 1, is ", tokens));
  }
  return Add(sequence, first_position, 0, tokens, field);
}

absl::Status EntryList::Add(uint64_t sequence, int64_t first_position, int32_t query_rows,
                            int32_t new_tokens, const char* tokens_field) {
  const int index = static_cast<int>(entries_.size());
  const bool goes_on =
      query_rows == 0 && !entries_.empty() && entries_.back().sequence == sequence &&
      first_position >= entries_.back().first_position + entries_.back().new_tokens;
  if (Has(sequence) && !goes_on) {
    return InvalidField(EntryField(index, "sequence_id"),
                        absl::StrCat("sequence ", sequence, " appears twice"));
  }
  if (first_position < 0) {
    return InvalidField(EntryField(index, "first_position"),
                        absl::StrCat("must be >= 0, is ", first_position));
  }
  TRIBUTARY_RETURN_IF_ERROR(AddTo(
      query_rows, [index] { return EntryField(index, "query_rows"); }, &query_rows_));
  TRIBUTARY_RETURN_IF_ERROR(AddTo(
      new_tokens, [&] { return EntryField(index, tokens_field); }, &new_tokens_));
  entries_.push_back({.sequence = sequence,
                      .first_position = first_position,
                      .query_rows = query_rows,
                      .new_tokens = new_tokens});
  most_rows_ = std::max(most_rows_, query_rows);
  most_tokens_ = std::max(most_tokens_, new_tokens);
  return absl::OkStatus();
}

worker::StepKind EntryList::Kind() const { return worker::ChoosePath(most_rows_, most_tokens_); }

absl::Status CheckMode(worker::AttentionMode mode, const CacheTerms& terms,
                       const worker::CacheBackends& backends) {
  if (!terms.Allow(mode)) {
    return Unsupported(absl::StrCat("mode ", Name(mode)),
                       {"it is not among the modes that the cache was created for"});
  }
  const worker::Selection& selection = backends.of(mode);
  if (selection.ok()) return absl::OkStatus();
  return Unsupported(absl::StrCat("mode ", Name(mode)), selection.refusals);
}

}  // namespace tributary::service
