#include "service/schedule/missing_pages.h"

namespace tributary::service {

void MissingPages::Add(PagePlace place, int rank, int32_t page) {
  if (place == PagePlace::kReplica && !kept(rank)) return;
  if (Has(place, rank, page)) return;
  Share& share = At(place, rank);
  if (share.missing.empty()) share.missing.resize(static_cast<size_t>(pages_));
  share.missing[static_cast<size_t>(page)] = true;
  ++share.count;
  ++counts_[static_cast<size_t>(place)];
}

void MissingPages::Remove(PagePlace place, int rank, int32_t page) {
  if (!Has(place, rank, page)) return;
  Share& share = At(place, rank);
  share.missing[static_cast<size_t>(page)] = false;
  --counts_[static_cast<size_t>(place)];
  if (--share.count == 0) share.missing = {};
}

void MissingPages::StopKeeping(int rank) {
  Share& share = At(PagePlace::kReplica, rank);
  counts_[static_cast<size_t>(PagePlace::kReplica)] -= share.count;
  share = {};
  kept_[static_cast<size_t>(rank)] = false;
}

void MissingPages::Forget(int32_t page) {
  if (!any()) return;
  for (const PagePlace place : kPagePlaces) {
    for (size_t rank = 0; rank < of_[0].size(); ++rank) {
      Remove(place, static_cast<int>(rank), page);
    }
  }
}

void MissingPages::CopyAndPin(int32_t source, int32_t destination) {
  pinned_.insert(destination);
  if (count(PagePlace::kReplica) == 0) return;
  for (size_t rank = 0; rank < of_[0].size(); ++rank) {
    if (!Has(PagePlace::kReplica, static_cast<int>(rank), source)) continue;
    Add(PagePlace::kReplica, static_cast<int>(rank), destination);
  }
}

void MissingPages::SetOnWay(PagePlace place, int rank, int32_t page, bool on_way) {
  if (on_way) {
    At(place, rank).on_way.insert(page);
  } else {
    At(place, rank).on_way.erase(page);
  }
}

void MissingPages::StopAll() {
  for (Shares& shares : of_) {
    for (Share& share : shares) share.on_way.clear();
  }
}

}  // namespace tributary::service
