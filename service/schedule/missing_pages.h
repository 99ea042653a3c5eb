// Which pages of the ranks' shares are missing where they should be: on the rank itself, or in the
// replica that another rank keeps of them (worker/replica.h). A SequenceTable has one of these for
// each group of layers. It takes no memory for pages while nothing is missing.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_set.h"

namespace tributary::service {

enum class PagePlace : uint8_t { kRank, kReplica };
inline constexpr std::array kPagePlaces = {PagePlace::kRank, PagePlace::kReplica};

class MissingPages {
 public:
  MissingPages(int ranks, int32_t pages, bool replicas)
      : pages_(pages),
        kept_(static_cast<size_t>(ranks), replicas),
        of_{Shares(static_cast<size_t>(ranks)), Shares(static_cast<size_t>(ranks))} {}

  // Whether there is a replica of a rank's pages. All ranks have one or none has, except that a
  // rank which hands its pages over has one for that.
  bool kept(int rank) const { return kept_[static_cast<size_t>(rank)]; }
  void Keep(int rank) { kept_[static_cast<size_t>(rank)] = true; }
  // The rank has no replica from now on, so nothing is missing there.
  void StopKeeping(int rank);

  // Whether a page of a rank's share is missing at a place, and how many are.
  bool Has(PagePlace place, int rank, int32_t page) const {
    const Share& share = At(place, rank);
    return share.count > 0 && share.missing[static_cast<size_t>(page)];
  }
  int64_t count(PagePlace place, int rank) const { return At(place, rank).count; }
  // How many pages are missing at a place, over all ranks.
  int64_t count(PagePlace place) const { return counts_[static_cast<size_t>(place)]; }
  bool any() const { return count(PagePlace::kRank) + count(PagePlace::kReplica) > 0; }
  // Whether nobody has the page of a rank's share any more.
  bool Gone(int rank, int32_t page) const {
    return Has(PagePlace::kRank, rank, page) &&
           (!kept(rank) || Has(PagePlace::kReplica, rank, page));
  }

  void Add(PagePlace place, int rank, int32_t page);
  void Remove(PagePlace place, int rank, int32_t page);
  // Forgets a page that is free: whoever takes it writes it anew everywhere.
  void Forget(int32_t page);
  // A step that has not been carried out yet will copy a page. Where a replica lacks the source, it
  // will lack the destination. The destination is brought to no replica before Unpin, because the
  // step's copy could come after it and overwrite it.
  void CopyAndPin(int32_t source, int32_t destination);
  // The step has been carried out, or never will be.
  void Unpin(int32_t page) { pinned_.erase(page); }
  // Whether a page may be brought to a place now: it is missing, not on its way and not pinned.
  bool MayBring(PagePlace place, int rank, int32_t page) const {
    return Has(place, rank, page) && !At(place, rank).on_way.contains(page) &&
           (place == PagePlace::kRank || !pinned_.contains(page));
  }
  void SetOnWay(PagePlace place, int rank, int32_t page, bool on_way);
  // Notes that nothing is on its way any more, because the group broke.
  void StopAll();

  // Whether a rank that joined late has yet to be told that it lacks nothing. A coordinator that
  // restarts relies on that (TransferPagesCommand::complete).
  bool to_confirm(PagePlace place, int rank) const { return At(place, rank).to_confirm; }
  void set_to_confirm(PagePlace place, int rank, bool to) { At(place, rank).to_confirm = to; }

 private:
  struct Share {
    std::vector<bool> missing;  // [pages], or empty while nothing is
    int64_t count = 0;
    absl::flat_hash_set<int32_t> on_way;
    bool to_confirm = false;
  };
  using Shares = std::vector<Share>;

  Share& At(PagePlace place, int rank) {
    return of_[static_cast<size_t>(place)][static_cast<size_t>(rank)];
  }
  const Share& At(PagePlace place, int rank) const {
    return of_[static_cast<size_t>(place)][static_cast<size_t>(rank)];
  }

  int32_t pages_;
  std::vector<bool> kept_;                     // [ranks]
  std::array<Shares, kPagePlaces.size()> of_;  // [place][rank]
  std::array<int64_t, kPagePlaces.size()> counts_{};
  absl::flat_hash_set<int32_t> pinned_;
};

}  // namespace tributary::service
