#include "collective/peers/transfers.h"

#include <utility>

namespace tributary::collective {

Status LostPeers(const std::map<int, std::string>& lost) {
  std::string text;
  for (const auto& [peer, why] : lost) {
    text += (text.empty() ? "lost rank " : ", rank ") + std::to_string(peer) + " (" + why + ")";
  }
  return {StatusCode::kUnavailable, std::move(text)};
}

Status LatePeers(const std::set<int>& late, int rank) {
  std::string who;
  for (const int peer : late) who += (who.empty() ? "rank " : ", ") + std::to_string(peer);
  return {StatusCode::kDeadlineExceeded,
          who + " did not come before the deadline of rank " + std::to_string(rank)};
}

Status AbortedBy(int rank, const std::string& reason) {
  return {StatusCode::kAborted, "aborted by rank " + std::to_string(rank) + ": " + reason};
}

Status During(Op op, const Status& error) {
  return {error.code(), std::string(Name(op)) + ": " + error.message()};
}

}  // namespace tributary::collective
