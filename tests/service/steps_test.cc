// How calls become steps: batching, order, cancellation and deadlines, with workers that obey the
// test. The coordinator is called in process, so that every interleaving is chosen here.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "base/status/errors.h"
#include "base/status/rpc_errors.h"
#include "service/coordinator/coordinator.h"
#include "tests/service/fake_group.h"
#include "tests/service/test_service.h"
#include "tests/support/process.h"

namespace tributary::service::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::SizeIs;

// Answers of calls, by name.
class Answers {
 public:
  template <typename Reply>
  Coordinator::Done<Reply> For(const std::string& name) {
    return [this, name](absl::StatusOr<Reply> reply) {
      std::lock_guard lock(mutex_);
      EXPECT_FALSE(answers_.contains(name)) << name << " was answered twice";
      answers_[name] = reply.status();
      order_.push_back(name);
      changed_.notify_all();
    };
  }
  absl::Status Wait(const std::string& name) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return answers_.contains(name); });
    return answers_[name];
  }
  bool Has(const std::string& name) {
    std::lock_guard lock(mutex_);
    return answers_.contains(name);
  }
  std::vector<std::string> order() {
    std::lock_guard lock(mutex_);
    return order_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, absl::Status> answers_;
  std::vector<std::string> order_;
};

class StepsTest : public ::testing::Test {
 protected:
  void SetUp() override { Begin({}); }

  void Begin(CoordinatorOptions options,
             std::unique_ptr<FakeGroup> group = std::make_unique<FakeGroup>(2)) {
    group_ = group.get();
    coordinator_ = std::make_unique<Coordinator>(
        options, std::move(group),
        std::make_shared<const telemetry::Logger>(telemetry::LogLevel::kError,
                                                  telemetry::LogFormat::kText));
    ASSERT_TRUE(coordinator_->Start().ok());
    answers_ = std::make_unique<Answers>();
    v1::CreateCacheRequest create;
    create.set_cache_id("m");
    *create.mutable_spec() = spec_;
    coordinator_->CreateCache(create, {}, answers_->For<v1::CreateCacheReply>("create"));
    ASSERT_TRUE(answers_->Wait("create").ok());
    for (uint64_t id = 1; id <= 8; ++id) {
      v1::OpenSequenceRequest open;
      open.set_cache_id("m");
      open.set_sequence_id(id);
      const std::string name = "open" + std::to_string(id);
      coordinator_->OpenSequence(open, {}, answers_->For<v1::OpenSequenceReply>(name));
      ASSERT_TRUE(answers_->Wait(name).ok());
    }
  }
  void TearDown() override {
    group_->Release();
    coordinator_->Stop();
  }

  void Attend(const std::string& name, const v1::AttendRequest& request,
              const CallContext& call = {}) {
    coordinator_->Attend(std::make_shared<const v1::AttendRequest>(request), call,
                         answers_->For<v1::AttendReply>(name));
  }
  v1::AttendRequest Token(uint64_t sequence, int64_t first, int32_t layer = 0) {
    return AttendOf(spec_, "m", sequence, first, 1, layer);
  }
  // The sequences of every step so far.
  std::vector<std::vector<uint64_t>> Steps() {
    std::vector<std::vector<uint64_t>> steps;
    for (const auto& command : group_->commands()) {
      if (const auto* step = std::get_if<worker::StepCommand>(&command->body)) {
        steps.emplace_back();
        for (const auto& entry : step->entries) steps.back().push_back(entry.sequence);
      }
    }
    return steps;
  }
  v1::CacheInfo Cache() {
    v1::GetTopologyRequest request;
    request.set_with_sequences(true);
    return coordinator_->GetTopology(request, {})->caches(0);
  }

  const v1::CacheSpec spec_ = SmallSpec();
  FakeGroup* group_ = nullptr;
  std::unique_ptr<Answers> answers_;
  std::unique_ptr<Coordinator> coordinator_;
};

TEST_F(StepsTest, WhoIsElsewhereNamesNoSharedMemory) {
  const CallContext elsewhere{.shares_memory = false};
  const auto answer = [&](const std::string& name) {
    const absl::Status status = answers_->Wait(name);
    EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied) << status;
    return tributary::FieldOf(status);
  };
  v1::RegisterSharedMemoryRequest registration;
  registration.set_name("r");
  registration.mutable_system()->set_key("/no-such-object");
  coordinator_->RegisterSharedMemory(registration, elsewhere,
                                     answers_->For<v1::RegisterSharedMemoryReply>("register"));
  EXPECT_EQ(answer("register"), "kind");
  coordinator_->UnregisterSharedMemory({}, elsewhere,
                                       answers_->For<v1::UnregisterSharedMemoryReply>("undo"));
  EXPECT_EQ(answer("undo"), "name");
  v1::AttendRequest request = Token(1, 0);
  request.mutable_k()->mutable_shared_memory()->set_region("r");
  Attend("attend", request, elsewhere);
  EXPECT_EQ(answer("attend"), "k.shared_memory.region");
  request = Token(1, 0);
  request.mutable_output()->set_dtype(v1::DTYPE_F32);
  for (const int64_t extent : {1, 4, 64}) request.mutable_output()->add_shape(extent);
  request.mutable_output()->mutable_shared_memory()->set_region("r");
  Attend("output", request, elsewhere);
  EXPECT_EQ(answer("output"), "output.shared_memory.region");
  Attend("inline", Token(1, 0), elsewhere);
  EXPECT_TRUE(answers_->Wait("inline").ok());
}

