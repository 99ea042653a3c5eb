// Steps over layers, as sessions submit them: accepted on top of each other, settled in order,
// undone in reverse. And the order of calls at sequences, for steps of one session.
#include "service/schedule/range_steps.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "base/status/errors.h"
#include "service/schedule/sequence_order.h"

namespace tributary::service {
namespace {

using ::testing::ElementsAre;

constexpr int64_t kPageTokens = 32;  // page_size * ranks
constexpr int32_t kLayers = 3;

TableGeometry Geometry(int32_t pages) {
  return {.layers = kLayers,
          .ranks = 2,
          .page_size = 16,
          .interleave = 16,
          .pages = pages,
          .max_sequences = 16,
          .name = "c"};
}

worker::StepEntry Rows(SequenceId id, int64_t first, int32_t rows) {
  return {.sequence = id, .first_position = first, .query_rows = rows, .new_tokens = rows};
}

class RangeStepsTest : public ::testing::Test {
 protected:
  void Open(SequenceId id) {
    bool reopened = false;
    ASSERT_TRUE(table_.Open(id, &reopened).ok());
  }
  absl::StatusOr<AcceptedRange> Accept(const std::vector<worker::StepEntry>& entries,
                                       const std::vector<EntryChange>& changes = {},
                                       LayerRange range = {0, kLayers}) {
    return steps_.Accept(range, worker::StepKind::kDecode, entries, changes, nullptr);
  }
  AcceptedRange MustAccept(const std::vector<worker::StepEntry>& entries,
                           const std::vector<EntryChange>& changes = {}) {
    auto accepted = Accept(entries, changes);
    EXPECT_TRUE(accepted.ok()) << accepted.status();
    return *std::move(accepted);
  }
  int64_t Length(SequenceId id) { return LeastLength(*table_.Find(id)); }

  SequenceTable table_{Geometry(12)};
  RangeSteps steps_{table_};
};

TEST_F(RangeStepsTest, LaterStepsFollowThoseThatWereAccepted) {
  Open(1);
  AcceptedRange first = MustAccept({Rows(1, 0, 40)});
  AcceptedRange second = MustAccept({Rows(1, 40, 1)});
  EXPECT_THAT(second.lengths, ElementsAre(41));
  steps_.Settle(&first);
  steps_.Settle(&second);
  EXPECT_THAT(table_.Find(1)->lengths, ElementsAre(41, 41, 41));
}

TEST_F(RangeStepsTest, FailedStepsAreUndoneInReverse) {
  Open(1);
  AcceptedRange first = MustAccept({Rows(1, 0, 40)});
  AcceptedRange second = MustAccept({Rows(1, 40, 40)});
  AcceptedRange third = MustAccept({Rows(1, 80, 1)});
  steps_.Settle(&first);
  steps_.Undo(&third);
  steps_.Undo(&second);
  EXPECT_THAT(table_.Find(1)->lengths, ElementsAre(40, 40, 40));
  EXPECT_EQ(table_.pages().used(), 2);
}

TEST_F(RangeStepsTest, LayersThatDisagreeAreRefusedWithTheirLengths) {
  Open(1);
  auto some = Accept({Rows(1, 0, 10)}, {}, {0, 1});
  ASSERT_TRUE(some.ok());
  steps_.Settle(&*some);
  const absl::Status refused = Accept({Rows(1, 10, 1)}).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(FieldOf(refused), "entries[0].first_position");
  EXPECT_THAT(table_.Find(1)->lengths, ElementsAre(10, 0, 0));
}

// Also where a layer that differs would be refused for what it holds.
TEST_F(RangeStepsTest, LayersThatDisagreeAreSaidBeforeWhatEachOfThemHolds) {
  Open(1);
  AcceptedRange all = MustAccept({Rows(1, 0, 40)});
  steps_.Settle(&all);
  auto one = Accept({Rows(1, 40, 1)}, {}, {0, 1});
  ASSERT_TRUE(one.ok()) << one.status();
  steps_.Settle(&*one);
  // Overlaps the end of layer 0.
  const absl::Status refused = Accept({Rows(1, 40, 40)}).status();
  EXPECT_TRUE(absl::IsOutOfRange(refused)) << refused;
  EXPECT_EQ(FieldOf(refused), "entries[0].first_position");
}

TEST_F(RangeStepsTest, ARefusedStepChangesNothing) {
  Open(1);
  Open(2);
  AcceptedRange filled = MustAccept({Rows(1, 0, 100), Rows(2, 0, 60)});
  steps_.Settle(&filled);
  const int32_t used = table_.pages().used();
  // The truncation and the fork would do; the pages do not.
  const absl::Status refused = Accept({Rows(1, 50, 1), Rows(3, 60, 500)},
                                      {{.truncate_to = 50}, {.fork_from = 2, .fork_length = 60}})
                                   .status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_EQ(Length(1), 100);
  EXPECT_EQ(Length(2), 60);
  EXPECT_EQ(table_.Find(3), nullptr);
  EXPECT_EQ(table_.pages().used(), used);
}

TEST_F(RangeStepsTest, ATruncationOfNothingNamesTheSequence) {
  const absl::Status refused = Accept({Rows(9, 5, 1)}, {{.truncate_to = 5}}).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(FieldOf(refused), "entries[0].sequence_id") << refused;
}

TEST_F(RangeStepsTest, PagesOfARollbackStayTakenUntilTheStepIsOver) {
  Open(1);
  AcceptedRange filled = MustAccept({Rows(1, 0, 96)});
  EXPECT_EQ(table_.pages().used(), 3);
  AcceptedRange cut = MustAccept({Rows(1, 10, 1)}, {{.truncate_to = 10}});
  EXPECT_EQ(table_.pages().used(), 3) << "the first step may still read them";
  steps_.Settle(&filled);
  EXPECT_EQ(table_.pages().used(), 3);
  steps_.Settle(&cut);
  EXPECT_EQ(table_.pages().used(), 1);
}

TEST_F(RangeStepsTest, BeamsMayChangePlaces) {
  Open(1);
  Open(2);
  AcceptedRange filled = MustAccept({Rows(1, 0, 40), Rows(2, 0, 70)});
  steps_.Settle(&filled);
  AcceptedRange swapped =
      MustAccept({Rows(1, 70, 1), Rows(2, 40, 1)}, {{.fork_from = 2}, {.fork_from = 1}});
  EXPECT_THAT(swapped.lengths, ElementsAre(71, 41));
  steps_.Settle(&swapped);
  EXPECT_EQ(Length(1), 71);
  EXPECT_EQ(Length(2), 41);
  EXPECT_EQ(table_.pages().shared(), 0);
}

// ---- against a model ----------------------------------------------------------------------------

// What workers hold, token by token, when they carry out what they are told at once.
class Workers {
 public:
  void Apply(const AcceptedRange& step, const std::vector<std::vector<int>>& written) {
    for (const GroupPages& pages : step.pages) {
      for (const worker::PageCopy& copy : pages.page_copies) {
        memory_[copy.destination] = memory_[copy.source];
      }
      for (const worker::PageUpdate& update : pages.page_updates) {
        std::vector<int32_t>& table = tables_[update.sequence];
        table.resize(std::max(table.size(), update.first_index + update.pages.size()));
        std::copy(update.pages.begin(), update.pages.end(), table.begin() + update.first_index);
      }
    }
    for (size_t i = 0; i < step.entries.size(); ++i) {
      for (size_t t = 0; t < written[i].size(); ++t) {
        const int64_t at = step.entries[i].first_position + static_cast<int64_t>(t);
        memory_[tables_[step.entries[i].sequence][at / kPageTokens]][at % kPageTokens] =
            written[i][t];
      }
    }
  }
  int At(int32_t page, int64_t slot) { return memory_[page][slot]; }

