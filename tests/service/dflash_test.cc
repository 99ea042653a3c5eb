// Drafts through the service: what they give, in which order they take effect, what is refused; and
// sequences whose windows let old tokens go.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "tests/service/fake_group.h"
#include "tests/service/model_host.h"
#include "tests/service/test_service.h"

namespace tributary::service::testing {
namespace {

using ::grpc::StatusCode;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A draft model's cache: a full layer in bf16 and a sliding one in FP8, with sinks.
v1::CacheSpec DraftSpec() {
  v1::CacheSpec spec = SmallSpec();
  spec.add_modes(v1::ATTEND_MODE_DFLASH);
  spec.add_modes(v1::ATTEND_MODE_CAUSAL);
  spec.add_layer_specs();
  v1::LayerSpec* sliding = spec.add_layer_specs();
  sliding->mutable_window()->set_left(30);
  sliding->mutable_window()->set_right(6);
  sliding->set_window_base(v1::WINDOW_BASE_ANCHOR);
  sliding->set_kv_dtype(v1::DTYPE_FP8_E4M3);
  sliding->set_soft_cap(5.0f);
  for (const float sink : {0.0f, 1.0f, -1.0f, 0.5f}) sliding->add_sinks(sink);
  return spec;
}

// A service with a cache "m" of a spec and a host of it.
class DraftTest : public ::testing::Test {
 protected:
  void Begin(const v1::CacheSpec& spec) {
    const grpc::Status created = CreateCache(service_.stub(), "m", spec);
    ASSERT_TRUE(created.ok()) << created.error_message();
    host_ = std::make_unique<ModelHost>(&service_.stub(), "m", spec, DType::kF32, 11);
  }
  ModelHost& host() { return *host_; }
  v1::AttentionService::Stub& stub() { return service_.stub(); }

  grpc::Status Truncate(uint64_t id, int64_t length) {
    v1::TruncateSequenceRequest request;
    request.set_cache_id("m");
    request.set_sequence_id(id);
    request.set_length(length);
    v1::TruncateSequenceReply reply;
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    return stub().TruncateSequence(&context, request, &reply);
  }
  v1::CacheInfo Cache() { return service_.Topology().caches(0); }

