#include "service/client/groups/split_call.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/status/errors.h"
#include "service/client/attend_message.h"

namespace tributary::client {
namespace {

// RowRange of a tensor that one entry owns.
struct RowRange {
  int64_t begin = 0;
  int64_t count = 0;
  int64_t end() const { return begin + count; }
};

int64_t QueryRowsOf(const AttendEntry& entry) { return entry.query_rows; }
int64_t NewTokensOf(const AttendEntry& entry) { return entry.new_tokens; }
int64_t NewTokensOf(const AppendCall::Entry& entry) { return entry.tokens; }

template <typename Entries, typename CountOf>
std::vector<RowRange> RowsOf(const Entries& entries, CountOf count_of) {
  std::vector<RowRange> rows;
  int64_t begin = 0;
  for (const auto& entry : entries) {
    rows.push_back({begin, count_of(entry)});
    begin = rows.back().end();
  }
  return rows;
}

// The indices of the entries of each part.
std::vector<std::vector<size_t>> ByGroup(const std::vector<size_t>& groups, bool in_runs) {
  std::vector<std::vector<size_t>> parts;
  for (size_t i = 0; i < groups.size(); ++i) {
    auto same = parts.end();
    if (in_runs) {
      if (i > 0 && groups[i] == groups[i - 1]) same = parts.end() - 1;
    } else {
      same = std::find_if(parts.begin(), parts.end(),
                          [&](const auto& part) { return groups[part.front()] == groups[i]; });
    }
    if (same == parts.end()) {
      parts.push_back({i});
    } else {
      same->push_back(i);
    }
  }
  return parts;
}

bool SideBySide(const std::vector<size_t>& entries) {
  return entries.back() - entries.front() + 1 == entries.size();
}

// The rows of these entries: where they lie when they lie side by side, or else a copy.
const void* InputOf(const void* whole, const std::vector<RowRange>& rows,
                    const std::vector<size_t>& entries, uint64_t row_bytes,
                    std::vector<std::byte>* copy) {
  if (whole == nullptr) return nullptr;
  const auto* bytes = static_cast<const std::byte*>(whole);
  if (SideBySide(entries)) {
    return bytes + static_cast<uint64_t>(rows[entries.front()].begin) * row_bytes;
  }
  for (const size_t i : entries) {
    const std::byte* from = bytes + static_cast<uint64_t>(rows[i].begin) * row_bytes;
    copy->insert(copy->end(), from, from + static_cast<uint64_t>(rows[i].count) * row_bytes);
  }
  return copy->data();
}

// Bytes of one row of `heads` heads of `dim` elements each.
uint64_t RowBytes(v1::DType dtype, int32_t heads, int32_t dim) {
  return OutputBytes(dtype, static_cast<uint64_t>(heads) * static_cast<uint64_t>(dim));
}

uint64_t OutputRowElements(const AttendCall& call) {
  return static_cast<uint64_t>(call.q_heads) * static_cast<uint64_t>(ValueDim(call));
}

// Copies rows of `row_bytes` from `from`, where the part's follow each other, to their places.
void Scatter(const std::byte* from, std::byte* to, uint64_t row_bytes,
             const std::vector<RowRange>& rows, const std::vector<size_t>& entries) {
  for (const size_t i : entries) {
    const uint64_t bytes = static_cast<uint64_t>(rows[i].count) * row_bytes;
    std::memcpy(to + static_cast<uint64_t>(rows[i].begin) * row_bytes, from, bytes);
    from += bytes;
  }
}

// The refusal of a part, with the index that its entry has in the whole call.
absl::Status RenameEntry(const absl::Status& status, const std::vector<size_t>& entries) {
  const std::string field = FieldOf(status);
  absl::string_view rest = field;
  size_t index = 0;
  if (!absl::ConsumePrefix(&rest, "entries[")) return status;
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), index);
  if (error != std::errc() || index >= entries.size()) return status;
  rest.remove_prefix(static_cast<size_t>(end - rest.data()));
  return RenameField(absl::StrCat("entries[", entries[index], rest), status);
}

template <typename Part, typename Call>
std::vector<std::unique_ptr<Part>> PartsOf(const Call& call, const std::vector<size_t>& groups) {
  std::vector<std::unique_ptr<Part>> parts;
  for (std::vector<size_t>& entries : ByGroup(groups, call.device != nullptr)) {
    const size_t group = groups[entries.front()];
    parts.push_back(std::make_unique<Part>(call, group, std::move(entries)));
  }
  return parts;
}

}  // namespace

