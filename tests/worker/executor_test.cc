// What an executor does with commands besides attending: caches, epochs, refusals, broken groups.

#include "worker/executor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "base/status/errors.h"
#include "collective/in_process.h"
#include "collective/rendezvous/memory_rendezvous.h"
#include "tests/worker/ranks.h"
#include "tests/worker/test_host.h"
#include "worker/cpu_backend.h"

namespace tributary::worker::testing {
namespace {

using ::testing::HasSubstr;

constexpr CacheId kCache = 3;

// One group and the commands to it; tensors are ones.
class ExecutorTest : public ::testing::Test {
 protected:
  explicit ExecutorTest(int size = 2) : ranks_(size, {}), values_(1 << 16, 0x3f80) {}

  Command Make(decltype(Command::body) body) {
    return CommandOf(ranks_.epoch(), ++number_, kCache, std::move(body));
  }

  // The status all ranks agree on.
  absl::Status Execute(const Command& command) {
    replies_ = ranks_.Execute(command);
    for (const auto& [rank, reply] : replies_) {
      EXPECT_EQ(reply.status, replies_.at(0).status) << "rank " << rank;
      EXPECT_EQ(reply.epoch, command.epoch);
      EXPECT_EQ(reply.number, command.number);
    }
    return replies_.at(0).status;
  }
  absl::Status Execute(decltype(Command::body) body) { return Execute(Make(std::move(body))); }

  TensorView Ones(int32_t rows, int32_t heads, int32_t dim) const {
    return {reinterpret_cast<const std::byte*>(values_.data()), DType::kBf16,
            static_cast<size_t>(rows) * static_cast<size_t>(heads) * static_cast<size_t>(dim) * 2};
  }

  StepCommand Decode(const CacheSpec& spec, std::vector<StepEntry> entries) const {
    StepCommand step;
    int32_t rows = 0;
    int32_t tokens = 0;
    for (const StepEntry& entry : entries) {
      rows += entry.query_rows;
      tokens += entry.new_tokens;
    }
    step.entries = std::move(entries);
    step.q = Ones(rows, spec.q_heads, spec.head_dim);
    step.k = Ones(tokens, spec.kv_heads, spec.head_dim);
    step.v = Ones(tokens, spec.kv_heads, spec.head_dim);
    return step;
  }

  void CreateWithSequence(const CacheSpec& spec) {
    ASSERT_TRUE(Execute(CreateCacheCommand{spec}).ok());
    ASSERT_TRUE(Execute(SetTablesCommand{{{1, 0, {4, 2}}}}).ok());
  }