TEST_F(StepsTest, TheTopologyCountsAllSequencesAndListsTheFirst) {
  constexpr int kSequences = 600;  // more than are looked at in one go
  for (uint64_t id = 9; id <= kSequences; ++id) {
    v1::OpenSequenceRequest open;
    open.set_cache_id("m");
    open.set_sequence_id(id);
    coordinator_->OpenSequence(open, {},
                               answers_->For<v1::OpenSequenceReply>("open" + std::to_string(id)));
  }
  for (const uint64_t id : {1, 300, 600}) {
    for (const int32_t layer : {0, 1}) {
      Attend("a" + std::to_string(id) + "." + std::to_string(layer), Token(id, 0, layer));
    }
  }
  v1::GetTopologyRequest request;
  request.set_with_sequences(true);
  request.set_max_sequences(300);
  const v1::GetTopologyReply reply = *coordinator_->GetTopology(request, {});
  EXPECT_EQ(reply.caches(0).sequences(), kSequences);
  ASSERT_EQ(reply.caches(0).sequence_size(), 300);
  for (int i = 0; i < 300; ++i) EXPECT_EQ(reply.caches(0).sequence(i).sequence_id(), i + 1u);
  int64_t tokens = 0;
  for (const v1::WorkerInfo& worker : reply.workers()) tokens += worker.tokens();
  EXPECT_EQ(tokens, 3) << "those beyond the listed ones, too";
}

TEST_F(StepsTest, CallsThatWaitForASlotShareTheNextStep) {
  group_->Hold();
  for (uint64_t id = 1; id <= 6; ++id) Attend("a" + std::to_string(id), Token(id, 0));
  Attend("other layer", Token(7, 0, 1));
  EXPECT_THAT(Steps(), ElementsAre(ElementsAre(1), ElementsAre(2))) << "two in flight, no more";
  group_->ReleaseOne();
  EXPECT_THAT(Steps(), SizeIs(3));
  EXPECT_THAT(Steps()[2], ElementsAre(3, 4, 5, 6));
  group_->Release();
  for (uint64_t id = 1; id <= 6; ++id) EXPECT_TRUE(answers_->Wait("a" + std::to_string(id)).ok());
  EXPECT_TRUE(answers_->Wait("other layer").ok());
  EXPECT_THAT(Steps(), SizeIs(4));
  const auto statistics = coordinator_->GetTopology({}, {})->statistics();
  EXPECT_EQ(statistics.requests(), 7u);
  EXPECT_EQ(statistics.steps(), 4u);
}

TEST_F(StepsTest, GatheredTensorsAreTheRequestsOneAfterTheOther) {
  group_->Hold();
  Attend("x", Token(1, 0));
  Attend("y", Token(2, 0));
  const v1::AttendRequest a = AttendOf(spec_, "m", 3, 0, 2, 0, 30);
  const v1::AttendRequest b = AttendOf(spec_, "m", 4, 0, 3, 0, 40);
  Attend("a", a);
  Attend("b", b);
  group_->ReleaseOne();
  // The coordinator's own thread may be the one that sends it.
  ASSERT_TRUE(test::Eventually(std::chrono::seconds(20), [this] { return Steps().size() == 3; }));
  const auto command = group_->commands().back();
  const auto& step = std::get<worker::StepCommand>(command->body);
  const auto bytes = [](const worker::TensorView& view) {
    return std::string(reinterpret_cast<const char*>(view.data), view.bytes);
  };
  EXPECT_EQ(bytes(step.q), a.q().inline_() + b.q().inline_());
  EXPECT_EQ(bytes(step.k), a.k().inline_() + b.k().inline_());
  EXPECT_EQ(bytes(step.v), a.v().inline_() + b.v().inline_());
}

TEST_F(StepsTest, OneSequenceNeverHasTwoCallsInFlightAndKeepsItsOrder) {
  group_->Hold();
  for (int i = 0; i < 4; ++i) Attend("t" + std::to_string(i), Token(1, i));
  v1::TruncateSequenceRequest truncate;
  truncate.set_cache_id("m");
  truncate.set_sequence_id(1);
  truncate.set_length(2);
  coordinator_->TruncateSequence(truncate, {}, answers_->For<v1::TruncateSequenceReply>("cut"));
  Attend("after", Token(1, 2));
  for (int i = 0; i < 4; ++i) {
    EXPECT_THAT(Steps(), SizeIs(i + 1));
    EXPECT_FALSE(answers_->Has("cut"));
    group_->ReleaseOne();
  }
  EXPECT_TRUE(answers_->Has("cut"));
  group_->Release();
  EXPECT_TRUE(answers_->Wait("after").ok());
  const auto order = answers_->order();
  EXPECT_THAT(std::vector<std::string>(order.end() - 6, order.end()),
              ElementsAre("t0", "t1", "t2", "t3", "cut", "after"));
  EXPECT_EQ(Cache().sequence(0).length(), 0) << "layer 1 is empty";
}

TEST_F(StepsTest, ACallOfSeveralSequencesWaitsForAllOfThem) {
  group_->Hold();
  Attend("one", Token(1, 0));
  v1::AttendRequest both = AttendOf(spec_, "m", 1, 1, 1);
  v1::AttendEntry* second = both.add_entries();
  second->set_sequence_id(2);
  second->set_query_rows(1);
  second->set_new_tokens(1);
  *both.mutable_q() = InlineTensor(DType::kF32, {2, 4, 64}, RandomValues(512, 1));
  *both.mutable_k() = InlineTensor(DType::kF32, {2, 2, 64}, RandomValues(256, 1));
  *both.mutable_v() = both.k();
  Attend("both", both);
  Attend("two", Token(2, 1));
  EXPECT_THAT(Steps(), ElementsAre(ElementsAre(1)));
  group_->ReleaseOne();
  EXPECT_THAT(Steps(), ElementsAre(ElementsAre(1), ElementsAre(1, 2)));
  group_->Release();
  EXPECT_TRUE(answers_->Wait("two").ok());
}

