// The sequences of one cache: how long each is in every layer, and which pages it holds.
//
// This table is the truth, and workers are told of it. A step changes it in two stages. Reserve
// takes what the step needs and says what the workers must be told. Then Commit settles it if every
// rank did the step, or Rollback if any rank did not. Both stages cost what the step's tokens cost,
// however long its sequences are.
//
// Each cache has one, which is used under the coordinator's lock. Not thread safe.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/status/rpc_errors.h"
#include "service/data/layer_groups.h"
#include "service/schedule/client_quota.h"
#include "service/schedule/leases.h"
#include "service/schedule/lost_pages.h"
#include "service/schedule/missing_pages.h"
#include "service/schedule/page_allocator.h"
#include "worker/command.h"

namespace tributary::service {

using worker::SequenceId;

// Stands in PageList::pages for a page that was given up because no row reaches its tokens any
// more.
inline constexpr int32_t kNoPage = -1;

// What the table needs to know of a cache.
struct TableGeometry {
  int32_t layers = 1;
  int32_t ranks = 1;  // N
  int32_t page_size = 16;
  int32_t interleave = 16;
  int32_t pages = 0;
  int32_t max_sequences = 0;
  std::string name;              // of the cache, for messages
  worker::CacheId first_id = 0;  // of its groups of layers, for accounts (cache.h)
  // [layers]: how many tokens back the rows of each layer look; -1 for everything. Empty: all
  // layers look at everything. A group of layers (layer_groups.h) that all have windows gives up
  // old tokens.
  std::vector<int64_t> window_left;
  // How many tokens before the end rows of such layers may still begin.
  int64_t rollback_tokens = 0;
  // More than 0: layers with a window are a group of their own, which has this many pages.
  int32_t window_pages = 0;
  // Where this is more than 0, rank (r + replica_stride) % N also keeps the pages of rank r.
  int32_t replica_stride = 0;
  std::chrono::milliseconds retry_delay{200};  // of UNAVAILABLE
};

// Pages of one rank's share that are to be brought to where they are missing.
struct PageTransfer {
  int32_t group = 0;
  PagePlace to = PagePlace::kRank;
  int rank = 0;
  std::vector<int32_t> pages;
  bool complete = false;  // `pages` is empty, and nothing is missing there any more
  // Whether the rank's pages were kept for a hand-over, and need not be kept from now on.
  bool ends_hand_over = false;
};

// The pages that a sequence holds for one group of layers.
struct PageList {
  std::vector<int32_t> pages;  // covers the group's longest layer; kNoPage where given up
  int32_t given_up = 0;        // leading entries of `pages` that are kNoPage
  // Indices at which the workers' tables may differ from `pages`, because a copy on write was
  // rolled back. The next step that touches the list tells the workers again.
  std::vector<int32_t> unsynced;

