// Which pages of the ranks' shares are missing where they should be: on the rank itself, or in the
// replica that another rank keeps of them (worker/replica.h). One group of layers of a cache has
// one, in its SequenceTable. Costs nothing while nothing is missing.
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

  // Whether there is a replica of a rank's pages: of every rank's or of none's, but for a
  // hand-over.
  bool kept(int rank) const { return kept_[static_cast<size_t>(rank)]; }
  void Keep(int rank) { kept_[static_cast<size_t>(rank)] = true; }
  // There is none any more, so nothing is missing in it.
  void StopKeeping(int rank);

  // Of a rank's share.
  bool Has(PagePlace place, int rank, int32_t page) const {
    const Share& share = At(place, rank);
    return share.count > 0 && share.missing[static_cast<size_t>(page)];
  }
  int64_t count(PagePlace place, int rank) const { return At(place, rank).count; }
  // Over all ranks.
  int64_t count(PagePlace place) const { return counts_[static_cast<size_t>(place)]; }
  bool any() const { return count(PagePlace::kRank) + count(PagePlace::kReplica) > 0; }
  // Whether nobody has the page of a rank's share any more.
  bool Gone(int rank, int32_t page) const {
    return Has(PagePlace::kRank, rank, page) &&
           (!kept(rank) || Has(PagePlace::kReplica, rank, page));
  }

  void Add(PagePlace place, int rank, int32_t page);
  void Remove(PagePlace place, int rank, int32_t page);
  // The page is free: whoever takes it writes it anew, everywhere.
  void Forget(int32_t page);
  // A step that is not carried out yet will copy a page. Where the replica of the source is
  // missing, that of the destination will be. Nothing is brought to the destination before Unpin,
  // for then the copy could follow what was brought.
  void CopyAndPin(int32_t source, int32_t destination);
  // The step has been carried out, or never will be.
  void Unpin(int32_t page) { pinned_.erase(page); }
  // Whether it may be brought now: it is not on its way, and not pinned.
  bool MayBring(PagePlace place, int rank, int32_t page) const {
    return Has(place, rank, page) && !At(place, rank).on_way.contains(page) &&
           (place == PagePlace::kRank || !pinned_.contains(page));
  }
  void SetOnWay(PagePlace place, int rank, int32_t page, bool on_way);
  // Nothing is on its way: the group broke.
  void StopAll();

  // A rank that has joined late must be told when nothing is missing, for a coordinator that
  // restarts (TransferPagesCommand::complete).
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
