#include "worker/step_check.h"

#include <algorithm>
#include <limits>
#include <string>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "base/status/errors.h"
#include "base/status/status_macros.h"
#include "worker/choose_path.h"

namespace tributary::worker {
namespace {

std::string Entry(size_t i, absl::string_view field) {
  return absl::StrCat("entries[", i, "].", field);
}

absl::Status CheckCounts(size_t i, const StepEntry& entry, StepKind kind) {
  if (entry.first_position < 0) {
    return InvalidField(Entry(i, "first_position"), absl::StrCat("is ", entry.first_position));
  }
  if (entry.query_rows < 0) {
    return InvalidField(Entry(i, "query_rows"), absl::StrCat("is ", entry.query_rows));
  }
  if (entry.new_tokens < 0) {
    return InvalidField(Entry(i, "new_tokens"), absl::StrCat("is ", entry.new_tokens));
  }
  if (entry.query_rows == 0 && entry.new_tokens == 0) {
    return InvalidField(Entry(i, "query_rows"), "the entry has neither rows nor tokens");
  }
  if (kind == StepKind::kAppend && entry.query_rows != 0) {
    return InvalidField(Entry(i, "query_rows"), "an append has no query rows");
  }
  if (kind == StepKind::kDflash) {
    if (entry.query_rows != entry.new_tokens) {
      return InvalidField(Entry(i, "new_tokens"),
                          absl::StrCat("a draft's block has one key a row: must be ",
                                       entry.query_rows, ", is ", entry.new_tokens));
    }
    if (entry.replay) return InvalidField(Entry(i, "replay"), "a draft's block is not kept");
  }
  if (entry.first_row < 0) {
    return InvalidField(Entry(i, "first_row"), absl::StrCat("is ", entry.first_row));
  }
  const bool has_rows_after = entry.more_follows && entry.query_rows > 0;
  if (entry.first_row > 0 || (has_rows_after && entry.query_rows < entry.new_tokens)) {
    if (kind != StepKind::kPrefill || !SeesTokensAsTheyCame(entry.query_rows, entry.new_tokens)) {
      return InvalidField(Entry(i, "first_row"),
                          "only rows that see tokens as they came are apart");
    }
    if (int64_t{entry.first_row} + entry.query_rows > entry.new_tokens) {
      return InvalidField(Entry(i, "query_rows"),
                          absl::StrCat(entry.query_rows, " from row ", entry.first_row,
                                       " on, the entry has ", entry.new_tokens));
    }
    return absl::OkStatus();
  }
  if (entry.query_rows != 0 && entry.new_tokens != 0 && entry.query_rows != entry.new_tokens) {
    return InvalidField(
        Entry(i, "new_tokens"),
        absl::StrCat("must be 0 or query_rows (", entry.query_rows, "), is ", entry.new_tokens));
  }
  return absl::OkStatus();
}

absl::Status CheckCovered(size_t i, const StepEntry& entry, StepKind kind, int64_t pages,
                          int64_t page_tokens) {
  // Of a draft only the context lies in the cache.
  const bool draft = kind == StepKind::kDflash;
  if (draft && entry.first_position == 0) return absl::OkStatus();
  if (pages < 0) {
    return FieldError(absl::StatusCode::kNotFound, Entry(i, "sequence"),
                      absl::StrCat("sequence ", entry.sequence, " has no page table"));
  }
  const int64_t count = draft ? 0 : std::max(entry.query_rows, entry.new_tokens);
  const int64_t room = pages * page_tokens;
  if (entry.first_position > room - count) {
    return FieldError(absl::StatusCode::kOutOfRange, Entry(i, "first_position"),
                      absl::StrCat("positions up to ", entry.first_position, " + ", count,
                                   ", the table's ", pages, " pages hold ", room, " tokens"));
  }
  return absl::OkStatus();
}

absl::Status CheckTensor(absl::string_view field, const TensorView& tensor, int64_t rows,
                         int64_t heads, int64_t dim) {
  if (rows == 0) return absl::OkStatus();
  if (!IsUnscaled(tensor.dtype)) {
    return InvalidField(field,
                        absl::StrCat("dtype must be f32, bf16 or f16, is ", Name(tensor.dtype)));
  }
  const auto bytes = static_cast<int64_t>(BytesOf(tensor.dtype, rows * heads * dim));
  if (tensor.bytes != static_cast<size_t>(bytes)) {
    return InvalidField(
        field, absl::StrCat("must have ", bytes, " bytes: [", rows, ", ", heads, ", ", dim, "] of ",
                            Name(tensor.dtype), ", has ", tensor.bytes));
  }
  if (tensor.data == nullptr && !tensor.in_regions()) return InvalidField(field, "has no data");
  return absl::OkStatus();
}

absl::Status CheckTensors(const CacheSpec& spec, const StepCommand& step) {
  int64_t rows = 0;
  int64_t tokens = 0;
  for (const StepEntry& entry : step.entries) {
    rows += entry.query_rows;
    tokens += entry.new_tokens;
  }
  if (std::max(rows, tokens) > std::numeric_limits<int32_t>::max()) {
    return InvalidField("entries", absl::StrCat("too many rows: ", std::max(rows, tokens)));
  }
  const LayerGeometry g = GeometryOf(spec, spec.layers[static_cast<size_t>(step.layer)]);
  TRIBUTARY_RETURN_IF_ERROR(CheckTensor("q", step.q, rows, g.q_heads, g.kv.key_dim));
  TRIBUTARY_RETURN_IF_ERROR(CheckTensor("k", step.k, tokens, g.kv.kv_heads, g.kv.key_dim));
  TRIBUTARY_RETURN_IF_ERROR(CheckTensor("v", step.v, tokens, g.kv.kv_heads, g.kv.value_dim));
  if (tokens > 0 && step.k.dtype != step.v.dtype) {
    return InvalidField("v", absl::StrCat("must have the dtype of k (", Name(step.k.dtype),
                                          "), has ", Name(step.v.dtype)));
  }
  return absl::OkStatus();
}

absl::Status CheckPart(absl::string_view field, const RegionPart& part, int64_t bytes,
                       const std::function<bool(const RegionPart&)>& reaches) {
  if (part.bytes != static_cast<uint64_t>(bytes)) {
    return InvalidField(field, absl::StrCat("must have ", bytes, " bytes, has ", part.bytes));
  }
  if (reaches(part)) return absl::OkStatus();
  return FieldError(absl::StatusCode::kNotFound, field,
                    absl::StrCat(part.bytes, " bytes at ", part.offset, " of region ", part.region,
                                 ", which is not open or ends before"));
}

absl::Status CheckParts(absl::string_view field, const TensorView& tensor,
                        const std::function<bool(const RegionPart&)>& reaches) {
  if (!tensor.in_regions()) return absl::OkStatus();
  uint64_t bytes = 0;
  for (const RegionPart& part : tensor.parts) {
    TRIBUTARY_RETURN_IF_ERROR(CheckPart(field, part, static_cast<int64_t>(part.bytes), reaches));
    bytes += part.bytes;  // each lies in a region, so the sum stays far below 64 bits
  }
  if (bytes == tensor.bytes) return absl::OkStatus();
  return InvalidField(field, absl::StrCat("has ", tensor.bytes, " bytes, its parts have ", bytes));
}

absl::Status CheckCopies(const CacheSpec& spec, const std::vector<PageCopy>& copies) {
  const auto exists = [&](int32_t page) { return page >= 0 && page < spec.num_pages; };
  for (size_t i = 0; i < copies.size(); ++i) {
    if (!exists(copies[i].source) || !exists(copies[i].destination)) {
      return InvalidField(absl::StrCat("page_copies[", i, "]"),
                          absl::StrCat(copies[i].source, " to ", copies[i].destination,
                                       ": pages are 0 to ", spec.num_pages - 1));
    }
  }
  return absl::OkStatus();
}

// Whether an entry goes on with the sequence of the one before it: tokens below its length, which
// are written or compared where they lie.
bool GoesOn(const StepEntry& before, const StepEntry& entry) {
  const auto adds_none = [](const StepEntry& e) {
    return e.query_rows == 0 && (e.brings_back || e.replay);
  };
  return before.sequence == entry.sequence && adds_none(before) && adds_none(entry) &&
         entry.first_position >= before.first_position + before.new_tokens;
}

// A step of one sequence, the most frequent of all, needs no set.
absl::Status CheckDistinct(const std::vector<StepEntry>& entries) {
  if (entries.size() == 1) return absl::OkStatus();
  absl::flat_hash_set<SequenceId> seen;
  seen.reserve(entries.size());
  for (size_t i = 0; i < entries.size(); ++i) {
    if (i > 0 && GoesOn(entries[i - 1], entries[i])) continue;
    if (!seen.insert(entries[i].sequence).second) {
      return InvalidField(Entry(i, "sequence"),
                          absl::StrCat("sequence ", entries[i].sequence, " appears twice"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckStep(const CacheSpec& spec, int32_t ranks, const PageTables& tables,
                       const StepCommand& step) {
  if (step.layer < 0 || static_cast<size_t>(step.layer) >= spec.layers.size()) {
    return InvalidField("layer",
                        absl::StrCat("must be 0 to ", spec.layers.size() - 1, ", is ", step.layer));
  }
  if (step.entries.empty()) return InvalidField("entries", "must have one or more");
  TRIBUTARY_RETURN_IF_ERROR(CheckCopies(spec, step.page_copies));
  PageTables::Sizes updated;
  TRIBUTARY_RETURN_IF_ERROR(tables.Check(step.page_updates, "page_updates", &updated));
  const int64_t page_tokens = int64_t{spec.page_size} * ranks;
  for (size_t i = 0; i < step.entries.size(); ++i) {
    const StepEntry& entry = step.entries[i];
    TRIBUTARY_RETURN_IF_ERROR(CheckCounts(i, entry, step.kind));
    const auto it = updated.find(entry.sequence);
    const PageTable* table = it == updated.end() ? tables.Find(entry.sequence) : nullptr;
    const int64_t pages =
        it != updated.end() ? it->second : (table == nullptr ? -1 : int64_t{table->size()});
    TRIBUTARY_RETURN_IF_ERROR(CheckCovered(i, entry, step.kind, pages, page_tokens));
  }
  TRIBUTARY_RETURN_IF_ERROR(CheckDistinct(step.entries));
  return CheckTensors(spec, step);
}

absl::Status CheckStepRegions(const CacheSpec& spec, const StepCommand& step,
                              const std::function<bool(const RegionPart&)>& reaches) {
  TRIBUTARY_RETURN_IF_ERROR(CheckParts("q", step.q, reaches));
  TRIBUTARY_RETURN_IF_ERROR(CheckParts("k", step.k, reaches));
  TRIBUTARY_RETURN_IF_ERROR(CheckParts("v", step.v, reaches));
  if (step.outputs.empty()) return absl::OkStatus();
  const LayerGeometry g = GeometryOf(spec, spec.layers[static_cast<size_t>(step.layer)]);
  int64_t rows_left = 0;
  for (const StepEntry& entry : step.entries) rows_left += entry.query_rows;
  for (size_t i = 0; i < step.outputs.size(); ++i) {
    const StepOutput& output = step.outputs[i];
    const std::string field = absl::StrCat("outputs[", i, "]");
    if (output.rows < 1 || output.rows > rows_left) {
      return InvalidField(absl::StrCat(field, ".rows"),
                          absl::StrCat("is ", output.rows, ", ", rows_left, " are left"));
    }
    rows_left -= output.rows;
    if (!IsOutputType(output.format.dtype)) {
      return InvalidField(absl::StrCat(field, ".dtype"),
                          "must be f32, bf16, f16, fp8_e4m3 or nvfp4");
    }
    const int64_t heads = int64_t{output.rows} * g.q_heads;
    const auto o_bytes =
        static_cast<int64_t>(OutputBytes(output.format.dtype, heads * g.kv.value_dim));
    if (output.o.in_region()) {
      TRIBUTARY_RETURN_IF_ERROR(
          CheckPart(absl::StrCat(field, ".o"), output.o.part, o_bytes, reaches));
    }
    if (!output.lse.in_region()) continue;
    TRIBUTARY_RETURN_IF_ERROR(CheckPart(absl::StrCat(field, ".lse"), output.lse.part,
                                        heads * static_cast<int64_t>(sizeof(float)), reaches));
  }
  if (rows_left == 0) return absl::OkStatus();
  return InvalidField("outputs", absl::StrCat("leave ", rows_left, " rows without a place"));
}

}  // namespace tributary::worker