  int32_t held() const { return static_cast<int32_t>(pages.size()) - given_up; }
};

struct Sequence {
  SequenceId id = 0;
  std::vector<int64_t> lengths;  // [layers], tokens
  std::vector<PageList> groups;  // [groups of layers]
  // [layers]: where the tokens of each layer's last step began. That step may be repeated, so its
  // tokens are not given up.
  std::vector<int64_t> last_step;
  // The most tokens that all layers have held since the sequence was empty. Which tokens count as
  // given up follows from it (SequenceTable::FirstKept).
  int64_t longest = 0;
  // Nobody has some of its tokens any more.
  bool lost = false;
  // It is lost, but others of its tokens are left: its pages and lengths are kept, and an Append
  // may bring those that are missing.
  bool mendable = false;
  // The client that opened or forked it and pays for what it holds. Null if nothing is limited, and
  // for lost sequences that hold nothing.
  ClientAccountPtr owner;
  // The lease that it belongs to; null: it stays until it is closed. Forks begin with that of the
  // sequence that they are forked from. The table does nothing else with it.
  LeasePtr lease;
  // The sequence that it was forked from, by which a repeated call is recognised; 0 when it has
  // been written to or cut since. `parent_tokens` is what the parent's `tokens` was.
  SequenceId parent = 0;
  int64_t fork_length = 0;
  uint64_t parent_tokens = 0;
  // Another number once tokens that a fork has shared since may have been replaced by others.
  uint64_t tokens = 0;
  int64_t longest_fork = 0;  // of the forks since the number changed
};

// The least length over all layers: what every layer holds.
int64_t LeastLength(const Sequence& sequence);
int64_t GreatestLength(const Sequence& sequence);

// What one request takes from the table and changes in it. Made by Reserve; ends with Commit or
// Rollback.
struct StepReservation {
  struct Change {
    Sequence* sequence = nullptr;
    int64_t length = 0;                                 // of the layer after the step
    std::vector<int32_t> added;                         // appended to PageList::pages
    std::vector<std::pair<int32_t, int32_t>> replaced;  // (index, new page)
    std::vector<int32_t> resent;                        // indices of PageList::unsynced
    ClientAccountPtr owner;                             // of the sequence when this was reserved
    // The entry brings tokens of a lost sequence again; it adds none, and takes no pages.
    bool brings_back = false;
  };
  int32_t layer = 0;
  int32_t group = 0;                       // of the layer: all pages below are of it
  std::vector<worker::StepEntry> entries;  // `replay` filled in
  std::vector<worker::PageCopy> page_copies;
  std::vector<worker::PageUpdate> page_updates;
  std::vector<Change> changes;  // one an entry
};

// Sequences as they were, to put them back when a change of several of them is refused half-way.
// Absent: there was no such sequence.
using SavedSequences = absl::flat_hash_map<SequenceId, std::optional<Sequence>>;

// Pages that sequences have let go of while somebody may still need them: a step in flight, or a
// change that may yet be refused. They count as used until SequenceTable::ReleaseHeld; the client
// that held them pays for them no longer.
struct HeldPages {
  struct Page {
    int32_t group = 0;
    int32_t page = 0;
  };
  std::vector<Page> pages;
};

class SequenceTable {
 public:
  explicit SequenceTable(const TableGeometry& geometry);

  // Null when there is no such sequence.
  Sequence* Find(SequenceId id);

  // `id` 0 chooses an id. An empty or lost sequence of that id is opened again and is `owner`'s
  // from then on. `reopened` says whether that happened: workers may still hold a table of it.
  absl::StatusOr<SequenceId> Open(SequenceId id, bool* reopened, ClientAccountPtr owner = nullptr);
  // The child shares the parent's first `length` tokens (-1: all that every layer holds). While the
  // child is untouched, repeating the fork returns it.
  absl::StatusOr<Sequence*> Fork(SequenceId parent, SequenceId child, int64_t length,
                                 ClientAccountPtr owner = nullptr);
  // Returns the length now held. OUT_OF_RANGE when the next row would look at tokens that were
  // given up; nothing is changed then.
  absl::StatusOr<int64_t> Truncate(SequenceId id, int64_t length);
  absl::Status Close(SequenceId id);
  // Adds a sequence to `saved` as it is, unless it is there already.
  void Save(SequenceId id, SavedSequences* saved);
  // Makes the sequences what they were, pages and accounts included. Everything since they were
  // saved was done while released pages are held (HoldReleased), and PutBack is, too. No step was
  // reserved or settled since.
  void PutBack(const SavedSequences& saved);
  // The cache is deleted: no client pays for its sequences any more. Reservations may yet be
  // settled.
  void DisownAll();

  // Checks every entry and reserves pages; an error changes nothing. Entries are named
  // "entries[i].*" in errors. The sequences must not take part in another reservation that is not
  // settled. A draft block (kDflash) lies behind what is held, or behind an earlier part of it, and
  // takes no pages.
  absl::StatusOr<StepReservation> Reserve(int32_t layer, worker::StepKind kind,
                                          const std::vector<worker::StepEntry>& entries);
  void Commit(const StepReservation& reservation);
  void Rollback(const StepReservation& reservation);

  // From now on pages that sequences let go of go to `held`; null: they are free at once, as ever.
  void HoldReleased(HeldPages* held) { held_ = held; }
  void ReleaseHeld(HeldPages* held);