void AttendPart::GiveResults(const AttendCall& whole) const {
  if (!copies_results_) return;
  const std::vector<RowRange> rows = RowsOf(whole.entries, QueryRowsOf);
  const uint64_t elements = OutputRowElements(whole);
  auto* output = static_cast<std::byte*>(whole.output);
  if (OutputDType(whole) == v1::DTYPE_NVFP4) {
    // All elements of a tensor come before all of its scales.
    const uint64_t all = static_cast<uint64_t>(rows.back().end()) * elements;
    const uint64_t mine = output_.size() / 9 * 16;  // elements: 9 bytes hold 16 of them
    Scatter(output_.data(), output, elements / 2, rows, entries_);
    Scatter(output_.data() + mine / 2, output + all / 2, elements / 16, rows, entries_);
  } else {
    Scatter(output_.data(), output, OutputBytes(OutputDType(whole), elements), rows, entries_);
  }
  if (whole.lse == nullptr) return;
  Scatter(reinterpret_cast<const std::byte*>(lse_.data()), reinterpret_cast<std::byte*>(whole.lse),
          static_cast<uint64_t>(whole.q_heads) * sizeof(float), rows, entries_);
}

template <typename Call>
CallPart<Call>::CallPart(const Call& whole, size_t group, std::vector<size_t> entries)
    : call_(whole), entries_(std::move(entries)), group_(group) {
  call_.entries.clear();
  for (const size_t i : entries_) call_.entries.push_back(whole.entries[i]);
  const std::vector<RowRange> tokens =
      RowsOf(whole.entries, [](const auto& entry) { return NewTokensOf(entry); });
  const uint64_t k_row = RowBytes(whole.dtype, whole.kv_heads, whole.head_dim);
  const uint64_t v_row = RowBytes(whole.dtype, whole.kv_heads, ValueDim(whole));
  call_.k = InputOf(whole.k, tokens, entries_, k_row, &k_);
  call_.v = InputOf(whole.v, tokens, entries_, v_row, &v_);
}

template <typename Call>
absl::Status CallPart<Call>::Renamed(const absl::Status& status) const {
  return RenameEntry(status, entries_);
}

template class CallPart<AttendCall>;
template class CallPart<AppendCall>;

AttendPart::AttendPart(const AttendCall& whole, size_t group, std::vector<size_t> entries)
    : CallPart(whole, group, std::move(entries)) {
  const std::vector<RowRange> rows = RowsOf(whole.entries, QueryRowsOf);
  const uint64_t q_row = RowBytes(whole.dtype, whole.q_heads, whole.head_dim);
  call_.q = InputOf(whole.q, rows, entries_, q_row, &q_);

  const v1::DType dtype = OutputDType(whole);
  const uint64_t elements = OutputRowElements(whole);
  copies_results_ = dtype == v1::DTYPE_NVFP4 || !SideBySide(entries_);
  if (copies_results_) {
    uint64_t count = 0;
    for (const size_t i : entries_) count += static_cast<uint64_t>(rows[i].count);
    output_.resize(OutputBytes(dtype, count * elements));
    call_.output = output_.data();
    if (whole.lse == nullptr) return;
    lse_.resize(count * static_cast<size_t>(whole.q_heads));
    call_.lse = lse_.data();
  } else {
    const auto begin = static_cast<uint64_t>(rows[entries_.front()].begin);
    call_.output = static_cast<std::byte*>(whole.output) + OutputBytes(dtype, begin * elements);
    if (whole.lse == nullptr) return;
    call_.lse = whole.lse + begin * static_cast<uint64_t>(whole.q_heads);
  }
}

absl::StatusOr<std::vector<std::unique_ptr<AttendPart>>> Split(const AttendCall& call,
                                                               const std::vector<size_t>& groups) {
  if (OutputDType(call) == v1::DTYPE_NVFP4 && call.device != nullptr) {
    return InvalidField("output_dtype",
                        "NVFP4 in memory of a GPU is for calls whose sequences live in one group");
  }
  return PartsOf<AttendPart>(call, groups);
}

std::vector<std::unique_ptr<AppendPart>> Split(const AppendCall& call,
                                               const std::vector<size_t>& groups) {
  return PartsOf<AppendPart>(call, groups);
}

}  // namespace tributary::client
