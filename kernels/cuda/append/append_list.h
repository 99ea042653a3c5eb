// In which order an append takes the tokens of a call.
//
// A thread takes four tokens. It writes whole vectors of values where they go to four neighbouring
// slots of a page that begin at a multiple of four. Elsewhere it writes element after element.
// Tokens lie so by themselves where a call begins at such a slot and all of its tokens are this
// rank's. In other calls a list brings them together: it has the tokens that have a slot, with
// padding ahead of each run of slots that does not begin at a multiple of four.
//
// Host arithmetic alone. The plan of a step makes the list, once for all layers.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tributary::cuda {

struct AppendList {
  std::vector<int32_t> tokens;  // AppendArgs::listed; 0 in the padding
  std::vector<int64_t> slots;   // AppendArgs::slots; kPadSlot in the padding
};

// Lists the tokens that have a slot, in their order. The memory of the list before is used again.
void ListTokens(std::span<const int64_t> slots, AppendList* list);

// What an append of these places costs, in quads that are written whole.
int64_t AppendCost(std::span<const int64_t> slots);

// Lists the tokens if their append costs half as much then, and is not so small that its launch is
// all that counts. Otherwise returns false, and the list may hold anything.
bool ListIfThatPays(std::span<const int64_t> slots, AppendList* list);

}  // namespace tributary::cuda
