#include "kernels/validate.h"

#include <cmath>
#include <string>
#include <string_view>

#include "kernels/head_dims.h"

namespace tributary {
namespace {

// A field of one of several things, "entries[2].row_begin": spelled only where it is refused.
struct Indexed {
  template <typename Index>
  Indexed(std::string_view of, Index at, std::string_view then = {})
      : name(of), index(static_cast<int64_t>(at)), suffix(then) {}

  std::string_view name;
  int64_t index;
  std::string_view suffix;
};

// Collects the first refusal, so that a list of checks reads as a list.
class Checker {
 public:
  template <typename Field, typename... Parts>
  void Require(bool condition, const Field& field, const Parts&... reason) {
    if (!condition) Refuse(StatusCode::kInvalidArgument, field, reason...);
  }
  template <typename Field, typename... Parts>
  void RequireSupported(bool condition, const Field& field, const Parts&... reason) {
    if (!condition) Refuse(StatusCode::kFailedPrecondition, field, reason...);
  }
  bool ok() const { return status_.ok(); }
  Status status() const { return status_; }

 private:
  static std::string Text(const char* s) { return s; }
  static std::string Text(const std::string& s) { return s; }
  static std::string Text(const Indexed& field) {
    std::string text(field.name);
    return text.append("[").append(std::to_string(field.index)).append("]").append(field.suffix);
  }
  static std::string Text(int64_t n) { return std::to_string(n); }
  static std::string Text(int32_t n) { return std::to_string(n); }
  static std::string Text(float x) { return std::to_string(x); }

  template <typename Field, typename... Parts>
  void Refuse(StatusCode code, const Field& field, const Parts&... reason) {
    if (!status_.ok()) return;
    std::string message = Text(field);
    message += ": ";
    ((message += Text(reason)), ...);
    status_ = Status(code, std::move(message));
  }