TEST_F(StepsTest, AConflictFailsItsCallOnly) {
  Attend("held", Token(3, 0));
  ASSERT_TRUE(answers_->Wait("held").ok());
  group_->Hold();
  Attend("x", Token(1, 0));
  Attend("y", Token(2, 0));
  Attend("replay", Token(3, 0));
  Attend("fresh", Token(4, 0));
  group_->ReleaseOne();
  group_->ReleaseOne();
  group_->ReleaseOne([](const worker::StepCommand& step, Outcome* outcome) {
    ASSERT_EQ(step.entries.size(), 2u);
    EXPECT_TRUE(step.entries[0].replay);
    EXPECT_FALSE(step.entries[1].replay);
    outcome->replies[1].conflicts = {0};
  });
  const absl::Status conflict = answers_->Wait("replay");
  EXPECT_EQ(conflict.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(tributary::FieldOf(conflict), "entries[0].first_position");
  EXPECT_TRUE(answers_->Wait("fresh").ok());
}

// Of another size than the step's: shorter ones would be read beyond their end, longer ones would
// bring rows of nobody.
TEST_F(StepsTest, AResultOfAnotherSizeFailsItsStepAndIsNotRead) {
  const auto size = [](size_t bytes) {
    return [bytes](const worker::StepCommand&, Outcome* outcome) {
      outcome->replies[0].result = worker::ResultBytes(std::string(bytes, '\0'));
    };
  };
  const size_t lse = spec_.q_heads() * sizeof(float), o = lse * spec_.head_dim();
  group_->Hold();
  int number = 0;
  for (const size_t wrong :
       {o + lse - 1, o + lse + 1, o + lse - sizeof(float), (o + lse) * 1000, size_t{0}, lse, o}) {
    const std::string name = "wrong" + std::to_string(number++);
    v1::AttendRequest request = Token(1, 0);
    request.set_return_lse(true);
    Attend(name, request);
    group_->ReleaseOne(size(wrong));
    const absl::Status status = answers_->Wait(name);
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << wrong;
    EXPECT_THAT(std::string(status.message()),
                ::testing::HasSubstr("rank 0 answered a step of 1 rows"));
  }
  group_->Release();
  Attend("right", Token(1, 0));
  EXPECT_TRUE(answers_->Wait("right").ok()) << "no token of a failed step is held";
}

TEST_F(StepsTest, ACallThatFailsPlanningDoesNotSpoilItsBatch) {
  group_->Hold();
  Attend("x", Token(1, 0));
  Attend("y", Token(2, 0));
  Attend("gap", Token(3, 5));
  Attend("good", Token(4, 0));
  group_->Release();
  EXPECT_EQ(answers_->Wait("gap").code(), absl::StatusCode::kOutOfRange);
  EXPECT_TRUE(answers_->Wait("good").ok());
}

TEST_F(StepsTest, OfTheCallsOfAStepOnlyTheOneBeyondItsClientsLimitFails) {
  CoordinatorOptions options;
  options.pipeline_depth = 1;
  options.client_limits.pages = 1;
  Begin(options);
  v1::OpenSequenceRequest open;
  open.set_cache_id("m");
  open.set_sequence_id(4);
  coordinator_->OpenSequence(open, {.caller = "other"},
                             answers_->For<v1::OpenSequenceReply>("reopen"));
  ASSERT_TRUE(answers_->Wait("reopen").ok());
  group_->Hold();
  Attend("x", Token(1, 0));  // takes its client's page before it is done
  Attend("beyond", Token(3, 0));
  Attend("good", Token(4, 0));
  group_->Release();
  EXPECT_EQ(answers_->Wait("beyond").code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(answers_->Wait("good").ok());
  EXPECT_TRUE(answers_->Wait("x").ok());
  EXPECT_THAT(Steps(), ElementsAre(ElementsAre(1), ElementsAre(4)));
}

TEST_F(StepsTest, CancelledBeforeItsStepACallChangesNothing) {
  group_->Hold();
  Attend("x", Token(1, 0));
  Attend("y", Token(2, 0));
  auto cancelled = std::make_shared<std::atomic<bool>>(false);
  Attend("gone", Token(3, 0), {.cancelled = cancelled});
  Attend("next", Token(3, 0));
  *cancelled = true;
  group_->ReleaseOne();
  EXPECT_EQ(answers_->Wait("gone").code(), absl::StatusCode::kCancelled);
  group_->Release();
  EXPECT_TRUE(answers_->Wait("next").ok());
  for (const auto& command : group_->commands()) {
    if (const auto* step = std::get_if<worker::StepCommand>(&command->body)) {
      for (const auto& entry : step->entries) EXPECT_FALSE(entry.replay);
    }
  }
}

TEST_F(StepsTest, CancelledAfterItsStepBeganACallTakesEffectAndItsResultIsDropped) {
  group_->Hold();
  auto cancelled = std::make_shared<std::atomic<bool>>(false);
  Attend("gone", Token(1, 0), {.cancelled = cancelled});
  *cancelled = true;
  group_->Release();
  EXPECT_EQ(answers_->Wait("gone").code(), absl::StatusCode::kCancelled);
  Attend("next", Token(1, 1));
  EXPECT_TRUE(answers_->Wait("next").ok()) << "token 0 is held";
}

// However many: one after the other, not nested.
TEST_F(StepsTest, AsManyCancelledCallsAsWaitForASequenceEndWhenItsStepDoes) {
  constexpr int kCalls = 50'000;
  group_->Hold();
  Attend("first", Token(1, 0));
  v1::TruncateSequenceRequest truncate;
  truncate.set_cache_id("m");
  truncate.set_sequence_id(1);
  auto cancelled = std::make_shared<std::atomic<bool>>(false);
  for (int i = 0; i < kCalls; ++i) {
    coordinator_->TruncateSequence(
        truncate, {.cancelled = cancelled},
        answers_->For<v1::TruncateSequenceReply>("t" + std::to_string(i)));
  }
  Attend("last", Token(1, 1));
  *cancelled = true;
  group_->Release();
  EXPECT_TRUE(answers_->Wait("last").ok());
  for (int i = 0; i < kCalls; ++i) {
    ASSERT_EQ(answers_->Wait("t" + std::to_string(i)).code(), absl::StatusCode::kCancelled);
  }
}

// They are answered a few at a time.
TEST_F(StepsTest, ManyCancelledCallsAreAllAnsweredAndOthersGoOn) {
  constexpr int kCalls = 200;
  group_->Hold();
  Attend("x", Token(1, 0));
  Attend("y", Token(2, 0));
  auto cancelled = std::make_shared<std::atomic<bool>>(false);
  for (int i = 0; i < kCalls; ++i) {
    Attend("c" + std::to_string(i), Token(3, 0), {.cancelled = cancelled});
  }
  Attend("other", Token(2, 1));
  *cancelled = true;
  group_->Release();
  EXPECT_TRUE(answers_->Wait("other").ok());
  for (int i = 0; i < kCalls; ++i) {
    ASSERT_EQ(answers_->Wait("c" + std::to_string(i)).code(), absl::StatusCode::kCancelled);
  }
  Attend("after", Token(3, 0));
  EXPECT_TRUE(answers_->Wait("after").ok());
}

TEST_F(StepsTest, WorkersAreToldAgainOnlyOfCachesTheyMayStillHold) {
  const auto drops = [&] {
    int count = 0;
    for (const auto& command : group_->commands()) {
      count += std::holds_alternative<worker::DropCacheCommand>(command->body) ? 1 : 0;
    }
    return count;
  };
  group_->AnswerCreateCache(absl::ResourceExhaustedError("full"));
  v1::CreateCacheRequest create;
  *create.mutable_spec() = spec_;
  for (int i = 0; i < 5; ++i) {
    const std::string name = "refused" + std::to_string(i);
    create.set_cache_id(name);
    coordinator_->CreateCache(create, {}, answers_->For<v1::CreateCacheReply>(name));
    const absl::Status refused = answers_->Wait(name);
    EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
    google::rpc::QuotaFailure quota;
    ASSERT_TRUE(DetailOf(ToRpcStatus(refused), &quota));
    EXPECT_EQ(quota.violations(0).subject(), kWorkerMemory);
    EXPECT_EQ(quota.violations(0).description(), "full");
  }
  group_->AnswerCreateCache(absl::OkStatus());
  const int once = drops();
  EXPECT_GE(once, 5) << "some ranks may have had them";
  group_->Break("a worker died");
  group_->Form({true, false});
  EXPECT_EQ(drops(), once);
}

// SmallSpec: 4/2 heads of 64 and 64.
constexpr int64_t kRowBytes = 4 * 128 * (4 + 2);

// One call may not take all memory, nor a step so long that the group breaks.
TEST_F(StepsTest, ACallBeyondWhatAStepMayTakeHasSeveralSteps) {
  TearDown();
  Begin({.max_step_bytes = 10 * kRowBytes});
  Attend("most", AttendOf(spec_, "m", 1, 0, 10));
  EXPECT_TRUE(answers_->Wait("most").ok());
  EXPECT_THAT(Steps(), SizeIs(1));
  Attend("more", AttendOf(spec_, "m", 2, 0, 35));
  EXPECT_TRUE(answers_->Wait("more").ok());
  EXPECT_THAT(Steps(), SizeIs(5));
  std::vector<std::vector<int64_t>> cuts;
  for (const auto& command : group_->commands()) {
    const auto* step = std::get_if<worker::StepCommand>(&command->body);
    if (step == nullptr || step->entries[0].sequence != 2) continue;
    const worker::StepEntry& entry = step->entries[0];
    cuts.push_back({entry.first_position, entry.query_rows, entry.new_tokens, entry.more_follows});
    EXPECT_EQ(step->q.bytes, static_cast<size_t>(entry.query_rows) * 4 * 64 * sizeof(float));
    EXPECT_EQ(step->page_updates.empty(), cuts.size() > 1) << "pages are told once";
  }
  EXPECT_THAT(cuts, ElementsAre(ElementsAre(0, 10, 10, 1), ElementsAre(10, 10, 10, 1),
                                ElementsAre(20, 10, 10, 1), ElementsAre(30, 5, 5, 0)));
  EXPECT_EQ(Cache().pages_used(), 3);
  // It may be repeated, as every call.
  Attend("again", AttendOf(spec_, "m", 2, 0, 35));
  EXPECT_TRUE(answers_->Wait("again").ok());
  EXPECT_EQ(Cache().pages_used(), 3);
}

TEST_F(StepsTest, AStepOfALongCallThatFailsLeavesNothingOfIt) {
  TearDown();
  Begin({.max_step_bytes = 10 * kRowBytes});
  group_->Hold();
  Attend("long", AttendOf(spec_, "m", 1, 0, 35));
  group_->WaitForHeld(1);
  group_->ReleaseOne();
  group_->WaitForHeld(1);
  group_->ReleaseOne([](const worker::StepCommand&, Outcome* outcome) {
    outcome->status = absl::ResourceExhaustedError("a rank could not");
  });
  EXPECT_FALSE(answers_->Wait("long").ok());
  group_->Release();
  EXPECT_EQ(Cache().pages_used(), 0);
  Attend("again", AttendOf(spec_, "m", 1, 0, 35));
  EXPECT_TRUE(answers_->Wait("again").ok());
  EXPECT_EQ(Cache().pages_used(), 2);
}

TEST_F(StepsTest, OthersTakeTheirTurnsBetweenTheStepsOfALongCall) {
  TearDown();
  Begin({.pipeline_depth = 1, .max_step_bytes = 10 * kRowBytes});
  group_->Hold();
  Attend("long", AttendOf(spec_, "m", 1, 0, 25));
  group_->WaitForHeld(1);
  Attend("short", Token(2, 0));
  Attend("behind", Token(1, 25));
  group_->Release();
  for (const char* name : {"long", "short", "behind"}) {
    EXPECT_TRUE(answers_->Wait(name).ok()) << name;
  }
  EXPECT_THAT(Steps(), ElementsAre(ElementsAre(1), ElementsAre(2), ElementsAre(1), ElementsAre(1),
                                   ElementsAre(1)));
}

// Others stand behind a turn of a long call as if it were not there: they begin when it ends, and
// are not given to the workers only then.
TEST_F(StepsTest, ATurnOfALongCallTakesNoRoomFromOthers) {
  TearDown();
  Begin({.pipeline_depth = 1, .turn_memory = std::chrono::hours(1)});
  Attend("short", Token(2, 0));
  ASSERT_TRUE(answers_->Wait("short").ok());
  coordinator_->Append(std::make_shared<const v1::AppendRequest>(AppendOf(spec_, "m", 1, 0, 2000)),
                       {}, answers_->For<v1::AppendReply>("append"));
  ASSERT_TRUE(answers_->Wait("append").ok());
  group_->Hold();
  Attend("long", QueryOf(spec_, "m", 1, 1488, 512));
  group_->WaitForHeld(1);
  Attend("beside", Token(2, 1));
  group_->WaitForHeld(2);
  Attend("behind", Token(3, 0));
  group_->Release();
  for (const char* name : {"long", "beside", "behind"}) {
    EXPECT_TRUE(answers_->Wait(name).ok()) << name;
  }
  const auto steps = Steps();
  ASSERT_GT(steps.size(), 5u);
  EXPECT_THAT(std::vector(steps.begin() + 2, steps.begin() + 4),
              ElementsAre(ElementsAre(1), ElementsAre(2)));
}

// A caller that has many calls at a time has one short step of them at a time while somebody is
// there who has few, and whose next call does not wait for the others.
TEST_F(StepsTest, CallsOfOneWhoHasManyTakeTurnsWithThoseOfOneWhoHasFew) {
  constexpr uint64_t kFirst = 100;
  constexpr uint64_t kMany = 40;
  TearDown();
  Begin({.turn_memory = std::chrono::hours(1)});
  CallContext few, many;
  few.caller = "few";
  many.caller = "many";
  const auto name_of = [](uint64_t id) { return "many" + std::to_string(id); };
  for (uint64_t id = kFirst; id < kFirst + kMany; ++id) {
    v1::OpenSequenceRequest open;
    open.set_cache_id("m");
    open.set_sequence_id(id);
    const std::string name = "open" + std::to_string(id);
    coordinator_->OpenSequence(open, {}, answers_->For<v1::OpenSequenceReply>(name));
    ASSERT_TRUE(answers_->Wait(name).ok());
  }
  // Who is alone has one step of all that wait for one.
  const auto call_all = [&](int64_t first) {
    group_->Hold();
    for (uint64_t id = kFirst; id < kFirst + kMany; ++id) {
      Attend(name_of(id) + "@" + std::to_string(first), Token(id, first), many);
    }
    EXPECT_THAT(Steps().back(), SizeIs(1));
    group_->ReleaseOne();
  };
  call_all(0);
  EXPECT_THAT(Steps().back(), SizeIs(kMany - 2));
  group_->Release();
  for (uint64_t id = kFirst; id < kFirst + kMany; ++id) {
    ASSERT_TRUE(answers_->Wait(name_of(id) + "@0").ok());
  }

  Attend("few", Token(1, 0), few);
  ASSERT_TRUE(answers_->Wait("few").ok());
  call_all(1);
  const size_t steps = Steps().size();
  const size_t of_a_turn = Steps().back().size();
  EXPECT_GE(of_a_turn, 8u);
  EXPECT_LE(of_a_turn, 16u);
  Attend("beside", Token(1, 1), few);
  ASSERT_THAT(Steps(), SizeIs(steps + 1)) << "the turn takes no room from it";
  EXPECT_THAT(Steps().back(), ElementsAre(1));
  group_->Release();
  EXPECT_TRUE(answers_->Wait("beside").ok());
  for (uint64_t id = kFirst; id < kFirst + kMany; ++id) {
    EXPECT_TRUE(answers_->Wait(name_of(id) + "@1").ok());
  }
  for (size_t i = steps; i < Steps().size(); ++i) EXPECT_LE(Steps()[i].size(), 16u);
}

TEST_F(StepsTest, ALongCallWhoseCacheIsDeletedSaysSo) {
  TearDown();
  Begin({.pipeline_depth = 1, .max_step_bytes = 10 * kRowBytes});
  group_->Hold();
  Attend("long", AttendOf(spec_, "m", 1, 0, 35));
  group_->WaitForHeld(1);
  v1::DeleteCacheRequest request;
  request.set_cache_id("m");
  coordinator_->DeleteCache(request, {}, answers_->For<v1::DeleteCacheReply>("delete"));
  group_->Release();
  EXPECT_TRUE(answers_->Wait("delete").ok());
  const absl::Status told = answers_->Wait("long");
  EXPECT_EQ(told.code(), absl::StatusCode::kNotFound) << told;
  EXPECT_EQ(tributary::FieldOf(told), "cache_id");
}

// Between its steps a long call waits as others do: its end does not depend on the workers.
TEST_F(StepsTest, ALongCallEndsWithItsDeadlineItsCallerAndItsGroup) {
  TearDown();
  Begin({.pipeline_depth = 1, .max_step_bytes = 10 * kRowBytes});
  const auto cancelled = std::make_shared<std::atomic<bool>>(false);
  group_->Hold();
  Attend("cancelled", AttendOf(spec_, "m", 1, 0, 35), {.cancelled = cancelled});
  group_->WaitForHeld(1);
  *cancelled = true;
  group_->ReleaseOne();
  EXPECT_TRUE(absl::IsCancelled(answers_->Wait("cancelled")));
  Attend("broken", AttendOf(spec_, "m", 2, 0, 35));
  group_->WaitForHeld(1);
  Attend("other", Token(3, 0));
  group_->ReleaseOne();    // the first step of "broken"
  group_->WaitForHeld(1);  // "other", while "broken" waits
  group_->Break("a worker died");
  EXPECT_FALSE(answers_->Wait("broken").ok());
  EXPECT_FALSE(answers_->Wait("other").ok());
  group_->Release();
  group_->Form({false, false});
  EXPECT_EQ(Cache().pages_used(), 0);
  Attend("again", AttendOf(spec_, "m", 2, 0, 35));
  EXPECT_TRUE(answers_->Wait("again").ok());
}

TEST_F(StepsTest, ARowThatIsTooMuchByItselfIsRefusedAndChangesNothing) {
  TearDown();
  // 2e10 operations a second and rank: 4e7, where a row takes 1024 for each token it sees.
  Begin({.step_timeout = std::chrono::milliseconds(1)});
  v1::AppendRequest append = AppendOf(spec_, "m", 1, 0, 2000);
  coordinator_->Append(std::make_shared<const v1::AppendRequest>(append), {},
                       answers_->For<v1::AppendReply>("append"));
  ASSERT_TRUE(answers_->Wait("append").ok());
  Attend("few", QueryOf(spec_, "m", 1, 1990, 10));
  EXPECT_TRUE(answers_->Wait("few").ok());
  const size_t before = Steps().size();
  Attend("many", QueryOf(spec_, "m", 1, 1900, 100));
  EXPECT_TRUE(answers_->Wait("many").ok());
  EXPECT_GE(Steps().size(), before + 5) << "19 rows a step";
  // What is not there is said first.
  Attend("gap", QueryOf(spec_, "m", 1, int64_t{1} << 60, 100));
  EXPECT_EQ(answers_->Wait("gap").code(), absl::StatusCode::kOutOfRange);
  TearDown();
  Begin({.max_step_bytes = kRowBytes - 1});
  Attend("row", Token(2, 0));
  const absl::Status refused = answers_->Wait("row");
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  google::rpc::QuotaFailure quota;
  ASSERT_TRUE(DetailOf(ToRpcStatus(refused), &quota)) << refused;
  EXPECT_EQ(quota.violations(0).subject(), "max_step_bytes");
  EXPECT_EQ(Cache().pages_used(), 0);
}

// Calls that fit together by rows do not share a step that would take too much.
TEST_F(StepsTest, CallsShareAStepUpToWhatItMayTake) {
  TearDown();
  Begin({.pipeline_depth = 1, .max_step_bytes = 2 * kRowBytes});
  group_->Hold();
  for (uint64_t id = 1; id <= 5; ++id) Attend("c" + std::to_string(id), Token(id, 0));
  group_->Release();
  for (uint64_t id = 1; id <= 5; ++id) {
    EXPECT_TRUE(answers_->Wait("c" + std::to_string(id)).ok());
  }
  EXPECT_THAT(Steps(), ElementsAre(ElementsAre(1), ElementsAre(2, 3), ElementsAre(4, 5)));
}

// The deadline of a step is as far away as its work asks for, and so are those behind it.
TEST_F(StepsTest, ALongStepHasMoreTime) {
  TearDown();
  Begin({.step_timeout = std::chrono::seconds(10)});
  const auto left = [&] {
    return group_->commands().back()->deadline - std::chrono::steady_clock::now();
  };
  Attend("short", Token(1, 0));
  ASSERT_TRUE(answers_->Wait("short").ok());
  EXPECT_LT(left(), std::chrono::milliseconds(10'050));
  EXPECT_EQ(MoreTimeFor(0.5, {.flops = 1}, std::chrono::seconds(10)), std::chrono::seconds(50));
  EXPECT_EQ(MoreTimeFor(7, {.flops = 1}, std::chrono::seconds(10)), std::chrono::seconds(100));
}

// A large cache is created a piece at a time, two of them in turns, and nobody waits for them.
TEST_F(StepsTest, CachesTakeTheirMemoryInPiecesAndInTurns) {
  group_->TakeMemoryInPieces(3);
  const size_t before = group_->commands().size();
  v1::CreateCacheRequest create;
  *create.mutable_spec() = spec_;
  group_->Hold();
  Attend("step", Token(1, 0));  // the workers are busy with something else
  for (const std::string name : {"a", "b"}) {
    create.set_cache_id(name);
    coordinator_->CreateCache(create, {}, answers_->For<v1::CreateCacheReply>(name));
  }
  group_->Release();
  EXPECT_TRUE(answers_->Wait("a").ok());
  EXPECT_TRUE(answers_->Wait("b").ok());
  std::map<worker::CacheId, int> pieces;
  const auto commands = group_->commands();
  for (size_t i = before; i < commands.size(); ++i) {
    if (std::holds_alternative<worker::CreateCacheCommand>(commands[i]->body)) {
      ++pieces[commands[i]->cache];
    }
  }
  EXPECT_THAT(pieces,
              ElementsAre(::testing::Pair(::testing::_, 3), ::testing::Pair(::testing::_, 3)));
  Attend("after", Token(1, 1));
  EXPECT_TRUE(answers_->Wait("after").ok());

  // A rank that begins empty takes it again, before it is told tables.
  group_->TakeMemoryInPieces(5);
  group_->Break("a worker died");
  group_->Form({false, true});
  ASSERT_TRUE(test::Eventually(std::chrono::seconds(20), [this] { return coordinator_->ready(); }));
  Attend("formed", Token(2, 0));
  EXPECT_TRUE(answers_->Wait("formed").ok());
}

// A replacement may have less memory than the worker before it. What it cannot hold is set aside.
TEST_F(StepsTest, ACacheThatTheNewGroupCannotHoldLeavesTheOthersServed) {
  v1::CreateCacheRequest create;
  create.set_cache_id("large");
  *create.mutable_spec() = spec_;
  coordinator_->CreateCache(create, {}, answers_->For<v1::CreateCacheReply>("large"));
  ASSERT_TRUE(answers_->Wait("large").ok());
  const worker::CacheId large = group_->commands().back()->cache;

  group_->AnswerCreateCache(large, absl::ResourceExhaustedError("too large for rank 1"));
  group_->Break("a worker died");
  group_->Form({true, false});
  ASSERT_TRUE(coordinator_->ready());
  Attend("other", Token(1, 0));
  EXPECT_TRUE(answers_->Wait("other").ok());
  const auto open = [&](const std::string& name, uint64_t id) {
    v1::OpenSequenceRequest request;
    request.set_cache_id("large");
    request.set_sequence_id(id);
    coordinator_->OpenSequence(request, {}, answers_->For<v1::OpenSequenceReply>(name));
    return answers_->Wait(name);
  };
  const absl::Status refused = open("refused", 1);
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(refused.message()), ::testing::HasSubstr("too large for rank 1"));
  google::rpc::ErrorInfo info;
  ASSERT_TRUE(DetailOf(ToRpcStatus(refused), &info));
  EXPECT_EQ(info.reason(), "CACHE_NOT_HELD");
  coordinator_->CreateCache(create, {}, answers_->For<v1::CreateCacheReply>("again"));
  EXPECT_EQ(answers_->Wait("again").code(), absl::StatusCode::kUnavailable);
  v1::GetTopologyRequest request;
  request.set_cache_id("large");
  EXPECT_THAT(coordinator_->GetTopology(request, {})->caches(0).not_held_because(),
              ::testing::HasSubstr("too large for rank 1"));

  // It is tried again by itself.
  group_->AnswerCreateCache(large, absl::OkStatus());
  while (coordinator_->GetTopology(request, {})->caches(0).not_held_because() != "") {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_TRUE(open("held", 2).ok());

  // Or it is deleted, in whatever state it is.
  group_->AnswerCreateCache(large, absl::ResourceExhaustedError("too large for rank 1"));
  group_->Break("a worker died");
  group_->Form({true, false});
  v1::DeleteCacheRequest deletion;
  deletion.set_cache_id("large");
  coordinator_->DeleteCache(deletion, {}, answers_->For<v1::DeleteCacheReply>("delete"));
  EXPECT_TRUE(answers_->Wait("delete").ok());
  EXPECT_EQ(open("deleted", 3).code(), absl::StatusCode::kNotFound);
}

// Keeps what creates caches, and lets the test say when it is answered.
class GroupOfLateCaches final : public FakeGroup {
 public:
  GroupOfLateCaches() : FakeGroup(2) {}

  void Submit(std::shared_ptr<const worker::Command> command, Done done) override {
    const bool creates = std::holds_alternative<worker::CreateCacheCommand>(command->body);
    {
      std::lock_guard lock(mutex_);
      if (late_ && creates) {
        kept_.push_back({std::move(command), std::move(done)});
        return;
      }
    }
    FakeGroup::Submit(std::move(command), std::move(done));
  }
  void BeLate() {
    std::lock_guard lock(mutex_);
    late_ = true;
  }
  size_t kept() {
    std::lock_guard lock(mutex_);
    return kept_.size();
  }
  // The oldest that is kept succeeds, whatever has become of its epoch.
  void AnswerOne() {
    Kept oldest;
    {
      std::lock_guard lock(mutex_);
      oldest = std::move(kept_.front());
      kept_.pop_front();
    }
    Outcome outcome;
    outcome.replies.resize(2);
    oldest.done(std::move(outcome));
  }

 private:
  struct Kept {
    std::shared_ptr<const worker::Command> command;
    Done done;
  };
  std::mutex mutex_;
  bool late_ = false;
  std::deque<Kept> kept_;
};

TEST_F(StepsTest, ALateAnswerOfOneSetUpDoesNotEndTheNext) {
  coordinator_->Stop();
  auto owned = std::make_unique<GroupOfLateCaches>();
  GroupOfLateCaches& group = *owned;
  Begin({}, std::move(owned));
  group.BeLate();
  for (const char* reason : {"a worker died", "and another one"}) {
    group.Break(reason);
    group.Form({true, false});
  }
  ASSERT_EQ(group.kept(), 1u);
  group.AnswerOne();  // of the first set-up
  EXPECT_FALSE(coordinator_->ready());
  ASSERT_EQ(group.kept(), 1u);
  group.AnswerOne();
  EXPECT_TRUE(coordinator_->ready());
  Attend("served", Token(1, 0));
  EXPECT_TRUE(answers_->Wait("served").ok());
}

TEST_F(StepsTest, ADeadlineEndsTheWaitForATurn) {
  group_->Hold();
  Attend("first", Token(1, 0));
  Attend("late", Token(1, 1),
         {.deadline = Coordinator::Clock::now() + std::chrono::milliseconds(5)});
  // Nothing moves but the clock.
  EXPECT_EQ(answers_->Wait("late").code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_FALSE(answers_->Has("first"));
  group_->Release();
  EXPECT_TRUE(answers_->Wait("first").ok());
  Attend("again", Token(1, 1));
  EXPECT_TRUE(answers_->Wait("again").ok());
}

TEST_F(StepsTest, ACallWithoutDeadlineIsCapped) {
  TearDown();
  Begin({.max_call_timeout = std::chrono::milliseconds(20)});
  group_->Hold();
  Attend("first", Token(1, 0));
  Attend("late", Token(1, 1));
  EXPECT_EQ(answers_->Wait("late").code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(StepsTest, AWindowBringsCallsTogetherAndEndsByItself) {
  TearDown();
  Begin({.batch = {.max_entries = 3, .window = std::chrono::milliseconds(20)}});
  Attend("a", Token(1, 0));
  Attend("b", Token(2, 0));
  EXPECT_TRUE(answers_->Wait("a").ok());
  EXPECT_TRUE(answers_->Wait("b").ok());
  EXPECT_THAT(Steps(), ElementsAre(ElementsAre(1, 2)));
}

TEST_F(StepsTest, AFullBatchDoesNotWaitForItsWindow) {
  TearDown();
  Begin({.batch = {.max_entries = 2, .window = std::chrono::hours(1)}});
  Attend("a", Token(1, 0));
  EXPECT_THAT(Steps(), SizeIs(0));
  Attend("b", Token(2, 0));
  EXPECT_TRUE(answers_->Wait("b").ok());
  EXPECT_THAT(Steps(), ElementsAre(ElementsAre(1, 2)));
}

TEST_F(StepsTest, WhenTheGroupBreaksWhatWaitsIsUnavailableAndWhatRanAborted) {
  group_->Hold();
  Attend("running", Token(1, 0));
  Attend("waiting", Token(1, 1));
  group_->Break("gone");
  EXPECT_EQ(answers_->Wait("waiting").code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(answers_->Wait("running").code(), absl::StatusCode::kAborted);
  EXPECT_EQ(Cache().pages_used(), 0);
  group_->Form({false, false});
  group_->Release();
  Attend("again", Token(1, 0));
  EXPECT_TRUE(answers_->Wait("again").ok());
}

TEST_F(StepsTest, DeletingACacheEndsWhatWaitsForIt) {
  group_->Hold();
  Attend("running", Token(1, 0));
  Attend("waiting", Token(1, 1));
  v1::DeleteCacheRequest request;
  request.set_cache_id("m");
  coordinator_->DeleteCache(request, {}, answers_->For<v1::DeleteCacheReply>("delete"));
  EXPECT_EQ(answers_->Wait("waiting").code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(answers_->Wait("delete").ok());
  group_->Release();
  EXPECT_TRUE(answers_->Wait("running").ok());
}

TEST_F(StepsTest, DrainingRefusesNewCallsAndLetsAcceptedOnesFinish) {
  group_->Hold();
  Attend("running", Token(1, 0));
  Attend("waiting", Token(1, 1));
  coordinator_->StartDraining();
  Attend("new", Token(2, 0));
  EXPECT_EQ(answers_->Wait("new").code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(coordinator_->WaitIdle(Coordinator::Clock::now()));
  group_->Release();
  EXPECT_TRUE(coordinator_->WaitIdle(Coordinator::Clock::now() + std::chrono::seconds(60)));
  EXPECT_TRUE(answers_->Wait("running").ok());
  EXPECT_TRUE(answers_->Wait("waiting").ok());
}

TEST_F(StepsTest, AStepIsToldNewPagesOnlyHoweverLongItsSequence) {
  Attend("long", AttendOf(spec_, "m", 1, 0, 1000));
  ASSERT_TRUE(answers_->Wait("long").ok());
  Attend("next", Token(1, 1000));
  ASSERT_TRUE(answers_->Wait("next").ok());
  const auto command = group_->commands().back();
  const auto& step = std::get<worker::StepCommand>(command->body);
  EXPECT_TRUE(step.page_updates.empty());
  EXPECT_TRUE(step.page_copies.empty());
  EXPECT_EQ(step.kind, worker::StepKind::kDecode);
}

}  // namespace
}  // namespace tributary::service::testing