  // For steps over several layers, which are committed before they are carried out (RangeSteps).
  //
  // Commit, but old tokens are not given up: GiveUpOld does that when the step has been carried
  // out.
  void CommitAhead(const StepReservation& reservation);
  void GiveUpOld(Sequence* sequence);
  // The step that copies these pages has been carried out, or never will be. Commit and Rollback do
  // this, too.
  void EndCopies(int32_t group, const std::vector<worker::PageCopy>& copies);
  // Undoes what CommitAhead did to the pages of one entry: `replaced` are the pages that stood
  // where it put copies, whose references the caller gives back. Lengths have been set back
  // already.
  void UndoPages(const StepReservation::Change& change, int32_t group,
                 const std::vector<int32_t>& replaced);
  // The first token of a group of layers with windows that has not been given up. It lies
  // `rollback_tokens` and the widest window before the most tokens that all layers have held. That
  // is the rule that callers are told. A page is given back later: when all its tokens were given
  // up and no call that looks at them may be repeated.
  int64_t FirstKept(int32_t group, const Sequence& sequence) const;
  // OUT_OF_RANGE unless rows of a layer may begin at a position: what they look back on has not
  // been given up, or they repeat the layer's last call.
  absl::Status CheckReach(FieldName field, const Sequence& sequence, int32_t layer,
                          int64_t position) const;
  // What follows `from` is gone, and other tokens may come in its place: repeated forks that share
  // some of it are not recognised any more.
  void ReplaceTokens(int64_t from, Sequence* sequence);
  // Makes `to`, which is open, a fork of what `from` describes: its first `length` tokens. `from`
  // may be a copy, so that sequences may change places.
  void BecomeFork(const Sequence& from, int64_t length, Sequence* to);
  // OUT_OF_RANGE unless a fork of so many tokens may be made.
  absl::Status CheckFork(FieldName field, const Sequence& from, int64_t length) const;

  // Called when a group has formed. Ranks that are fresh lack their pages, and those of the replica
  // that they keep. A sequence is lost when nobody has some of its tokens any more; it then gives
  // its pages back.
  void MarkLostOn(const std::vector<bool>& fresh);
  // Notes that a rank which joined late lacks the pages of one group of layers. Called before
  // MarkLostOn.
  void AddMissing(int32_t group, PagePlace place, int rank);
  // Has the rank's keeper keep the rank's pages although the cache has no replicas. At first the
  // keeper lacks all of them. It keeps them until the rank, or its successor, lacks nothing
  // (PageTransfer::complete).
  void KeepForHandOver(int rank);
  // Whether the rank may go without a loss: its keeper has all its pages, and the rank whose pages
  // it keeps has them itself.
  bool MayLeave(int rank) const;
  // Rank (rank + stride) % N is the one that keeps a rank's pages.
  int32_t stride() const { return geometry_.replica_stride > 0 ? geometry_.replica_stride : 1; }
  // UNAVAILABLE when a rank lacks tokens of the sequence that it takes from a replica.
  absl::Status CheckThere(FieldName field, const Sequence& sequence) const;
  // The next pages to bring to a place, sequence by sequence; none when all that is missing is on
  // its way or waits for a step to end. `most` is [groups], the pages that one transfer may have.
  std::optional<PageTransfer> NextTransfer(PagePlace to, absl::Span<const int32_t> most);
  // Ends a transfer. `done` says whether the pages have arrived.
  void EndTransfer(const PageTransfer& transfer, bool done);
  // Notes that no transfer is under way any more, because the group broke.
  void StopTransfers();
  // How many pages are missing at a place, over all groups of layers and ranks.
  int64_t missing(PagePlace place) const;
  // The same for one rank's share.
  int64_t missing(PagePlace place, int rank) const;
  // Whether a rank's pages are kept for a hand-over alone.
  bool KeptForHandOver(int rank) const {
    return geometry_.replica_stride == 0 && missing_[0].kept(rank);
  }
  // One sequence is lost with all that it holds: the workers could not be told its table, say.
  void MarkLost(Sequence* sequence);
  // Of a lost sequence: it is so no more if nothing of it is missing. False: something is.
  bool Mend(Sequence* sequence);
  // DATA_LOSS of sequences that are lost, named by `field` in a call of a layer: what the first one
  // lacks in that layer or, if it lacks nothing there, in the first layer where it does.
  absl::Status LostError(const std::vector<SequenceId>& lost, int32_t layer,
                         absl::string_view field) const;
  // For a coordinator that has restarted: adds a sequence as the workers hold it. `sequence` has an
  // id that is not open, and pages that exist. FinishRestoring follows the last of them.
  void Restore(Sequence sequence);
  void FinishRestoring();