  Status status_;
};

void CheckHeadDims(Checker& check, std::string_view prefix, int32_t key_dim, int32_t value_dim) {
  const HeadDims* row = FindHeadDims(key_dim, value_dim);
  if (row != nullptr && IsServed(*row)) return;
  const std::string field(prefix);
  check.Require(key_dim > 0, field + "key_dim", key_dim, " is not positive");
  check.Require(value_dim > 0, field + "value_dim", value_dim, " is not positive");
  check.RequireSupported(false, field + "key_dim", HeadDimsName(key_dim, value_dim), " is not ",
                         HeadDimsList(IsServed));
}

void CheckScales(Checker& check, const char* field, const float* scales, int32_t heads) {
  if (scales == nullptr) return;
  for (int32_t h = 0; h < heads && check.ok(); ++h) {
    check.Require(std::isfinite(scales[h]) && scales[h] > 0, Indexed(field, h), scales[h],
                  " is not a positive finite number");
  }
}

void CheckCache(Checker& check, const PagedKv& kv) {
  check.Require(
      kv.page_size == 16 || kv.page_size == 32 || kv.page_size == 64 || kv.page_size == 128,
      "kv.page_size", kv.page_size, " is not 16, 32, 64 or 128");
  check.Require(kv.num_pages >= 0, "kv.num_pages", kv.num_pages, " is negative");
  const KvGeometry& g = kv.geometry;
  check.Require(g.kv_heads > 0, "kv.kv_heads", g.kv_heads, " is not positive");
  CheckHeadDims(check, "kv.", g.key_dim, g.value_dim);
  check.RequireSupported(!g.value_in_key, "kv.value_in_key", "is not supported");
  check.Require(BitsOf(g.dtype) != 0, "kv.dtype", Name(g.dtype), " is no type of element");
  check.Require(kv.num_pages <= 0 || kv.base != nullptr, "kv.base", "is null");
  CheckScales(check, "kv.k_scale", kv.k_scale, g.kv_heads);
  CheckScales(check, "kv.v_scale", kv.v_scale, g.kv_heads);
}

void CheckGqaRatio(Checker& check, int32_t q_heads, int32_t kv_heads) {
  check.Require(q_heads > 0, "q_heads", q_heads, " is not positive");
  check.Require(kv_heads > 0, "kv_heads", kv_heads, " is not positive");
  if (!check.ok()) return;
  check.Require(q_heads % kv_heads == 0, "q_heads", q_heads, " is not a multiple of ", kv_heads,
                " kv heads");
  check.RequireSupported(q_heads / kv_heads <= kMaxGqaRatio, "q_heads", q_heads / kv_heads,
                         " query heads per KV head; at most ", kMaxGqaRatio, " are supported");
}

void CheckLogits(Checker& check, float sm_scale, float soft_cap) {
  check.Require(std::isfinite(sm_scale), "sm_scale", sm_scale, " is not finite");
  check.Require(std::isfinite(soft_cap) && soft_cap >= 0, "soft_cap", soft_cap,
                " is not a finite number >= 0");
}

// Entries number the rows one after another and leave none out.
template <typename Entries>
void CheckEntries(Checker& check, const Entries& entries, int32_t rows) {
  int64_t next = 0;
  for (size_t i = 0; i < entries.size() && check.ok(); ++i) {
    check.Require(entries[i].row_count >= 0, Indexed("entries", i, ".row_count"),
                  entries[i].row_count, " is negative");
    check.Require(entries[i].row_begin == next, Indexed("entries", i, ".row_begin"),
                  entries[i].row_begin, " is not ", next, ", where the entry before ends");
    next += entries[i].row_count;
  }
  check.Require(next == rows, "entries", "cover ", next, " rows of ", rows);
}

// Every key a row of the entry may see is on a page of the cache. Consecutive rows see nearly the
// same keys, so pages already looked at are not looked at again.
void CheckPages(Checker& check, const AttentionParams& p, size_t index) {
  const AttentionEntry& entry = p.entries[index];
  const int64_t held = int64_t(entry.pages.size()) * p.kv.page_size;
  int64_t seen_begin = 0, seen_end = 0;
  for (int32_t i = 0; i < entry.row_count && check.ok(); ++i) {
    const int32_t row = entry.row_begin + i;
    const KeyRange range = p.keys[row];
    if (Empty(range)) continue;
    check.Require(range.lo >= 0, Indexed("keys", row, ".lo"), range.lo, " is negative");
    check.Require(range.hi <= held, Indexed("keys", row, ".hi"), range.hi, " is past the ", held,
                  " slots of the entry's pages");
    if (!check.ok()) return;
    const int64_t begin = range.lo / p.kv.page_size;
    const int64_t end = (range.hi - 1) / p.kv.page_size + 1;
    for (int64_t page = begin; page < end; ++page) {
      if (page >= seen_begin && page < seen_end) {
        page = seen_end - 1;
        continue;
      }
      const int32_t id = entry.pages[page];
      if (id >= 0 && id < p.kv.num_pages) continue;  // names are put together for a refusal only
      check.Require(false, Indexed("entries[" + std::to_string(index) + "].pages", page), id,
                    " is not one of ", p.kv.num_pages, " pages");
      return;
    }
    const bool touches = begin <= seen_end && end >= seen_begin && seen_begin < seen_end;
    seen_begin = touches ? std::min(begin, seen_begin) : begin;
    seen_end = touches ? std::max(end, seen_end) : end;
  }
}

// Runs of slots that entries share lie one behind the other from slot 0 on, for each entry.
void CheckShared(Checker& check, const AttentionParams& p) {
  if (p.shared.empty()) return;
  std::vector<int64_t> end(p.entries.size(), 0);
  for (size_t i = 0; i < p.shared.size() && check.ok(); ++i) {
    const SharedPages& run = p.shared[i];
    const Indexed slots{"shared", i, ".slots"};
    check.Require(
        !Empty(run.slots) && run.slots.lo % kSharedSlots == 0 && run.slots.hi % kSharedSlots == 0,
        slots, run.slots.lo, " to ", run.slots.hi, " is not in units of ", kSharedSlots);
    for (const int32_t entry : run.entries) {
      const bool exists = entry >= 0 && size_t(entry) < p.entries.size();
      check.Require(exists, Indexed("shared", i, ".entries"), entry, " is no entry");
      if (!check.ok()) return;
      check.Require(end[entry] == run.slots.lo, slots, run.slots.lo, " is not ", end[entry],
                    ", where entry ", entry, " shared last");
      end[entry] = run.slots.hi;
    }
  }
}

}  // namespace

Status Validate(const AppendParams& p) {
  Checker check;
  CheckCache(check, p.kv);
  check.Require(IsUnscaled(p.input_dtype), "input_dtype", Name(p.input_dtype),
                " is not f32, bf16 or f16");
  check.Require(p.tokens >= 0, "tokens", p.tokens, " is negative");
  if (!check.ok() || p.tokens == 0) return check.status();
  check.Require(p.k != nullptr, "k", "is null");
  check.Require(p.v != nullptr, "v", "is null");
  check.Require(p.slots != nullptr, "slots", "is null");
  const int64_t slots = int64_t{p.kv.num_pages} * p.kv.page_size;
  for (int32_t t = 0; t < p.tokens && check.ok(); ++t) {
    if (p.slots[t] == kPadSlot || (p.slots[t] >= 0 && p.slots[t] < slots)) continue;
    check.Require(false, Indexed("slots", t), p.slots[t], " is not one of ", slots,
                  " slots, nor padding");
  }
  return check.status();
}

Status Validate(const AttentionParams& p) {
  Checker check;
  CheckCache(check, p.kv);
  check.Require(IsUnscaled(p.q_dtype), "q_dtype", Name(p.q_dtype), " is not f32, bf16 or f16");
  check.Require(p.rows >= 0, "rows", p.rows, " is negative");
  CheckGqaRatio(check, p.q_heads, p.kv.geometry.kv_heads);
  CheckLogits(check, p.sm_scale, p.soft_cap);
  CheckEntries(check, p.entries, p.rows);
  if (!check.ok() || p.rows == 0) return check.status();
  check.Require(p.q != nullptr, "q", "is null");
  check.Require(p.keys != nullptr, "keys", "is null");
  check.Require(p.o != nullptr, "o", "is null");
  check.Require(p.lse != nullptr, "lse", "is null");
  for (size_t i = 0; i < p.entries.size() && check.ok(); ++i) CheckPages(check, p, i);
  CheckShared(check, p);
  return check.status();
}

Status Validate(const NewTokensParams& p) {
  Checker check;
  check.Require(IsUnscaled(p.q_dtype), "q_dtype", Name(p.q_dtype), " is not f32, bf16 or f16");
  check.Require(IsUnscaled(p.kv_dtype), "kv_dtype", Name(p.kv_dtype), " is not f32, bf16 or f16");
  check.Require(p.rows >= 0, "rows", p.rows, " is negative");
  CheckGqaRatio(check, p.q_heads, p.kv_heads);
  CheckHeadDims(check, "", p.key_dim, p.value_dim);
  check.Require(p.head_begin >= 0, "head_begin", p.head_begin, " is negative");
  check.Require(p.head_count >= 0 && int64_t{p.head_begin} + p.head_count <= p.q_heads,
                "head_count", p.head_count, " heads from ", p.head_begin, " are not within ",
                p.q_heads);
  CheckLogits(check, p.sm_scale, p.soft_cap);
  CheckEntries(check, p.entries, p.rows);
  if (!check.ok() || p.rows == 0 || p.head_count == 0) return check.status();
  check.Require(p.q != nullptr, "q", "is null");
  check.Require(p.k != nullptr, "k", "is null");
  check.Require(p.v != nullptr, "v", "is null");
  check.Require(p.keys != nullptr, "keys", "is null");
  check.Require(p.o != nullptr, "o", "is null");
  check.Require(p.lse != nullptr, "lse", "is null");
  for (size_t i = 0; i < p.entries.size(); ++i) {
    const int32_t more_keys = p.entries[i].more_keys;
    check.Require(more_keys >= 0 && (more_keys == 0 || p.entries.size() == 1),
                  Indexed("entries", i, ".more_keys"), more_keys,
                  " must be 0, or more in a call of one entry");
    for (int32_t j = 0; j < p.entries[i].row_count && check.ok(); ++j) {
      const int32_t row = p.entries[i].row_begin + j;
      if (Empty(p.keys[row])) continue;
      check.Require(p.keys[row].lo >= 0, Indexed("keys", row, ".lo"), p.keys[row].lo,
                    " is negative");
      const int64_t tokens = int64_t{p.entries[i].row_count} + p.entries[i].more_keys;
      check.Require(p.keys[row].hi <= tokens, Indexed("keys", row, ".hi"), p.keys[row].hi,
                    " is past the ", tokens, " new tokens of the entry");
    }
  }
  return check.status();
}

Status Validate(const MergeParams& p) {
  Checker check;
  check.Require(p.rows >= 0, "rows", p.rows, " is negative");
  check.Require(p.heads >= 0, "heads", p.heads, " is negative");
  check.Require(p.value_dim >= 0, "value_dim", p.value_dim, " is negative");
  check.Require(!p.o.empty(), "o", "has no sources");
  check.Require(p.lse.size() == p.o.size(), "lse", "has ", int64_t(p.lse.size()),
                " sources where o has ", int64_t(p.o.size()));
  if (!check.ok() || p.rows == 0 || p.heads == 0) return check.status();
  for (size_t s = 0; s < p.o.size() && check.ok(); ++s) {
    check.Require(p.o[s] != nullptr, Indexed("o", s), "is null");
    check.Require(p.lse[s] != nullptr, Indexed("lse", s), "is null");
  }
  check.Require(p.out != nullptr, "out", "is null");
  return check.status();
}

}  // namespace tributary
