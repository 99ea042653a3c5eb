#include "service/schedule/sequence_updates.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/status/errors.h"

namespace tributary::service {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Kind = SequenceUpdate::Kind;

constexpr int32_t kMaxSequences = 6;

TableGeometry Geometry() {
  return {.layers = 2,
          .ranks = 2,
          .page_size = 4,
          .interleave = 4,
          .pages = 64,
          .max_sequences = kMaxSequences,
          .name = "c",
          .window_left = {-1, 15},
          .rollback_tokens = 8,
          .window_pages = 64};
}

SequenceUpdate Open(SequenceId id) { return {Kind::kOpen, id}; }
SequenceUpdate Fork(SequenceId parent, SequenceId id, int64_t length = -1) {
  return {Kind::kFork, id, parent, length};
}
SequenceUpdate Truncate(SequenceId id, int64_t length) { return {Kind::kTruncate, id, 0, length}; }
SequenceUpdate Close(SequenceId id) { return {Kind::kClose, id}; }

// All that a table says of its sequences, and how many of its pages are used and shared.
struct Image {
  struct Each {
    std::vector<int64_t> lengths, last_step;
    std::vector<std::vector<int32_t>> pages;
    bool lost = false;
    const ClientAccount* owner = nullptr;
    SequenceId parent = 0;
    bool operator==(const Each&) const = default;
  };
  std::map<SequenceId, Each> sequences;
  std::vector<int32_t> used, shared;
  int64_t lost = 0;
  bool operator==(const Image&) const = default;
};

Image ImageOf(const SequenceTable& table) {
  Image image;
  for (const auto& [id, s] : table.sequences()) {
    Image::Each each{s->lengths, s->last_step, {}, s->lost, s->owner.get(), s->parent};
    for (const PageList& list : s->groups) each.pages.push_back(list.pages);
    image.sequences[id] = each;
  }
  for (int32_t g = 0; g < table.groups().size(); ++g) {
    image.used.push_back(table.pages(g).used());
    image.shared.push_back(table.pages(g).shared());
  }
  image.lost = table.lost();
  return image;
}

class SequenceUpdatesTest : public ::testing::Test {
 protected:
  void Append(SequenceId id, int32_t tokens) {
    for (int32_t layer = 0; layer < 2; ++layer) {
      const int64_t first = table_.Find(id)->lengths[layer];
      const auto step =
          table_.Reserve(layer, worker::StepKind::kAppend,
                         {{.sequence = id, .first_position = first, .new_tokens = tokens}});
      ASSERT_TRUE(step.ok()) << step.status();
      table_.Commit(*step);
    }
  }
  absl::StatusOr<UpdatedSequences> Update(const std::vector<SequenceUpdate>& updates,
                                          const ClientAccountPtr& owner = nullptr) {
    return ApplyUpdates(updates, owner, &table_);
  }
  void MustRefuse(const std::vector<SequenceUpdate>& updates, absl::StatusCode code,
                  const std::string& field, const ClientAccountPtr& owner = nullptr) {
    const Image before = ImageOf(table_);
    const auto updated = Update(updates, owner);
    EXPECT_EQ(updated.status().code(), code) << updated.status();
    EXPECT_EQ(FieldOf(updated.status()), field);
    EXPECT_TRUE(ImageOf(table_) == before);
  }