  // For a change of the number of ranks: fills `to`, the empty table of the same cache over another
  // number of ranks, and returns what is to be moved: [groups of layers], by page. Pages that
  // sequences share are shared as far as all tokens of a new page are the same. Sequences of `to`
  // have no owners yet. kUnavailable: pages are being restored, or calls are under way.
  // kFailedPrecondition: a sequence lacks tokens that were lost, or `to` has too few pages.
  using RedealtPages = std::vector<std::vector<worker::MovedPage>>;
  absl::StatusOr<RedealtPages> RedealInto(SequenceTable* to);
  // The same errors, but for the number of pages.
  absl::Status CheckMayRedeal();
  // The sequences belong to their owners of `from` from now on, who pay for pages here and no
  // longer there.
  void TakeOwners(SequenceTable* from);

  // What has become of sequences of one group of layers by other means than steps, since workers
  // were told last (worker/holdings.h). The next command about the group carries it. Lengths are
  // only told of sequences that take part in no reservation and no step that was accepted ahead.
  std::vector<worker::Standing> TakeStandings(int32_t group);
  // The same for one sequence, and only if its lengths are to be told. For steps that are accepted
  // ahead: what was decided before them goes out with them.
  std::optional<worker::Standing> TakeLengths(int32_t group, SequenceId id);
  // [groups]: whether the lengths of a sequence are to be told; and sets that back.
  std::vector<bool> UntoldLengths(SequenceId id) const;
  void SetUntoldLengths(SequenceId id, const std::vector<bool>& untold);
  // The lengths of a sequence are to be told for all its layers.
  void TellLengthsLater(SequenceId id);
  worker::Standing StandingOf(int32_t group, const Sequence& sequence, bool lengths) const;

  // A table as workers are told it. Page 0 stands for pages that were given up: no row's keys lie
  // in them, but a kernel may load a whole tile of the table.
  static std::vector<int32_t> ToldPages(const PageList& list);
  // The tables of one group of layers as workers must hold them, for all sequences that hold pages
  // of the group, and how all its sequences stand. Afterwards nothing of the group is unsynced.
  struct Told {
    std::optional<worker::PageUpdate> table;
    worker::Standing standing;
  };
  std::vector<Told> Snapshot(int32_t group = 0);

  const LayerGroups& groups() const { return groups_; }
  const PageAllocator& pages(int32_t group = 0) const { return pages_[group]; }
  const absl::flat_hash_map<SequenceId, std::unique_ptr<Sequence>>& sequences() const {
    return sequences_;
  }
  // The first sequences, by id, whose ids are above `after`; at most `most` of them. 0 is nobody's
  // id. It costs what it returns, and no more.
  std::vector<const Sequence*> Next(SequenceId after, size_t most) const;
  int64_t lost() const { return lost_; }
  const TableGeometry& geometry() const { return geometry_; }
  // Tokens a virtual page stands for.
  int64_t page_tokens() const { return int64_t{geometry_.page_size} * geometry_.ranks; }
  // How many of a sequence's first `length` tokens `rank` holds for some layer and has not given
  // up.
  int64_t LocalTokens(int rank, const Sequence& sequence, int64_t length) const;
  // The first token that every layer still holds.
  int64_t HeldFrom(const Sequence& sequence) const;
  // How many pages were given up so far, over all sequences.
  int64_t given_up() const { return given_up_; }

