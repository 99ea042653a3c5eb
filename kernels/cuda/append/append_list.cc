#include "kernels/cuda/append/append_list.h"

#include <algorithm>

#include "kernels/cuda/layout/page_layout.h"
#include "kernels/params.h"

namespace tributary::cuda {
namespace {

constexpr int64_t kQuad = kQuadTokens;
// A quad that is not whole is written element by element.
constexpr int64_t kCostOfTorn = 4;
constexpr size_t kFewestTokens = 64;

}  // namespace

void ListTokens(std::span<const int64_t> slots, AppendList* list) {
  list->tokens.clear();
  list->slots.clear();
  int64_t last = kPadSlot;
  for (size_t token = 0; token < slots.size(); ++token) {
    const int64_t slot = slots[token];
    if (slot == kPadSlot) continue;
    if (last == kPadSlot || slot != last + 1) {
      const auto place = static_cast<int64_t>(list->slots.size());
      const int64_t padding = (slot % kQuad - place % kQuad + kQuad) % kQuad;
      list->slots.insert(list->slots.end(), static_cast<size_t>(padding), kPadSlot);
      list->tokens.insert(list->tokens.end(), static_cast<size_t>(padding), 0);
    }
    list->slots.push_back(slot);
    list->tokens.push_back(static_cast<int32_t>(token));
    last = slot;
  }
}

int64_t AppendCost(std::span<const int64_t> slots) {
  int64_t cost = 0;
  for (size_t first = 0; first < slots.size(); first += kQuad) {
    const auto quad = slots.subspan(first, std::min<size_t>(kQuad, slots.size() - first));
    bool any = false;
    bool whole = quad.size() == kQuad && quad[0] % kQuad == 0;
    for (size_t i = 0; i < quad.size(); ++i) {
      any |= quad[i] != kPadSlot;
      whole &= quad[i] == quad[0] + static_cast<int64_t>(i);
    }
    cost += any && !whole ? kCostOfTorn : 1;
  }
  return cost;
}

bool ListIfThatPays(std::span<const int64_t> slots, AppendList* list) {
  if (slots.size() < kFewestTokens) return false;
  ListTokens(slots, list);
  return 2 * AppendCost(list->slots) <= AppendCost(slots);
}

}  // namespace tributary::cuda