 private:
  std::map<SequenceId, std::vector<int32_t>> tables_;
  std::map<int32_t, std::map<int64_t, int>> memory_;
};

class RandomSteps {
 public:
  explicit RandomSteps(uint32_t seed) : random_(seed) {
    for (SequenceId id = 1; id <= kSequences; ++id) {
      bool reopened = false;
      EXPECT_TRUE(table_.Open(id, &reopened).ok());
    }
  }

  void Run() {
    for (int i = 0; i < 400 && !::testing::Test::HasFailure(); ++i) {
      const int dice = Below(10);
      if (dice < 6) {
        Submit();
      } else if (dice < 9) {
        Settle();
      } else {
        FailAll();
      }
    }
    while (!flight_.empty() && !::testing::Test::HasFailure()) Settle();
    if (::testing::Test::HasFailure()) return;
    Check();
    for (SequenceId id = 1; id <= kSequences; ++id) EXPECT_TRUE(table_.Close(id).ok());
    EXPECT_EQ(table_.pages().used(), 0);
  }

 private:
  static constexpr SequenceId kSequences = 4;
  struct Flight {
    AcceptedRange accepted;
    std::map<SequenceId, std::vector<int>> before;  // tokens of its sequences
    std::map<SequenceId, std::vector<int>> cut;     // the same, once cut by the step itself
    struct Seen {
      SequenceId sequence;
      int32_t page;
      int64_t slot;
    };
    std::vector<Seen> seen;  // where its rows read
  };

  int Below(int n) { return static_cast<int>(random_() % static_cast<uint32_t>(n)); }