 private:
  // Which of the sequences of entries are lost, in their order.
  std::vector<SequenceId> LostOf(const std::vector<worker::StepEntry>& entries);
  absl::Status ReserveEntry(int index, worker::StepKind kind, StepReservation* reservation);
  // The first position of a layer whose row looks at no token before `kept`.
  int64_t FirstPossible(int32_t layer, int64_t kept) const;
  // A repeated call shall know `child` for the fork of so many tokens of `parent`, which may be as
  // it was before the step.
  void Recognise(const Sequence& parent, int64_t length, Sequence* child);
  // OUT_OF_RANGE unless every layer that holds more than `length` tokens may begin there.
  absl::Status CheckCut(FieldName field, const Sequence& sequence, int64_t length) const;
  // Gives up the pages of a group that no row can see any more.
  void GiveUp(int32_t group, Sequence* sequence);
  absl::Status ReservePages(int64_t begin, int64_t end, StepReservation::Change* change,
                            StepReservation* reservation);
  int64_t LongestOf(int32_t group, const Sequence& sequence) const;
  // The first token that the group's layers still hold.
  int64_t FirstHeld(const PageList& list) const { return list.given_up * page_tokens(); }
  // The first `keep` pages of the group stay.
  void Shorten(int32_t group, int64_t keep, Sequence* sequence);
  void Empty(Sequence* sequence);
  SequenceId UnusedId();
  // Workers are to be told how a sequence stands in a group of layers.
  void TellLater(int32_t group, SequenceId id, bool lengths) { untold_[group][id] |= lengths; }
  // A sequence of `owner`'s holds a page of the group, or one of them ceases to.
  void Retain(int32_t group, int32_t page, const ClientAccountPtr& owner);
  void Release(int32_t group, int32_t page, const ClientAccountPtr& owner);
  // Gives back the pages that a plan reserved.
  void Return(int32_t group, const StepReservation::Change& change);
  static void Disown(Sequence* sequence);
  // Gives a reference back, and forgets what is missing of a page that is free now.
  void ReleaseReference(int32_t group, int32_t page);
  // Returns in how many of the sequence's first pages `rank` should have tokens.
  size_t PagesWithTokens(int32_t group, const Sequence& sequence, int rank) const;
  // Whether a page of the sequence fulfils `is`(group, rank, page) on a rank that should have
  // tokens in it, of those that fulfil `of`(group, rank).
  template <typename Of, typename Is>
  bool AnyPage(const Sequence& sequence, const Of& of, const Is& is) const;
  void LoseWhatIsGone();
  // Sequences that have tokens in lost pages are lost; of those that have others, the pages are
  // kept.
  void LoseSequences();
  // One group of layers of RedealInto: fills `lists`, by sequence in the order of their ids.
  absl::StatusOr<std::vector<worker::MovedPage>> RedealGroup(int32_t group, const SequenceTable& to,
                                                             std::vector<PageList>* lists) const;
  // How many tokens of a layer are missing.
  int64_t CountLacking(const Sequence& sequence, int32_t layer) const;
  // The tokens of a layer that are missing in a sequence's page: ranges in order.
  std::vector<PositionRange> LackingIn(const Sequence& sequence, int32_t layer, size_t index) const;
  // The first tokens of a layer that are missing, from a position on.
  std::optional<PositionRange> NextLacking(const Sequence& sequence, int32_t layer,
                                           int64_t from) const;
  MissingTokens MissingOf(const Sequence& sequence, int32_t layer) const;
  // Of an entry of an Append to a lost sequence: it brings what is missing, in order, or repeats
  // what is there. DATA_LOSS says what is missing.
  absl::Status ReserveMissing(int index, StepReservation* reservation);
  // The entry's tokens are there again.
  void BringBack(const worker::StepEntry& entry, int32_t layer, Sequence* sequence);
  // Adds those of the sequence's pages from `begin` on to the transfer that may be brought. Returns
  // the index behind the last page that it looked at.
  size_t Collect(const Sequence& sequence, size_t begin, size_t most, PageTransfer* transfer) const;
  std::optional<PageTransfer> FindTransfer(PagePlace to, absl::Span<const int32_t> most);
  std::optional<PageTransfer> Confirm(PagePlace to);

  const TableGeometry geometry_;
  const LayerGroups groups_;
  std::vector<PageAllocator> pages_;  // [groups]
  // Pointers to sequences stay valid while others come and go.
  absl::flat_hash_map<SequenceId, std::unique_ptr<Sequence>> sequences_;
  absl::btree_set<SequenceId> ids_;  // of all of them
  int64_t lost_ = 0;
  uint64_t last_tokens_ = 0;  // Sequence::tokens
  int64_t given_up_ = 0;
  // [groups]: of which sequences workers are to be told, and whether their lengths, too.
  std::vector<absl::flat_hash_map<SequenceId, bool>> untold_;
  HeldPages* held_ = nullptr;          // of whoever holds what is released now
  std::vector<MissingPages> missing_;  // [groups]
  std::vector<LostPages> lost_pages_;  // [groups]
  // Where the search for pages to bring to each place goes on.
  struct Scan {
    SequenceId sequence = 0;
    int32_t group = 0;
    int rank = 0;
    size_t index = 0;  // the sequence's next page
  };
  std::array<Scan, kPagePlaces.size()> scans_;
};

}  // namespace tributary::service