  SequenceTable table_{Geometry()};
};

TEST_F(SequenceUpdatesTest, AppliesInOrderAndSaysWhatWorkersMustKnow) {
  ASSERT_TRUE(Update({Open(1)}).ok());
  Append(1, 20);
  // The name of a closed sequence is taken by a fork, and a fork that is closed is not told.
  const auto updated = Update(
      {Fork(1, 2), Truncate(2, 12), Fork(2, 3, 12), Close(1), Fork(2, 1, 12), Close(3), Open(0)});
  ASSERT_TRUE(updated.ok()) << updated.status();
  std::vector<int64_t> lengths;
  for (const auto& state : updated->states) lengths.push_back(state.length);
  EXPECT_THAT(lengths, ElementsAre(20, 12, 12, 0, 12, 0, 0));
  EXPECT_THAT(updated->closed, ElementsAre(1, 3));
  EXPECT_THAT(updated->forked, ElementsAre(2, 1));
  EXPECT_NE(table_.Find(updated->states.back().sequence), nullptr);
  EXPECT_EQ(table_.sequences().size(), 3u);
  ASSERT_TRUE(Update({Close(1), Close(2)}).ok());
  EXPECT_EQ(table_.pages(0).used(), 0);
  EXPECT_EQ(table_.pages(1).used(), 0);
}

TEST_F(SequenceUpdatesTest, ARefusalNamesTheFieldAndChangesNothing) {
  ASSERT_TRUE(Update({Open(1), Open(2)}).ok());
  Append(1, 40);
  Append(1, 20);  // far enough for the window's group to give pages up
  Append(2, 10);
  ASSERT_GT(table_.given_up(), 0);
  table_.MarkLost(table_.Find(2));
  using enum absl::StatusCode;
  MustRefuse({Open(2), Close(1), Open(1), Open(0), Close(9)}, kNotFound, "updates[4].close");
  MustRefuse({Close(2), Fork(1, 2), Open(2)}, kAlreadyExists, "updates[2].open");
  MustRefuse({Close(1), Fork(1, 3)}, kNotFound, "updates[1].fork.parent_id");
  MustRefuse({Truncate(1, 58), Fork(1, 3, 59)}, kOutOfRange, "updates[1].fork.length");
  MustRefuse({Truncate(1, 58), Truncate(1, 4)}, kOutOfRange, "updates[1].truncate.length");
  MustRefuse({Open(3), Open(4), Open(5), Open(6), Open(7)}, kResourceExhausted, "");
}

TEST_F(SequenceUpdatesTest, AccountsAreAsTheyWereAfterARefusal) {
  const ClientLimits limits{.sequences = 2, .pages = 40};
  const auto account = [&] { return std::make_shared<ClientAccount>("a", &limits, OnRefused()); };
  const ClientAccountPtr owner = account(), other = account();
  ASSERT_TRUE(Update({Open(1), Open(2)}, owner).ok());
  ASSERT_TRUE(Update({Open(3)}, other).ok());
  Append(1, 20);
  const int64_t pages = owner->pages();
  // The other client takes over an empty sequence, and the first one's are closed, for a while.
  MustRefuse({Open(2), Close(1), Close(9)}, absl::StatusCode::kNotFound, "updates[2].close", other);
  EXPECT_EQ(owner->sequences(), 2);
  EXPECT_EQ(owner->pages(), pages);
  EXPECT_EQ(other->sequences(), 1);
  EXPECT_EQ(other->pages(), 0);
  // A place that an update gives up may be taken by a later one.
  ASSERT_TRUE(Update({Fork(1, 4), Close(1)}, other).ok());
  EXPECT_EQ(owner->sequences(), 1);
  EXPECT_EQ(owner->pages(), 0);
  EXPECT_EQ(other->pages(), pages);
}

// What the test knows of a sequence: all layers are equally long.
struct Model {
  int64_t length = 0;
  SequenceId parent = 0;
  int64_t fork_length = 0;
};
using Models = std::map<SequenceId, Model>;

// Whether an update takes effect. Truncations and forks here stay within what windows reach.
bool Expect(const SequenceUpdate& update, Models* models) {
  const SequenceId id = update.sequence;
  const bool open = models->contains(id);
  const bool room = models->size() < kMaxSequences;
  switch (update.kind) {
    case Kind::kOpen:
      if (open ? (*models)[id].length > 0 : !room) return false;
      (*models)[id] = {};
      return true;
    case Kind::kFork: {
      if (!models->contains(update.parent)) return false;
      const int64_t held = (*models)[update.parent].length;
      const int64_t length = update.length < 0 ? held : update.length;
      if (length > held) return false;
      const Model forked{length, update.parent, length};
      if (open) {
        const Model& child = (*models)[id];
        return child.parent == update.parent && child.fork_length == length &&
               child.length == length;
      }
      if (!room) return false;
      (*models)[id] = forked;
      return true;
    }
    case Kind::kTruncate:
      if (open) (*models)[id].length = std::min((*models)[id].length, update.length);
      return open;
    case Kind::kClose:
      return models->erase(id) > 0;
  }
  return false;
}

TEST_F(SequenceUpdatesTest, AllOrNoneAgainstAModel) {
  std::mt19937 random(7);
  const auto pick = [&](int below) { return static_cast<int>(random() % below); };
  Models models;
  int applied = 0, refused = 0;
  for (int round = 0; round < 4000; ++round) {
    std::vector<SequenceUpdate> updates(1 + pick(5));
    for (SequenceUpdate& update : updates) {
      const SequenceId id = 1 + pick(8);
      const int64_t length = pick(20);
      switch (pick(4)) {
        case 0:
          update = Open(id);
          break;
        case 1:
          update = Fork(1 + pick(8), id, pick(2) == 0 ? -1 : length);
          break;
        case 2:
          update = Truncate(id, length);
          break;
        default:
          update = Close(id);
      }
    }
    Models after = models;
    bool all = true;
    for (const SequenceUpdate& update : updates) all = all && Expect(update, &after);
    const Image before = ImageOf(table_);
    const auto updated = Update(updates);
    ASSERT_EQ(updated.ok(), all) << "round " << round << ": " << updated.status();
    if (all) {
      models = after;
      ++applied;
    } else {
      ASSERT_TRUE(ImageOf(table_) == before) << "round " << round;
      ++refused;
    }
    if (!models.empty()) {
      auto grown = std::next(models.begin(), pick(static_cast<int>(models.size())));
      if (grown->second.length < 20) {
        const int32_t tokens = 1 + pick(4);
        Append(grown->first, tokens);
        grown->second.length += tokens;
      }
    }
    ASSERT_EQ(table_.sequences().size(), models.size());
    for (const auto& [id, model] : models) {
      ASSERT_THAT(table_.Find(id)->lengths, ElementsAre(model.length, model.length));
    }
  }
  EXPECT_GT(applied, 500);
  EXPECT_GT(refused, 500);
  for (const auto& [id, model] : models) ASSERT_TRUE(Update({Close(id)}).ok());
  EXPECT_EQ(table_.pages(0).used(), 0);
  EXPECT_EQ(table_.pages(1).used(), 0);
  EXPECT_THAT(table_.sequences(), IsEmpty());
}

}  // namespace
}  // namespace tributary::service