  void Submit() {
    Flight flight;
    std::vector<worker::StepEntry> entries;
    std::vector<EntryChange> changes;
    std::vector<std::vector<int>> written;
    std::map<SequenceId, std::vector<int>> after = tokens_;
    for (SequenceId id = 1; id <= kSequences; ++id) {
      if (Below(2) == 0) continue;
      EntryChange change;
      if (Below(4) == 0 && !tokens_[id].empty()) {
        change.truncate_to = Below(static_cast<int>(tokens_[id].size()) + 1);
        after[id].resize(static_cast<size_t>(*change.truncate_to));
      }
      flight.cut[id] = after[id];
      const auto rows = 1 + Below(40);
      entries.push_back(Rows(id, static_cast<int64_t>(after[id].size()), rows));
      changes.push_back(change);
      written.emplace_back();
      for (int r = 0; r < rows; ++r) {
        written.back().push_back(static_cast<int>(writer_.size()));
        after[id].push_back(static_cast<int>(writer_.size()));
        writer_.push_back(id);
      }
    }
    if (entries.empty()) return;
    auto accepted =
        steps_.Accept({0, kLayers}, worker::StepKind::kDecode, entries, changes, nullptr);
    if (!accepted.ok()) {
      EXPECT_EQ(accepted.status().code(), absl::StatusCode::kResourceExhausted);
      return Check();
    }
    flight.before = tokens_;
    flight.accepted = *std::move(accepted);
    workers_.Apply(flight.accepted, written);
    tokens_ = after;
    for (const worker::StepEntry& entry : entries) {
      const PageList& list = table_.Find(entry.sequence)->groups[0];
      for (size_t at = 0; at < tokens_[entry.sequence].size(); ++at) {
        flight.seen.push_back(
            {entry.sequence, list.pages[at / kPageTokens], static_cast<int64_t>(at % kPageTokens)});
      }
    }
    flight_.push_back(std::move(flight));
    Check();
  }

  // Later steps of the session run after this one, so they may have cut a sequence and written its
  // tokens anew. Nobody else may have been given a page that this step reads.
  void Settle() {
    if (flight_.empty()) return;
    Flight& flight = flight_.front();
    for (const Flight::Seen& seen : flight.seen) {
      const int token = workers_.At(seen.page, seen.slot);
      ASSERT_EQ(writer_[static_cast<size_t>(token)], seen.sequence) << "somebody else wrote there";
    }
    steps_.Settle(&flight.accepted);
    flight_.pop_front();
  }

  // Rollbacks that came with failed steps stay.
  void FailAll() {
    while (!flight_.empty()) {
      Flight& flight = flight_.back();
      steps_.Undo(&flight.accepted);
      for (const auto& [id, cut] : flight.cut) {
        std::vector<int>& tokens = tokens_[id];
        tokens.resize(std::min(tokens.size(), cut.size()));
      }
      flight_.pop_back();
    }
    Check();
  }

  // Every token lies where the table says.
  void Check() {
    for (SequenceId id = 1; id <= kSequences; ++id) {
      const Sequence& sequence = *table_.Find(id);
      const std::vector<int>& tokens = tokens_[id];
      for (const int64_t length : sequence.lengths) {
        ASSERT_EQ(length, static_cast<int64_t>(tokens.size())) << "sequence " << id;
      }
      for (size_t at = 0; at < tokens.size(); ++at) {
        const int32_t page = sequence.groups[0].pages[at / kPageTokens];
        ASSERT_EQ(workers_.At(page, static_cast<int64_t>(at % kPageTokens)), tokens[at])
            << "sequence " << id << " position " << at;
      }
    }
  }

  std::mt19937 random_;
  SequenceTable table_{Geometry(24)};
  RangeSteps steps_{table_};
  Workers workers_;
  std::map<SequenceId, std::vector<int>> tokens_;
  std::deque<Flight> flight_;
  std::vector<SequenceId> writer_{0};  // [tokens]; token 0 is nobody's
};

TEST(RangeSteps, TokensLieWhereTheTableSaysWhateverIsUndone) {
  for (uint32_t seed = 1; seed <= 60 && !::testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    RandomSteps(seed).Run();
  }
}

// ---- the order of calls -------------------------------------------------------------------------

using Member = SequenceOrder::Member;

TEST(SequenceOrderTest, StepsOfOneSessionHoldASequenceTogether) {
  SequenceOrder order;
  Member first{.sequences = {1}, .session = 7};
  Member second{.sequences = {1}, .session = 7};
  Member call{.sequences = {1}};
  Member third{.sequences = {1}, .session = 7};
  EXPECT_TRUE(order.Enter(&first));
  EXPECT_TRUE(order.Enter(&second));
  EXPECT_FALSE(order.Enter(&call));
  EXPECT_FALSE(order.Enter(&third)) << "the call came first";
  std::vector<Member*> runnable;
  order.Leave(&first, &runnable);
  EXPECT_THAT(runnable, ElementsAre());
  order.Leave(&second, &runnable);
  EXPECT_THAT(runnable, ElementsAre(&call));
  runnable.clear();
  order.Leave(&call, &runnable);
  EXPECT_THAT(runnable, ElementsAre(&third));
  order.Leave(&third, &runnable);
  EXPECT_TRUE(order.empty());
}

TEST(SequenceOrderTest, AStepWaitsForAllItsSequences) {
  SequenceOrder order;
  Member other{.sequences = {2}};
  Member first{.sequences = {1}, .session = 7};
  Member both{.sequences = {1, 2}, .session = 7};
  EXPECT_TRUE(order.Enter(&other));
  EXPECT_TRUE(order.Enter(&first));
  EXPECT_FALSE(order.Enter(&both));
  std::vector<Member*> runnable;
  order.Leave(&other, &runnable);
  EXPECT_THAT(runnable, ElementsAre(&both)) << "of sequence 1 it stands with its session";
}

}  // namespace
}  // namespace tributary::service