  ThreadRanks ranks_;
  std::vector<uint16_t> values_;  // bf16 ones
  uint64_t number_ = 0;
  std::map<int, Reply> replies_;
};

// ---- caches -----------------------------------------------------------------------------------

TEST_F(ExecutorTest, CreatingACacheAgainKeepsItsData) {
  const CacheSpec spec = SmallSpec();
  CreateWithSequence(spec);
  ASSERT_TRUE(Execute(Decode(spec, {{1, 0, 3, 3}})).ok());
  ASSERT_TRUE(Execute(CreateCacheCommand{spec}).ok());
  ASSERT_TRUE(Execute(Decode(spec, {{1, 0, 3, 3, /*replay=*/true}})).ok());
  for (const auto& [rank, reply] : replies_) EXPECT_TRUE(reply.conflicts.empty());
  EXPECT_NEAR(replies_.at(0).o[0], 1.0f, 1e-6f);
}

TEST_F(ExecutorTest, TheSameScaleGivenTwoWaysIsTheSameSpec) {
  CacheSpec spec = SmallSpec();
  spec.layers[0].k_scale = {0.5f};
  ASSERT_TRUE(Execute(CreateCacheCommand{spec}).ok());
  spec.layers[0].k_scale = {0.5f, 0.5f};
  EXPECT_TRUE(Execute(CreateCacheCommand{spec}).ok());
  spec.layers[0].k_scale = {0.5f, 0.25f};
  EXPECT_EQ(Execute(CreateCacheCommand{spec}).code(), absl::StatusCode::kAlreadyExists);
}

TEST_F(ExecutorTest, AnotherSpecUnderTheSameIdIsRefused) {
  CacheSpec spec = SmallSpec();
  ASSERT_TRUE(Execute(CreateCacheCommand{spec}).ok());
  spec.layers[0].window.left = 5;
  EXPECT_EQ(Execute(CreateCacheCommand{spec}).code(), absl::StatusCode::kAlreadyExists);
}

TEST_F(ExecutorTest, BadSpecsNeverTakeMemory) {
  CacheSpec spec = SmallSpec();
  spec.head_dim = 112;
  const absl::Status status = Execute(CreateCacheCommand{spec});
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FieldOf(status), "head_dim");
  EXPECT_EQ(ranks_.executor(0).memory_used(), 0u);
}

TEST_F(ExecutorTest, MemoryIsCountedAndGivenBack) {
  const CacheSpec spec = SmallSpec();
  const size_t bytes = *ShardBytes(spec);
  ASSERT_TRUE(Execute(CreateCacheCommand{spec}).ok());
  EXPECT_EQ(ranks_.executor(0).memory_used(), bytes);
  Command second = Make(CreateCacheCommand{spec});
  second.cache = kCache + 1;
  ASSERT_TRUE(Execute(second).ok());
  EXPECT_EQ(ranks_.executor(1).memory_used(), 2 * bytes);
  ASSERT_TRUE(Execute(DropCacheCommand{}).ok());
  EXPECT_EQ(ranks_.executor(1).memory_used(), bytes);
}

TEST(ExecutorMemory, ACacheBeyondTheLimitIsRefusedWithTheSizes) {
  const CacheSpec spec = SmallSpec();
  const size_t bytes = *ShardBytes(spec);
  ExecutorOptions options;
  options.memory_limit = bytes + bytes / 2;
  ThreadRanks ranks(1, options);
  Command command;
  command.epoch = ranks.epoch();
  command.cache = 1;
  command.body = CreateCacheCommand{spec};
  ASSERT_TRUE(ranks.Execute(command).at(0).status.ok());
  command.cache = 2;
  const absl::Status status = ranks.Execute(command).at(0).status;
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr(std::to_string(bytes)));
  EXPECT_THAT(std::string(status.message()), HasSubstr(std::to_string(bytes / 2)));
  EXPECT_EQ(ranks.executor(0).memory_used(), bytes);
  command.cache = 1;
  command.body = DropCacheCommand{};
  ASSERT_TRUE(ranks.Execute(command).at(0).status.ok());
  command.cache = 2;
  command.body = CreateCacheCommand{spec};
  EXPECT_TRUE(ranks.Execute(command).at(0).status.ok());
}

// A large cache is no step's delay: commands only ask whether its memory is there by now, and steps
// of others come in between. What is not complete is no cache yet.
TEST(ExecutorMemory, MemoryIsTakenWhileOtherCommandsAreCarriedOut) {
  CacheSpec spec = SmallSpec();
  spec.num_pages = 2048;
  ASSERT_GT(*ShardBytes(spec), size_t{8} << 20);
  ExecutorOptions options;
  options.memory_slice = std::chrono::nanoseconds(0);
  ThreadRanks ranks(1, options);
  Command create;
  create.epoch = ranks.epoch();
  create.body = CreateCacheCommand{spec};
  Reply reply = ranks.Execute(create).at(0);
  ASSERT_TRUE(reply.status.ok()) << reply.status;
  EXPECT_TRUE(reply.more_memory);
  Command tables = create;
  tables.body = SetTablesCommand{{{1, 0, {4, 2}}}};
  EXPECT_EQ(ranks.Execute(tables).at(0).status.code(), absl::StatusCode::kNotFound);

  // Dropped half-way, and begun again.
  Command drop = create;
  drop.body = DropCacheCommand{};
  EXPECT_TRUE(ranks.Execute(drop).at(0).status.ok());
  EXPECT_EQ(ranks.executor(0).memory_used(), 0u);
  int commands = 0;
  do {
    reply = ranks.Execute(create).at(0);
    ASSERT_TRUE(reply.status.ok()) << reply.status;
    ++commands;
  } while (reply.more_memory);
  EXPECT_GT(commands, 1);
  EXPECT_TRUE(ranks.Execute(tables).at(0).status.ok());
  EXPECT_FALSE(ranks.Execute(create).at(0).more_memory);
}

