// SequenceTable: pages that are missing on a rank or in its replica, and how they are brought
// there.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status/errors.h"
#include "base/status/rpc_errors.h"
#include "kernels/key_range.h"
#include "service/schedule/sequence_table.h"
#include "worker/replica.h"

namespace tributary::service {
namespace {

// How many sequences a transfer that has some pages looks at.
constexpr int kSequencesPerTransfer = 256;

}  // namespace

size_t SequenceTable::PagesWithTokens(int32_t group, const Sequence& sequence, int rank) const {
  const DcpLayout layout{rank, geometry_.ranks, geometry_.interleave};
  const int64_t tokens = LocalLength(layout, LongestOf(group, sequence));
  const auto pages = static_cast<size_t>((tokens + geometry_.page_size - 1) / geometry_.page_size);
  return std::min(pages, sequence.groups[group].pages.size());
}

template <typename Of, typename Is>
bool SequenceTable::AnyPage(const Sequence& sequence, const Of& of, const Is& is) const {
  for (int32_t group = 0; group < groups_.size(); ++group) {
    const PageList& list = sequence.groups[group];
    for (int rank = 0; rank < geometry_.ranks; ++rank) {
      if (!of(group, rank)) continue;
      const size_t end = PagesWithTokens(group, sequence, rank);
      for (size_t i = static_cast<size_t>(list.given_up); i < end; ++i) {
        if (is(group, rank, list.pages[i])) return true;
      }
    }
  }
  return false;
}

void SequenceTable::AddMissing(int32_t group, PagePlace place, int rank) {
  MissingPages& missing = missing_[group];
  missing.set_to_confirm(place, rank, place == PagePlace::kRank || geometry_.replica_stride > 0);
  const PageAllocator& pages = pages_[group];
  std::vector<int32_t> listed(static_cast<size_t>(pages.ever_taken()), 0);
  for (const auto& [id, sequence] : sequences_) {
    const PageList& list = sequence->groups[group];
    const size_t end = PagesWithTokens(group, *sequence, rank);
    for (size_t i = static_cast<size_t>(list.given_up); i < list.pages.size(); ++i) {
      ++listed[static_cast<size_t>(list.pages[i])];
      if (i < end) missing.Add(place, rank, list.pages[i]);
    }
  }
  // Pages that no sequence lists now, and that sequences get back when steps in flight fail.
  for (int32_t page = 0; page < pages.ever_taken(); ++page) {
    if (pages.references(page) > listed[static_cast<size_t>(page)]) missing.Add(place, rank, page);
  }
}

void SequenceTable::MarkLostOn(const std::vector<bool>& fresh) {
  const int ranks = geometry_.ranks;
  for (int rank = 0; rank < std::min(ranks, static_cast<int>(fresh.size())); ++rank) {
    for (int32_t group = 0; group < groups_.size(); ++group) {
      if (!fresh[rank]) {
        // The rank that was about to leave has stayed, so nothing is handed over any more.
        if (KeptForHandOver(rank)) missing_[group].set_to_confirm(PagePlace::kRank, rank, true);
        continue;
      }
      AddMissing(group, PagePlace::kRank, rank);
      const int ward = worker::WardOf(rank, stride(), ranks);
      if (missing_[group].kept(ward)) AddMissing(group, PagePlace::kReplica, ward);
    }
  }
  LoseWhatIsGone();
  if (geometry_.replica_stride > 0) return;
  // Pages that were kept for a hand-over are gone with their keeper. A rank that still leaves asks
  // again.
  for (int rank = 0; rank < std::min(ranks, static_cast<int>(fresh.size())); ++rank) {
    const int ward = worker::WardOf(rank, stride(), ranks);
    for (MissingPages& missing : missing_) {
      if (fresh[rank] && missing.kept(ward)) missing.StopKeeping(ward);
    }
  }
}

void SequenceTable::LoseWhatIsGone() {
  if (missing(PagePlace::kRank) == 0) return;
  for (int32_t group = 0; group < groups_.size(); ++group) {
    MissingPages& missing = missing_[group];
    for (int rank = 0; rank < geometry_.ranks; ++rank) {
      if (missing.count(PagePlace::kRank, rank) == 0) continue;
      for (int32_t page = 0; page < pages_[group].ever_taken(); ++page) {
        if (!missing.Gone(rank, page)) continue;
        // No more missing than other pages: tokens that come are written everywhere.
        lost_pages_[group].Add(rank, page);
        missing.Remove(PagePlace::kRank, rank, page);
        missing.Remove(PagePlace::kReplica, rank, page);
      }
    }
  }
  LoseSequences();
}

void SequenceTable::KeepForHandOver(int rank) {
  for (int32_t group = 0; group < groups_.size(); ++group) {
    if (missing_[group].kept(rank)) continue;
    missing_[group].Keep(rank);
    AddMissing(group, PagePlace::kReplica, rank);
  }
}

bool SequenceTable::MayLeave(int rank) const {
  const int ward = worker::WardOf(rank, stride(), geometry_.ranks);
  return missing_[0].kept(rank) && missing(PagePlace::kReplica, rank) == 0 &&
         missing(PagePlace::kRank, rank) == 0 && missing(PagePlace::kRank, ward) == 0;
}

absl::Status SequenceTable::CheckThere(FieldName field, const Sequence& sequence) const {
  if (missing(PagePlace::kRank) == 0) return absl::OkStatus();
  const auto lacks = [this](int32_t group, int rank, int32_t page) {
    return missing_[group].Has(PagePlace::kRank, rank, page);
  };
  const auto lacks_any = [this](int32_t group, int rank) {
    return missing_[group].count(PagePlace::kRank, rank) > 0;
  };
  if (!AnyPage(sequence, lacks_any, lacks)) return absl::OkStatus();
  return Unavailable(
      "SEQUENCE_RESTORING",
      absl::StrCat(field(), ": a worker takes tokens of sequence ", sequence.id, " from a replica"),
      geometry_.retry_delay);
}

// ------------------------------------------------------------------------------------- transfers

size_t SequenceTable::Collect(const Sequence& sequence, size_t begin, size_t most,
                              PageTransfer* transfer) const {
  const PageList& list = sequence.groups[transfer->group];
  const MissingPages& missing = missing_[transfer->group];
  size_t i = std::max(begin, static_cast<size_t>(list.given_up));
  const size_t end = PagesWithTokens(transfer->group, sequence, transfer->rank);
  for (; i < end && transfer->pages.size() < most; ++i) {
    const int32_t page = list.pages[i];
    if (!missing.MayBring(transfer->to, transfer->rank, page)) continue;
    const auto& pages = transfer->pages;
    if (std::find(pages.begin(), pages.end(), page) != pages.end()) continue;  // of a fork
    transfer->pages.push_back(page);
  }
  return i;
}

std::optional<PageTransfer> SequenceTable::FindTransfer(PagePlace to,
                                                        absl::Span<const int32_t> most) {
  Scan& scan = scans_[static_cast<size_t>(to)];
  for (auto id = ids_.lower_bound(scan.sequence); id != ids_.end(); ++id) {
    for (int32_t group = 0; group < groups_.size(); ++group) {
      for (int rank = 0; rank < geometry_.ranks; ++rank) {
        if (missing_[group].count(to, rank) == 0) continue;
        PageTransfer transfer{.group = group, .to = to, .rank = rank, .pages = {}};
        const bool goes_on = scan.sequence == *id && scan.group == group && scan.rank == rank;
        const auto room = static_cast<size_t>(most[static_cast<size_t>(group)]);
        const size_t index =
            Collect(*sequences_.at(*id), goes_on ? scan.index : 0, room, &transfer);
        if (transfer.pages.empty()) continue;
        scan = {*id, group, rank, index};
        // Short sequences share a transfer.
        int looked_at = 0;
        for (auto next = std::next(id); next != ids_.end() && transfer.pages.size() < room &&
                                        ++looked_at < kSequencesPerTransfer;
             ++next) {
          Collect(*sequences_.at(*next), 0, room, &transfer);
        }
        return transfer;
      }
    }
  }
  return std::nullopt;
}

std::optional<PageTransfer> SequenceTable::Confirm(PagePlace to) {
  for (int32_t group = 0; group < groups_.size(); ++group) {
    for (int rank = 0; rank < geometry_.ranks; ++rank) {
      if (!missing_[group].to_confirm(to, rank) || missing_[group].count(to, rank) > 0) continue;
      missing_[group].set_to_confirm(to, rank, false);
      PageTransfer told{.group = group, .to = to, .rank = rank, .pages = {}, .complete = true};
      told.ends_hand_over =
          to == PagePlace::kRank && geometry_.replica_stride == 0 && missing_[group].kept(rank);
      // It is noted when the command is sent, not when it is answered: nobody may count on pages
      // that the keeper has been told to drop.
      if (told.ends_hand_over) missing_[group].StopKeeping(rank);
      return told;
    }
  }
  return std::nullopt;
}

std::optional<PageTransfer> SequenceTable::NextTransfer(PagePlace to,
                                                        absl::Span<const int32_t> most) {
  std::optional<PageTransfer> transfer;
  if (missing(to) > 0) {
    transfer = FindTransfer(to, most);
    if (!transfer.has_value() && scans_[static_cast<size_t>(to)].sequence != 0) {
      scans_[static_cast<size_t>(to)] = {};
      transfer = FindTransfer(to, most);
    }
  }
  if (!transfer.has_value()) return Confirm(to);
  for (const int32_t page : transfer->pages) {
    missing_[transfer->group].SetOnWay(to, transfer->rank, page, true);
  }
  return transfer;
}

void SequenceTable::EndTransfer(const PageTransfer& transfer, bool done) {
  MissingPages& missing = missing_[transfer.group];
  for (const int32_t page : transfer.pages) {
    missing.SetOnWay(transfer.to, transfer.rank, page, false);
    if (done) missing.Remove(transfer.to, transfer.rank, page);
  }
  if (transfer.complete && !done) missing.set_to_confirm(transfer.to, transfer.rank, true);
}

void SequenceTable::StopTransfers() {
  for (MissingPages& missing : missing_) missing.StopAll();
  scans_ = {};
}

int64_t SequenceTable::missing(PagePlace place) const {
  int64_t pages = 0;
  for (const MissingPages& missing : missing_) pages += missing.count(place);
  return pages;
}

int64_t SequenceTable::missing(PagePlace place, int rank) const {
  int64_t pages = 0;
  for (const MissingPages& missing : missing_) pages += missing.count(place, rank);
  return pages;
}

}  // namespace tributary::service
