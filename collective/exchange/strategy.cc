#include "collective/exchange/strategy.h"

#include "collective/exchange/message_sizes.h"

namespace tributary::collective {

const char* Name(Strategy s) {
  switch (s) {
    case Strategy::kAuto:
      return "auto";
    case Strategy::kAllGather:
      return "all_gather";
    case Strategy::kAgRs:
      return "ag_rs";
    case Strategy::kA2a:
      return "a2a";
    case Strategy::kDirect:
      return "direct";
  }
  return "?";
}

const char* Name(Placement p) { return p == Placement::kGathered ? "gathered" : "scattered"; }

bool Parse(std::string_view text, Strategy* out) {
  for (Strategy s : {Strategy::kAuto, Strategy::kAllGather, Strategy::kAgRs, Strategy::kA2a,
                     Strategy::kDirect}) {
    if (text == Name(s)) {
      *out = s;
      return true;
    }
  }
  return false;
}

Strategy ChooseStrategy(const ExchangeShape& shape, Strategy forced) {
  if (forced != Strategy::kAuto) return forced;
  // Nothing is exchanged; all_gather is the strategy without a second step.
  if (shape.ranks == 1) return Strategy::kAllGather;
  // One operation, and every byte sent is one that its receiver needs. ag_rs sends as little but
  // in two dependent operations; all_gather sends `ranks` times as much.
  if (shape.placement == Placement::kScattered) return Strategy::kA2a;
  // Two ranks: a2a and its gather bring rank 0 as many bytes as one gather does.
  if (shape.ranks == 2) return Strategy::kAllGather;
  // Rank 0 receives and merges (ranks - 1) whole partials, or with a2a about two; a2a has a second
  // operation, and all ranks pack, copy and merge more in total. Between threads that share cores,
  // where only the total counts, 1.5 MiB less for rank 0 did not yet pay and 5 MiB less did.
  constexpr size_t kWorthASecondOperation = 2 << 20;
  const MessageSizes d = MessageSizesOf(shape);
  const size_t one_gather = (d.ranks - 1) * d.packed_floats() * sizeof(float);
  const size_t two_steps = 2 * (d.ranks - 1) * d.packed_part_floats() * sizeof(float);
  return one_gather >= two_steps + kWorthASecondOperation ? Strategy::kA2a : Strategy::kAllGather;
}

size_t BytesSent(const ExchangeShape& shape, Strategy strategy) {
  const MessageSizes d = MessageSizesOf(shape);
  if (d.ranks == 1 || d.rows == 0 || d.heads == 0) return 0;
  const size_t peers = d.ranks - 1;
  const bool gathered = shape.placement == Placement::kGathered;
  const size_t gather = gathered ? d.packed_part_floats() : 0;
  size_t floats = 0;
  switch (ChooseStrategy(shape, strategy)) {
    case Strategy::kAuto:
    case Strategy::kAllGather:
      floats = gathered ? d.packed_floats() : peers * d.packed_floats();
      break;
    case Strategy::kAgRs:
      floats = peers * (d.lse_floats() + d.part_o_floats()) + gather;
      break;
    case Strategy::kA2a:
      floats = peers * d.packed_part_floats() + gather;
      break;
    case Strategy::kDirect:  // not between hosts' memories
      break;
  }
  return floats * sizeof(float);
}

}  // namespace tributary::collective