TEST(ExecutorMemory, ACacheThatNoMachineHoldsIsRefused) {
  CacheSpec spec = SmallSpec();
  spec.num_pages = 1 << 30;
  ThreadRanks ranks(1, {});
  Command command;
  command.epoch = ranks.epoch();
  command.body = CreateCacheCommand{spec};
  EXPECT_EQ(ranks.Execute(command).at(0).status.code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(ExecutorTest, DroppingWhatIsUnknownChangesNothing) {
  EXPECT_TRUE(Execute(DropCacheCommand{}).ok());
  EXPECT_TRUE(Execute(DropTablesCommand{{1, 2}}).ok());
  const CacheSpec spec = SmallSpec();
  CreateWithSequence(spec);
  EXPECT_TRUE(Execute(DropTablesCommand{{99}}).ok());
  EXPECT_TRUE(Execute(Decode(spec, {{1, 0, 1, 1}})).ok());
}

TEST_F(ExecutorTest, ADroppedTableIsGone) {
  const CacheSpec spec = SmallSpec();
  CreateWithSequence(spec);
  ASSERT_TRUE(Execute(DropTablesCommand{{1}}).ok());
  const absl::Status status = Execute(Decode(spec, {{1, 0, 1, 1}}));
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(FieldOf(status), "entries[0].sequence");
}

TEST_F(ExecutorTest, AnUnknownCacheIsNotFound) {
  EXPECT_EQ(Execute(SetTablesCommand{}).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Execute(Decode(SmallSpec(), {{1, 0, 1, 1}})).code(), absl::StatusCode::kNotFound);
}

// ---- refusals ---------------------------------------------------------------------------------

struct Refusal {
  const char* name;
  absl::StatusCode code;
  const char* field;
  std::function<void(StepCommand&)> spoil;
};

class Refusals : public ExecutorTest, public ::testing::WithParamInterface<Refusal> {};

// The field is named, all ranks agree, nothing changed, and the group goes on.
TEST_P(Refusals, NameTheFieldAndChangeNothing) {
  const CacheSpec spec = SmallSpec();
  CreateWithSequence(spec);
  ASSERT_TRUE(Execute(SetTablesCommand{{{2, 0, {9}}}}).ok());
  ASSERT_TRUE(Execute(Decode(spec, {{1, 0, 3, 3}, {2, 0, 2, 2}})).ok());
  const std::vector<float> before = replies_.at(0).o;

  StepCommand bad = Decode(spec, {{1, 3, 1, 1}, {2, 2, 1, 1}});
  // Would overwrite both sequences if any of it were done before the refusal.
  bad.page_copies = {{50, 4}, {50, 9}};
  bad.page_updates = {{1, 0, {51}}};
  GetParam().spoil(bad);
  const absl::Status status = Execute(bad);
  EXPECT_EQ(status.code(), GetParam().code) << status;
  EXPECT_EQ(FieldOf(status), GetParam().field) << status;
  EXPECT_TRUE(replies_.at(0).o.empty());

  ASSERT_TRUE(Execute(Decode(spec, {{1, 0, 3, 3, true}, {2, 0, 2, 2, true}})).ok());
  for (const auto& [rank, reply] : replies_) EXPECT_TRUE(reply.conflicts.empty());
  EXPECT_EQ(replies_.at(0).o, before);
}

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kOutOfRange = absl::StatusCode::kOutOfRange;

const Refusal kRefusals[] = {
    {"NegativeLayer", kInvalid, "layer", [](StepCommand& s) { s.layer = -1; }},
    {"LayerBeyondLast", kInvalid, "layer", [](StepCommand& s) { s.layer = 1; }},
    {"NoEntries", kInvalid, "entries", [](StepCommand& s) { s.entries.clear(); }},
    {"NegativePosition", kInvalid, "entries[1].first_position",
     [](StepCommand& s) { s.entries[1].first_position = -1; }},
    {"NegativeRows", kInvalid, "entries[0].query_rows",
     [](StepCommand& s) { s.entries[0].query_rows = -1; }},
    {"NegativeTokens", kInvalid, "entries[0].new_tokens",
     [](StepCommand& s) { s.entries[0].new_tokens = -1; }},
    {"EmptyEntry", kInvalid, "entries[0].query_rows",
     [](StepCommand& s) { s.entries[0].query_rows = s.entries[0].new_tokens = 0; }},
    {"UnequalCounts", kInvalid, "entries[1].new_tokens",
     [](StepCommand& s) { s.entries[1].query_rows = 2; }},
    {"RowsInAnAppend", kInvalid, "entries[0].query_rows",
     [](StepCommand& s) { s.kind = StepKind::kAppend; }},
    {"SequenceTwice", kInvalid, "entries[1].sequence",
     [](StepCommand& s) { s.entries[1].sequence = 1; }},
    {"UnknownSequence", absl::StatusCode::kNotFound, "entries[1].sequence",
     [](StepCommand& s) { s.entries[1].sequence = 77; }},
    {"BeyondTheTable", kOutOfRange, "entries[1].first_position",
     [](StepCommand& s) { s.entries[1].first_position = 32; }},
    {"FarBeyondTheTable", kOutOfRange, "entries[0].first_position",
     [](StepCommand& s) { s.entries[0].first_position = INT64_MAX; }},
    {"ShortQ", kInvalid, "q", [](StepCommand& s) { s.q.bytes -= 2; }},
    {"LongK", kInvalid, "k", [](StepCommand& s) { s.k.bytes += 2; }},
    {"NoV", kInvalid, "v", [](StepCommand& s) { s.v = {}; }},
    {"NullQ", kInvalid, "q", [](StepCommand& s) { s.q.data = nullptr; }},
    {"Fp8Q", kInvalid, "q", [](StepCommand& s) { s.q.dtype = DType::kFp8E4M3; }},
    {"KAndVOfDifferentTypes", kInvalid, "v", [](StepCommand& s) { s.v.dtype = DType::kF16; }},
    {"CopyOfNoPage", kInvalid, "page_copies[1]",
     [](StepCommand& s) { s.page_copies[1].source = 64; }},
    {"CopyToNoPage", kInvalid, "page_copies[0]",
     [](StepCommand& s) { s.page_copies[0].destination = -1; }},
    {"UpdateToNoPage", kInvalid, "page_updates[0].pages[0]",
     [](StepCommand& s) { s.page_updates[0].pages[0] = 64; }},
    {"UpdateAtNegativeIndex", kInvalid, "page_updates[0].first_index",
     [](StepCommand& s) { s.page_updates[0].first_index = -1; }},
    {"UpdateThatLeavesAHole", kInvalid, "page_updates[0].first_index",
     [](StepCommand& s) { s.page_updates[0].first_index = 3; }},
    {"DraftWithoutItsBlock", kInvalid, "entries[0].new_tokens",
     [](StepCommand& s) {
       s.kind = StepKind::kDflash;
       s.entries[0].new_tokens = 0;
     }},
    {"ReplayedDraft", kInvalid, "entries[0].replay",
     [](StepCommand& s) {
       s.kind = StepKind::kDflash;
       s.entries[0].replay = true;
     }},
    {"DraftBeyondThePages", absl::StatusCode::kOutOfRange, "entries[0].first_position",
     [](StepCommand& s) {
       s.kind = StepKind::kDflash;
       s.entries[0].first_position = 100'000;
     }},
};

INSTANTIATE_TEST_SUITE_P(Steps, Refusals, ::testing::ValuesIn(kRefusals),
                         [](const auto& bad) { return std::string(bad.param.name); });

TEST_F(ExecutorTest, BadTablesAreRefusedWhole) {
  const CacheSpec spec = SmallSpec();
  CreateWithSequence(spec);
  const absl::Status status = Execute(SetTablesCommand{{{1, 0, {5}}, {2, 0, {64}}}});
  EXPECT_EQ(status.code(), kInvalid);
  EXPECT_EQ(FieldOf(status), "tables[1].pages[0]");
  // Sequence 1 still has its two pages.
  EXPECT_TRUE(Execute(Decode(spec, {{1, 32, 1, 1}})).ok());
}

// ---- epochs and groups ------------------------------------------------------------------------

TEST_F(ExecutorTest, ACommandOfAnotherEpochIsRefused) {
  for (const uint64_t epoch : {ranks_.epoch() - 1, ranks_.epoch() + 1}) {
    Command command = Make(CreateCacheCommand{SmallSpec()});
    command.epoch = epoch;
    EXPECT_EQ(Execute(command).code(), absl::StatusCode::kAborted);
    EXPECT_EQ(ranks_.executor(0).memory_used(), 0u);
  }
}

TEST(ExecutorGroup, AnExecutorWithoutAGroupRefuses) {
  Executor executor({}, std::make_shared<cpu::ThreadPool>(1));
  EXPECT_EQ(executor.communicator(), nullptr);
  Command command;
  command.body = CreateCacheCommand{SmallSpec()};
  EXPECT_EQ(executor.Execute(command).status.code(), absl::StatusCode::kAborted);
}

TEST_F(ExecutorTest, AnAbortedGroupGoesOnAfterReforming) {
  const CacheSpec spec = SmallSpec();
  CreateWithSequence(spec);
  ASSERT_TRUE(Execute(Decode(spec, {{1, 0, 3, 3}})).ok());
  ranks_.executor(1).communicator()->Abort("test");
  for (const auto& [rank, reply] : ranks_.Execute(Make(Decode(spec, {{1, 3, 1, 1}})))) {
    EXPECT_EQ(reply.status.code(), absl::StatusCode::kAborted) << reply.status;
    EXPECT_TRUE(reply.o.empty());
  }
  ranks_.Reform();
  // Unknown outcome: the step may have written. Repeating it settles that.
  ASSERT_TRUE(Execute(Decode(spec, {{1, 3, 1, 1}})).ok());
  ASSERT_TRUE(Execute(Decode(spec, {{1, 0, 4, 4, /*replay=*/true}})).ok());
  for (const auto& [rank, reply] : replies_) EXPECT_TRUE(reply.conflicts.empty());
}

// Ranks on CPUs, of which one may have no memory for steps.
class ShortOfMemory final : public Shard {
 public:
  ShortOfMemory(std::unique_ptr<Shard> shard, const bool* refuses)
      : shard_(std::move(shard)), refuses_(refuses) {}
  size_t bytes() const override { return shard_->bytes(); }
  absl::StatusOr<bool> TakeMemory(std::chrono::steady_clock::time_point until) override {
    return shard_->TakeMemory(until);
  }
  absl::Status CopyPages(const std::vector<PageCopy>& copies) override {
    return shard_->CopyPages(copies);
  }
  absl::Status Reserve(const PlannedStep& step) override {
    if (*refuses_) throw std::bad_alloc();
    return shard_->Reserve(step);
  }
  absl::Status Run(const PlannedStep& step, StepResults* results) override {
    return shard_->Run(step, results);
  }

 private:
  const std::unique_ptr<Shard> shard_;
  const bool* const refuses_;
};

class ShortOfMemoryBackend final : public Backend {
 public:
  explicit ShortOfMemoryBackend(const bool* refuses)
      : cpu_(CreateCpuBackend(std::make_shared<cpu::ThreadPool>(1), collective::Strategy::kAuto)),
        refuses_(refuses) {}
  const BackendCapabilities& capabilities() const override { return cpu_->capabilities(); }
  size_t AvailableMemory() const override { return cpu_->AvailableMemory(); }
  absl::StatusOr<std::unique_ptr<Shard>> CreateShard(const CacheSpec& spec, size_t available,
                                                     PageFill fill) override {
    auto shard = cpu_->CreateShard(spec, available, fill);
    if (!shard.ok()) return shard.status();
    return std::make_unique<ShortOfMemory>(*std::move(shard), refuses_);
  }

 private:
  const std::unique_ptr<Backend> cpu_;
  const bool* const refuses_;
};

TEST(ExecutorMemory, AStepThatARankHasNoMemoryForIsRefusedByAllAndTheGroupStays) {
  bool refuses = false;
  const bool never = false;
  std::vector<std::unique_ptr<Backend>> backends;
  backends.push_back(std::make_unique<ShortOfMemoryBackend>(&never));
  backends.push_back(std::make_unique<ShortOfMemoryBackend>(&refuses));
  ThreadRanks ranks(std::move(backends), {});
  CacheSpec spec = SmallSpec();
  spec.num_pages = 512;
  uint64_t number = 0;
  const auto execute = [&](decltype(Command::body) body) {
    const auto replies = ranks.Execute(CommandOf(ranks.epoch(), ++number, kCache, std::move(body)));
    EXPECT_EQ(replies.at(0).status, replies.at(1).status);
    return replies.at(0).status;
  };
  ASSERT_TRUE(execute(CreateCacheCommand{spec}).ok());
  std::vector<int32_t> pages(512);
  for (int32_t i = 0; i < 512; ++i) pages[static_cast<size_t>(i)] = i;
  ASSERT_TRUE(execute(SetTablesCommand{{{1, 0, pages}}}).ok());
  // Rows enough that ranks ask each other, over tokens that are there.
  const auto rows =
      static_cast<int32_t>((int64_t{8} << 20) / 4 / (int64_t{spec.q_heads} * 2 * spec.head_dim)) +
      1;
  const std::vector<uint16_t> ones(static_cast<size_t>(rows) * static_cast<size_t>(spec.q_heads) *
                                       static_cast<size_t>(spec.head_dim),
                                   0x3f80);
  StepCommand step;
  step.entries = {{1, 0, rows, 0}};
  step.q = {reinterpret_cast<const std::byte*>(ones.data()), DType::kBf16, ones.size() * 2};
  ASSERT_TRUE(execute(step).ok());
  refuses = true;
  EXPECT_EQ(execute(step).code(), absl::StatusCode::kResourceExhausted);
  refuses = false;
  EXPECT_TRUE(execute(step).ok()) << "the communicator is whole";
}

TEST_F(ExecutorTest, ARankThatStaysAwayMeetsTheDeadline) {
  const CacheSpec spec = SmallSpec();
  CreateWithSequence(spec);
  Command command = Make(Decode(spec, {{1, 0, 1, 1}}));
  command.deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
  const Reply reply = ranks_.executor(0).Execute(command);
  EXPECT_EQ(reply.status.code(), absl::StatusCode::kDeadlineExceeded) << reply.status;
  ranks_.Reform();
  EXPECT_TRUE(Execute(Decode(spec, {{1, 0, 1, 1}})).ok());
}

TEST_F(ExecutorTest, AnotherPlaceInTheGroupMeansAnotherShare) {
  CreateWithSequence(SmallSpec());
  Executor& executor = ranks_.executor(0);
  executor.Join(std::move(collective::CreateInProcessGroup(3, 9)[0]));
  EXPECT_EQ(executor.memory_used(), 0u);
  Command command = Make(SetTablesCommand{});
  command.epoch = 9;
  EXPECT_EQ(executor.Execute(command).status.code(), absl::StatusCode::kNotFound);
}

// ---- backends with another way to exchange -----------------------------------------------------

// What a backend was asked between groups.
struct Membership {
  std::vector<std::string> events;
  absl::Status answer;  // to Join
};

class JoiningBackend : public Backend {
 public:
  explicit JoiningBackend(Membership* membership)
      : below_(CreateCpuBackend(std::make_shared<cpu::ThreadPool>(1), collective::Strategy::kAuto)),
        membership_(*membership) {}

  const BackendCapabilities& capabilities() const override { return below_->capabilities(); }
  size_t AvailableMemory() const override { return below_->AvailableMemory(); }
  absl::StatusOr<std::unique_ptr<Shard>> CreateShard(const CacheSpec& spec, size_t available,
                                                     PageFill fill) override {
    return below_->CreateShard(spec, available, fill);
  }
  absl::StatusOr<std::unique_ptr<collective::Communicator>> Join(
      std::unique_ptr<collective::Communicator> comm, collective::Rendezvous& rendezvous,
      collective::Deadline deadline) override {
    membership_.events.push_back("join");
    if (!membership_.answer.ok()) return membership_.answer;
    return Backend::Join(std::move(comm), rendezvous, deadline);
  }
  void Leave() override { membership_.events.push_back("leave"); }
  bool MemoryHoldsUpPeers() const override { return true; }

 private:
  const std::unique_ptr<Backend> below_;
  Membership& membership_;
};

TEST(ExecutorJoin, TheBackendLeavesOneGroupBeforeItJoinsTheNext) {
  Membership membership;
  Executor executor({}, std::make_unique<JoiningBackend>(&membership));
  collective::MemoryRendezvous rendezvous;
  const auto join = [&](uint64_t epoch) {
    return executor.Join(std::move(collective::CreateInProcessGroup(1, epoch)[0]), rendezvous,
                         std::chrono::steady_clock::now() + std::chrono::seconds(10));
  };
  ASSERT_TRUE(join(1).ok());
  ASSERT_TRUE(join(2).ok());
  EXPECT_THAT(membership.events, ::testing::ElementsAre("leave", "join", "leave", "join"));
  EXPECT_EQ(executor.communicator()->epoch(), 2u);

  // What the rank holds outlives a group that does not come about.
  Command command;
  command.epoch = 2;
  command.deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  command.body = CreateCacheCommand{SmallSpec()};
  ASSERT_TRUE(executor.Execute(command).status.ok());
  membership.answer = absl::FailedPreconditionError("not these GPUs");
  EXPECT_EQ(join(3), membership.answer);
  EXPECT_GT(executor.memory_used(), 0u);
  command.epoch = 3;
  EXPECT_EQ(executor.Execute(command).status.code(), absl::StatusCode::kAborted);
  membership.answer = absl::OkStatus();
  ASSERT_TRUE(join(4).ok());
  command.epoch = 4;
  EXPECT_TRUE(executor.Execute(command).status.ok());
}

// Ranks wait for each other when one takes or frees memory, whatever came of it on each.
TEST(ExecutorJoin, RanksMeetAfterAShardCameOrWent) {
  Membership membership[2];
  std::vector<std::unique_ptr<Backend>> backends;
  for (Membership& m : membership) backends.push_back(std::make_unique<JoiningBackend>(&m));
  ThreadRanks ranks(std::move(backends), {});
  Command command;
  command.epoch = ranks.epoch();
  command.body = CreateCacheCommand{SmallSpec()};
  command.deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  for (const auto& [rank, reply] : ranks.Execute(command)) {
    EXPECT_TRUE(reply.status.ok()) << reply.status;
  }
  // Refused by all, and they met all the same: nobody is left waiting.
  CacheSpec bad = SmallSpec();
  bad.head_dim = 112;
  command.body = CreateCacheCommand{bad};
  for (const auto& [rank, reply] : ranks.Execute(command)) {
    EXPECT_EQ(reply.status.code(), absl::StatusCode::kInvalidArgument) << reply.status;
  }
  command.body = DropCacheCommand{};
  command.deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
  const Reply alone = ranks.executor(0).Execute(command);
  EXPECT_EQ(alone.status.code(), absl::StatusCode::kDeadlineExceeded) << alone.status;
}

// A communicator whose collectives throw, as an allocation deep in a library may.
class ThrowingCommunicator : public collective::Communicator {
 public:
  explicit ThrowingCommunicator(std::string* aborted) : aborted_(*aborted) {}
  int rank() const override { return 0; }
  int size() const override { return 2; }
  uint64_t epoch() const override { return 1; }
  Status AllGather(const void*, void*, size_t, collective::Deadline) override { return Throw(); }
  Status AllToAll(const void*, void*, size_t, collective::Deadline) override { return Throw(); }
  Status ReduceScatter(const float*, float*, size_t, collective::Deadline) override {
    return Throw();
  }
  Status Gather(const void*, void*, size_t, int, collective::Deadline) override { return Throw(); }
  Status Pass(const void*, void*, size_t, int, int, collective::Deadline) override {
    return Throw();
  }
  Status Barrier(collective::Deadline) override { return Throw(); }
  void Abort(const std::string& reason) override { aborted_ = reason; }

 private:
  static Status Throw() { throw std::bad_alloc(); }
  std::string& aborted_;
};

TEST(ExecutorGroup, ARankThatFailsAloneAbortsTheGroup) {
  std::string aborted;
  const CacheSpec spec = SmallSpec();
  Executor executor({}, std::make_shared<cpu::ThreadPool>(1));
  executor.Join(std::make_unique<ThrowingCommunicator>(&aborted));
  Command command;
  command.epoch = 1;
  command.body = CreateCacheCommand{spec};
  ASSERT_TRUE(executor.Execute(command).status.ok());
  StepCommand step;
  step.page_updates = {{1, 0, {0}}};
  step.entries = {{1, 0, 1, 1}};
  const std::vector<float> ones(256, 1.0f);
  const auto view = [&](int32_t heads) {
    return TensorView{reinterpret_cast<const std::byte*>(ones.data()), DType::kF32,
                      static_cast<size_t>(heads * spec.head_dim) * sizeof(float)};
  };
  step.q = view(spec.q_heads);
  step.k = step.v = view(spec.kv_heads);

  step.layer = 5;  // refused by every rank alike: no reason to abort
  command.body = step;
  EXPECT_EQ(executor.Execute(command).status.code(), kInvalid);
  EXPECT_EQ(aborted, "");

  step.layer = 0;
  command.body = step;
  const Reply reply = executor.Execute(command);
  EXPECT_EQ(reply.status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(reply.o.empty());
  EXPECT_THAT(aborted, HasSubstr("rank 0"));
}

// A device that loses all it held with its second step.
class FailingBackend : public Backend {
 public:
  const BackendCapabilities& capabilities() const override { return CpuBackend(); }
  size_t AvailableMemory() const override { return 1 << 30; }
  absl::StatusOr<std::unique_ptr<Shard>> CreateShard(const CacheSpec&, size_t, PageFill) override {
    return std::make_unique<FailingShard>();
  }

 private:
  class FailingShard : public Shard {
   public:
    size_t bytes() const override { return 1; }
    absl::Status CopyPages(const std::vector<PageCopy>&) override { return absl::OkStatus(); }
    absl::Status Run(const PlannedStep&, StepResults*) override {
      return ++steps_ == 2 ? absl::DataLossError("the device is gone") : absl::OkStatus();
    }

   private:
    int steps_ = 0;
  };
};

TEST(ExecutorDevice, AfterTheDeviceFailedEveryCommandSaysSo) {
  std::vector<std::unique_ptr<Backend>> backends;
  for (int rank = 0; rank < 2; ++rank) backends.push_back(std::make_unique<FailingBackend>());
  ThreadRanks ranks(std::move(backends), {});
  const CacheSpec spec = SmallSpec();
  const std::vector<float> ones(256, 1.0f);
  const auto view = [&](int32_t heads) {
    return TensorView{reinterpret_cast<const std::byte*>(ones.data()), DType::kF32,
                      static_cast<size_t>(heads * spec.head_dim) * sizeof(float)};
  };
  const auto execute = [&](decltype(Command::body) body) {
    Command command;
    command.epoch = ranks.epoch();
    command.deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    command.body = std::move(body);
    return ranks.Execute(command).at(1).status;
  };
  StepCommand step;
  step.page_updates = {{1, 0, {0}}};
  step.entries = {{1, 0, 1, 1}};
  step.q = view(spec.q_heads);
  step.k = step.v = view(spec.kv_heads);
  ASSERT_TRUE(execute(CreateCacheCommand{spec}).ok());
  EXPECT_TRUE(execute(step).ok());
  EXPECT_EQ(execute(step).code(), absl::StatusCode::kDataLoss);
  // Another epoch does not bring it back, nor does a step that would have run.
  ranks.Reform();
  EXPECT_EQ(execute(step).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(execute(CreateCacheCommand{spec}).code(), absl::StatusCode::kDataLoss);
}

// ---- plans and times --------------------------------------------------------------------------

TEST_F(ExecutorTest, LayersShareThePlanOfAStep) {
  CacheSpec spec = SmallSpec();
  spec.layers.resize(6);
  spec.layers[2].window.left = 4;
  spec.layers[5].window.left = 4;
  CreateWithSequence(spec);
  for (int32_t layer = 0; layer < 6; ++layer) {
    StepCommand step = Decode(spec, {{1, 0, 1, 1}});
    step.layer = layer;
    if (layer == 0) step.page_updates = {{1, 2, {8}}};
    ASSERT_TRUE(Execute(step).ok());
  }
  EXPECT_EQ(ranks_.executor(1).plan_counts().made, 2);  // one a window
  EXPECT_EQ(ranks_.executor(1).plan_counts().reused, 4);

  // The next step is another, and so is the same step over another table.
  ASSERT_TRUE(Execute(Decode(spec, {{1, 1, 1, 1}})).ok());
  EXPECT_EQ(ranks_.executor(1).plan_counts().made, 3);
  StepCommand moved = Decode(spec, {{1, 1, 1, 1}});
  moved.page_updates = {{1, 1, {30}}};
  ASSERT_TRUE(Execute(moved).ok());
  EXPECT_EQ(ranks_.executor(1).plan_counts().made, 4);
  // Told again what is there already: the plan stays.
  ASSERT_TRUE(Execute(moved).ok());
  EXPECT_EQ(ranks_.executor(1).plan_counts().made, 4);
}

TEST_F(ExecutorTest, TimesOfAStepAreReported) {
  const CacheSpec spec = SmallSpec();
  CreateWithSequence(spec);
  ASSERT_TRUE(Execute(Decode(spec, {{1, 0, 3, 3}})).ok());
  for (const auto& [rank, reply] : replies_) {
    EXPECT_GT(reply.times.plan, 0);
    EXPECT_GT(reply.times.append, 0);
    EXPECT_GT(reply.times.attend, 0);
    EXPECT_GT(reply.times.exchange, 0);
  }
}

}  // namespace
}  // namespace tributary::worker::testing