  TestService service_{{.workers = 3}};
  std::unique_ptr<ModelHost> host_;
};

// ------------------------------------------------------------------------------------- speculation

TEST_F(DraftTest, RoundsOfDraftVerifyAndRollBack) {
  Begin(DraftSpec());
  for (const uint64_t id : {1, 2}) host().Open(id);
  const auto both = [&](const std::function<void(int32_t)>& call) {
    for (const int32_t layer : {0, 1}) call(layer);
  };
  both([&](int32_t layer) { host().Draft(layer, {{1, 8}}); });  // behind nothing at all
  both([&](int32_t layer) { host().Append(layer, 1, 70); });
  both([&](int32_t layer) { host().Append(layer, 2, 5); });
  for (int round = 0; round < 3; ++round) {
    both([&](int32_t layer) {
      host().Draft(layer, {{2, 4}, {1, 16}});
      host().RepeatLastStep();
    });
    both([&](int32_t layer) { host().Step(layer, {{1, 16}, {2, 4}}); });
    // All but `round` of the guesses were wrong; rolling back again changes nothing.
    const int64_t length = host().length(1, 0);
    const int64_t used = Cache().pages_used();
    for (int again = 0; again < 2; ++again) {
      host().Truncate(1, length - 15 + round);
      host().Truncate(2, host().length(2, 0));
    }
    EXPECT_LE(Cache().pages_used(), used);
  }
  // A draft as it was asked for earlier, and what it needs is still there.
  host().Draft(0, {{1, 8}}, 40);
  const v1::Statistics statistics = service_.Topology().statistics();
  EXPECT_EQ(statistics.tokens_appended(), 2u * (75 + 3 * 20)) << "blocks are not kept";
}

// A host that waits for nothing: context, draft, verification, rollback and the next round are in
// flight together and take effect in the order in which they were sent.
TEST_F(DraftTest, EverythingInFlightTakesEffectInTheOrderSent) {
  const v1::CacheSpec spec = DraftSpec();
  Begin(spec);
  host().Open(1);
  host().Step(0, {{1, 20}});

  std::mutex mutex;
  std::condition_variable changed;
  int answered = 0;
  struct Call {
    v1::AttendRequest request;
    absl::StatusOr<v1::AttendReply> reply = absl::UnknownError("no answer");
  };
  std::vector<std::unique_ptr<Call>> calls;
  const auto answer = [&] {
    std::lock_guard lock(mutex);
    ++answered;
    changed.notify_all();
  };
  const auto send = [&](const v1::AttendRequest& request) {
    calls.push_back(std::make_unique<Call>());
    Call* call = calls.back().get();
    call->request = request;
    service_.coordinator().Attend(std::make_shared<const v1::AttendRequest>(request), {},
                                  [call, &answer](absl::StatusOr<v1::AttendReply> reply) {
                                    call->reply = std::move(reply);
                                    answer();
                                  });
  };
  const auto cut = [&](int64_t length) {
    v1::TruncateSequenceRequest request;
    request.set_cache_id("m");
    request.set_sequence_id(1);
    request.set_length(length);
    service_.coordinator().TruncateSequence(
        request, {}, [&answer](absl::StatusOr<v1::TruncateSequenceReply> reply) {
          EXPECT_TRUE(reply.ok()) << reply.status();
          answer();
        });
  };
  constexpr int kRounds = 5;
  int64_t length = 20;
  for (int round = 0; round < kRounds; ++round) {
    send(AttendOf(spec, "m", 1, length, 6, 0, 100 + round));  // verify 6
    cut(length + 4);                                          // 4 were right
    length += 4;
    v1::AttendRequest draft = AttendOf(spec, "m", 1, length, 8, 0, 200 + round);
    draft.set_mode(v1::ATTEND_MODE_DFLASH);
    send(draft);
  }
  {
    std::unique_lock lock(mutex);
    ASSERT_TRUE(
        changed.wait_for(lock, std::chrono::seconds(60), [&] { return answered == 3 * kRounds; }));
  }
  for (const auto& call : calls) {
    ASSERT_TRUE(call->reply.ok()) << call->reply.status();
    const int64_t held = call->reply->lengths(0);
    const v1::AttendEntry& entry = call->request.entries(0);
    const bool draft = call->request.mode() == v1::ATTEND_MODE_DFLASH;
    EXPECT_EQ(held, entry.first_position() + (draft ? 0 : 6));
    if (!draft) continue;
    // The context of a draft was never changed afterwards: asking again gives the same.
    v1::AttendReply again;
    ASSERT_TRUE(Attend(stub(), call->request, &again).ok());
    EXPECT_EQ(again.output().SerializeAsString(), call->reply->output().SerializeAsString());
  }
  EXPECT_EQ(host().length(1, 0) + 4 * kRounds, length);
}

TEST(DraftBatches, DraftsOfOneLayerShareAStepAndNoOtherCallJoinsIt) {
  FakeGroup* group = new FakeGroup(2);
  TestService service({.coordinator = {.pipeline_depth = 1}}, std::unique_ptr<WorkerGroup>(group));
  const v1::CacheSpec spec = SmallSpec();
  ASSERT_TRUE(CreateCache(service.stub(), "m", spec).ok());
  for (uint64_t id = 1; id <= 5; ++id) ASSERT_TRUE(Open(service.stub(), "m", id).ok());
  std::mutex mutex;
  std::condition_variable changed;
  int answered = 0;
  const auto send = [&](uint64_t sequence, v1::AttendMode mode, int32_t layer) {
    v1::AttendRequest request = AttendOf(spec, "m", sequence, 0, 4, layer);
    request.set_mode(mode);
    service.coordinator().Attend(std::make_shared<const v1::AttendRequest>(request), {},
                                 [&](absl::StatusOr<v1::AttendReply> reply) {
                                   EXPECT_TRUE(reply.ok()) << reply.status();
                                   std::lock_guard lock(mutex);
                                   ++answered;
                                   changed.notify_all();
                                 });
  };
  group->Hold();
  send(1, v1::ATTEND_MODE_DFLASH, 0);
  group->WaitForHeld(1);
  send(2, v1::ATTEND_MODE_DFLASH, 0);
  send(3, v1::ATTEND_MODE_CAUSAL, 0);
  send(4, v1::ATTEND_MODE_DFLASH, 0);
  send(5, v1::ATTEND_MODE_DFLASH, 1);
  group->Release();
  {
    std::unique_lock lock(mutex);
    ASSERT_TRUE(changed.wait_for(lock, std::chrono::seconds(60), [&] { return answered == 5; }));
  }
  std::vector<std::vector<uint64_t>> drafts;
  for (const auto& command : group->commands()) {
    const auto* step = std::get_if<worker::StepCommand>(&command->body);
    if (step == nullptr || step->kind != worker::StepKind::kDflash) continue;
    drafts.emplace_back();
    for (const worker::StepEntry& entry : step->entries) drafts.back().push_back(entry.sequence);
  }
  EXPECT_THAT(drafts, ElementsAre(ElementsAre(1), ElementsAre(2, 4), ElementsAre(5)));
}

// ---------------------------------------------------------------------------------------- refusals

TEST_F(DraftTest, WhatIsNoDraftIsRefusedAndNamed) {
  const v1::CacheSpec spec = DraftSpec();
  Begin(spec);
  host().Open(1);
  host().Append(0, 1, 20);
  const std::string before = service_.State();
  const auto refuse = [&](StatusCode code, const std::string& field, int64_t first,
                          const std::function<void(v1::AttendRequest*)>& spoil) {
    v1::AttendRequest request = AttendOf(spec, "m", 1, first, 4);
    request.set_mode(v1::ATTEND_MODE_DFLASH);
    spoil(&request);
    v1::AttendReply reply;
    const grpc::Status status = Attend(stub(), request, &reply);
    EXPECT_EQ(status.error_code(), code) << status.error_message();
    EXPECT_EQ(FieldOf(status), field) << status.error_message();
    EXPECT_EQ(service_.State(), before);
  };
  refuse(StatusCode::INVALID_ARGUMENT, "entries[0].new_tokens", 20, [](auto* r) {
    r->mutable_entries(0)->set_new_tokens(0);
    r->clear_k();
    r->clear_v();
  });
  refuse(StatusCode::OUT_OF_RANGE, "entries[0].first_position", 21, [](auto*) {});
  refuse(StatusCode::INVALID_ARGUMENT, "k.shape[0]", 20,
         [](auto* r) { r->mutable_k()->set_shape(0, 3); });
}

TEST_F(DraftTest, ModesThatWereNotAskedForAreRefused) {
  v1::CacheSpec spec = SmallSpec();
  spec.add_modes(v1::ATTEND_MODE_DFLASH);
  Begin(spec);
  host().Open(1);
  host().Append(0, 1, 20);
  host().Draft(0, {{1, 4}});
  v1::AttendReply reply;
  const grpc::Status refused = Attend(stub(), AttendOf(spec, "m", 1, 20, 2), &reply);
  EXPECT_EQ(refused.error_code(), StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(refused.error_message(), HasSubstr("CAUSAL"));
  // The same cache with other terms is another one.
  spec.add_modes(v1::ATTEND_MODE_CAUSAL);
  EXPECT_EQ(CreateCache(stub(), "m", spec).error_code(), StatusCode::ALREADY_EXISTS);
  spec.clear_modes();
  spec.add_modes(v1::ATTEND_MODE_UNSPECIFIED);
  const grpc::Status unknown = CreateCache(stub(), "n", spec);
  EXPECT_EQ(unknown.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(FieldOf(unknown), "spec.modes[0]");
}

TEST_F(DraftTest, SpecsThatMakeNoSenseAreRefusedAndNamed) {
  const auto refuse = [&](const std::string& field, auto spoil) {
    v1::CacheSpec spec = DraftSpec();
    spoil(&spec, spec.mutable_layer_specs(1));
    const grpc::Status status = CreateCache(stub(), "bad", spec);
    EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT) << field;
    EXPECT_EQ(FieldOf(status), field) << status.error_message();
  };
  refuse("spec.layer_specs[1].window_base",
         [](auto*, auto* l) { l->set_window_base(static_cast<v1::WindowBase>(7)); });
  refuse("spec.layer_specs[1].kv_dtype",
         [](auto*, auto* l) { l->set_kv_dtype(static_cast<v1::DType>(70)); });
  refuse("spec.layer_specs[1].soft_cap", [](auto*, auto* l) { l->set_soft_cap(-1); });
  refuse("spec.layer_specs[1].window.right",
         [](auto*, auto* l) { l->mutable_window()->set_right(int64_t{1} << 50); });
  refuse("spec.rollback_tokens", [](auto* s, auto*) { s->set_rollback_tokens(-1); });
  refuse("spec.window_capacity_tokens", [](auto* s, auto* l) {
    l->mutable_window()->set_left(9);
    s->set_window_capacity_tokens(0);
  });
  refuse("spec.window_capacity_tokens", [](auto* s, auto*) {
    for (auto& layer : *s->mutable_layer_specs()) layer.clear_window();
    s->set_window_capacity_tokens(100);
  });
}

TEST(DraftCaches, AMaskThatNoBackendHasIsRefusedBeforeAnySequenceIsOpened) {
  worker::BackendCapabilities narrow = worker::CpuBackend();
  narrow.name = "narrow";
  narrow.modes = {{.mode = worker::AttentionMode::kCausal, .left_window = true},
                  {.mode = worker::AttentionMode::kDflash, .left_window = true}};
  TestService::Options options;
  options.coordinator.backends = {&narrow};
  TestService service(options);
  v1::CacheSpec spec = DraftSpec();
  spec.clear_modes();
  spec.add_modes(v1::ATTEND_MODE_DFLASH);
  const grpc::Status refused = CreateCache(service.stub(), "m", spec);
  EXPECT_EQ(refused.error_code(), StatusCode::FAILED_PRECONDITION);
  google::rpc::PreconditionFailure failure;
  ASSERT_TRUE(DetailOf(refused, &failure));
  ASSERT_EQ(failure.violations_size(), 1);
  const std::string why = failure.violations(0).description();
  for (const char* reason : {"DFLASH: narrow", "right side", "anchor", "soft_cap", "sinks"}) {
    EXPECT_THAT(why, HasSubstr(reason));
  }
}

// ------------------------------------------------------------------- tokens that no window reaches

TEST_F(DraftTest, AWindowedSequenceOutgrowsTheCache) {
  v1::CacheSpec spec = SmallSpec();
  spec.set_capacity_tokens(4 * 48);  // four pages of three ranks
  spec.set_rollback_tokens(10);
  for (const int64_t left : {40, 25}) spec.add_layer_specs()->mutable_window()->set_left(left);
  Begin(spec);
  host().Open(1);
  for (int64_t length = 0; length < 600; length += 20) {
    for (const int32_t layer : {0, 1}) host().Step(layer, {{1, 20}});
    if (length % 100 == 0) {
      for (const int32_t layer : {0, 1}) host().Draft(layer, {{1, 8}});
    }
  }
  v1::CacheInfo cache = Cache();
  EXPECT_EQ(cache.pages_total(), 4);
  EXPECT_LE(cache.pages_used(), 3);
  EXPECT_EQ(cache.pages_given_up(), (600 - 20 - 40) / 48);

  // As far back as was promised, and not further.
  v1::AttendReply reply;
  EXPECT_TRUE(Attend(stub(), QueryOf(spec, "m", 1, 580, 1), &reply).ok()) << "the last call's";
  const grpc::Status behind = Attend(stub(), QueryOf(spec, "m", 1, 579, 1), &reply);
  EXPECT_EQ(behind.error_code(), StatusCode::OUT_OF_RANGE);
  EXPECT_EQ(FieldOf(behind), "entries[0].first_position");
  const grpc::Status too_far = Truncate(1, 589);
  EXPECT_EQ(too_far.error_code(), StatusCode::OUT_OF_RANGE);
  EXPECT_EQ(FieldOf(too_far), "length");
  host().Truncate(1, 592);
  for (const int32_t layer : {0, 1}) host().Step(layer, {{1, 3}});
  host().Fork(1, 2, 594);
  for (const int32_t layer : {0, 1}) host().Step(layer, {{2, 5}, {1, 4}});
  host().Truncate(1, 0);
  for (const int32_t layer : {0, 1}) host().Step(layer, {{1, 10}, {2, 1}});
  host().Close(1);
  host().Close(2);
  EXPECT_EQ(Cache().pages_used(), 0);
}

// A page that was given up is another sequence's soon, and the first one's rows do not see it.
TEST_F(DraftTest, GivenUpPagesServeOtherSequences) {
  v1::CacheSpec spec = SmallSpec();
  spec.set_capacity_tokens(6 * 48);
  spec.set_rollback_tokens(0);
  spec.add_layer_specs()->mutable_window()->set_left(17);
  Begin(spec);
  for (const uint64_t id : {1, 2, 3}) host().Open(id);
  for (int round = 0; round < 40; ++round) {
    for (const int32_t layer : {0, 1}) {
      host().Step(layer, {{1, 7}, {2, 9}, {3, 1 + round % 5}});
      host().Draft(layer, {{3, 4}, {1, 8}});
    }
  }
  EXPECT_GT(Cache().pages_given_up(), 10);
}

// A model with layers of both kinds: those with a window keep little more than their windows, the
// others keep everything.
TEST_F(DraftTest, LayersWithAWindowKeepTheirTokensApart) {
  v1::CacheSpec spec = SmallSpec();
  spec.set_layers(3);
  spec.set_capacity_tokens(13 * 48);
  spec.set_window_capacity_tokens(7 * 48 - 5);  // rounded up
  spec.set_rollback_tokens(10);
  for (const int64_t left : {25, -1, 40}) {
    v1::LayerSpec* layer = spec.add_layer_specs();
    if (left >= 0) layer->mutable_window()->set_left(left);
  }
  Begin(spec);
  EXPECT_EQ(Cache().spec().window_capacity_tokens(), 7 * 48);
  const std::vector<int32_t> layers = {0, 1, 2};
  for (const uint64_t id : {1, 2}) host().Open(id);
  for (int64_t length = 0; length < 280; length += 20) {
    for (const int32_t layer : layers) host().Step(layer, {{1, 20}, {2, 19}});
    for (const int32_t layer : layers) host().Draft(layer, {{1, 8}});
  }
  v1::CacheInfo cache = Cache();
  EXPECT_EQ(cache.pages_total(), 13 + 7);
  EXPECT_EQ(cache.window_pages_total(), 7);
  EXPECT_LE(cache.window_pages_used(), 6);
  EXPECT_EQ(cache.pages_used() - cache.window_pages_used(), 12) << "280 and 266 tokens, whole";
  EXPECT_GT(cache.pages_given_up(), 4);

  // The sequence is one: it is cut, forked and closed in all its layers.
  const grpc::Status too_far = Truncate(1, 100);
  EXPECT_EQ(too_far.error_code(), StatusCode::OUT_OF_RANGE);
  EXPECT_EQ(FieldOf(too_far), "length");
  host().Truncate(1, 275);
  host().Close(2);
  host().Fork(1, 3, 270);
  for (const int32_t layer : layers) host().Step(layer, {{3, 5}, {1, 4}});
  host().Truncate(1, 0);
  for (const int32_t layer : layers) host().Step(layer, {{1, 10}, {3, 1}});
  host().Close(1);
  host().Close(3);
  EXPECT_EQ(Cache().pages_used(), 0);
}

}  // namespace
}  // namespace tributary::service::testing
