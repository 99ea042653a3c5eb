#include "kernels/cpu/backend.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/element.h"
#include "kernels/reference.h"
#include "kernels/validate.h"

namespace tributary::cpu {

Status Append(const AppendParams& p, ThreadPool& pool) {
  if (Status status = Validate(p); !status.ok()) return status;
  ReferenceAppend(p);
  return Status::Ok();
}

Status Attention(const AttentionParams& p, ThreadPool& pool) {
  if (Status status = Validate(p); !status.ok()) return status;
  const ReferenceResult r = ReferenceAttention(p);
  std::copy(r.o.begin(), r.o.end(), p.o);
  std::copy(r.lse.begin(), r.lse.end(), p.lse);
  return Status::Ok();
}

Status NewTokens(const NewTokensParams& p, ThreadPool& pool) {
  if (Status status = Validate(p); !status.ok()) return status;
  const ReferenceResult r = ReferenceNewTokens(p);
  std::copy(r.o.begin(), r.o.end(), p.o);
  std::copy(r.lse.begin(), r.lse.end(), p.lse);
  return Status::Ok();
}

Status MergePartials(const MergeParams& p, ThreadPool& pool) {
  if (Status status = Validate(p); !status.ok()) return status;
  const ReferenceResult r = ReferenceMerge(p);
  std::copy(r.o.begin(), r.o.end(), p.out);
  if (p.lse_out != nullptr) std::copy(r.lse.begin(), r.lse.end(), p.lse_out);
  return Status::Ok();
}

Status MatchesCache(const AppendParams& p, ThreadPool& pool, uint8_t* matches) {
  if (Status status = Validate(p); !status.ok()) return status;
  const size_t row_bytes = p.kv.head_dim * SizeOf(p.kv.dtype);
  const PagedKv& kv = p.kv;
  PagedKv one = kv;  // a cache of one page that a token is written to, to compare
  std::vector<std::byte> page(PageBytes(kv));
  one.base = page.data();
  one.num_pages = 1;
  for (int32_t t = 0; t < p.tokens; ++t) {
    matches[t] = 1;
    if (p.slots[t] == kPadSlot) continue;
    AppendParams token = p;
    const int64_t slot = p.slots[t] % kv.page_size;
    const int32_t at = static_cast<int32_t>(p.slots[t] / kv.page_size);
    const size_t stride = size_t(t) * kv.kv_heads * kv.head_dim * SizeOf(p.input_dtype);
    token.kv = one;
    token.k = static_cast<const std::byte*>(p.k) + stride;
    token.v = static_cast<const std::byte*>(p.v) + stride;
    token.tokens = 1;
    token.slots = &slot;
    ReferenceAppend(token);
    for (int32_t h = 0; h < kv.kv_heads; ++h) {
      const size_t offset = slot * row_bytes;
      if (std::memcmp(KeyPlane(one, 0, h) + offset, KeyPlane(kv, at, h) + offset, row_bytes) != 0 ||
          std::memcmp(ValuePlane(one, 0, h) + offset, ValuePlane(kv, at, h) + offset, row_bytes)) {
        matches[t] = 0;
      }
    }
  }
  return Status::Ok();
}

void Convert(DType from, const void* src, DType to, void* dst, size_t n) {
  for (size_t i = 0; i < n; ++i) StoreElement(to, dst, i, LoadElement(from, src, i));
}

const char* InstructionSet() { return "scalar"; }

}  // namespace tributary::cpu
