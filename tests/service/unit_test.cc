// Decisions that need neither workers nor gRPC.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/status/errors.h"
#include "base/status/grpc_status.h"
#include "base/status/rpc_errors.h"
#include "google/rpc/error_details.pb.h"
#include "service/data/layer_groups.h"
#include "service/data/resolve_spec.h"
#include "service/schedule/batcher.h"
#include "service/schedule/page_allocator.h"
#include "service/schedule/sequence_order.h"

namespace tributary::service {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

// ---------------------------------------------------------------------------------------- pages

TEST(PageAllocatorTest, ReservesAllOrNothing) {
  PageAllocator pages(3);
  std::vector<int32_t> got;
  EXPECT_FALSE(pages.Reserve(4, &got));
  EXPECT_THAT(got, IsEmpty());
  EXPECT_EQ(pages.used(), 0);
  EXPECT_TRUE(pages.Reserve(3, &got));
  EXPECT_THAT(got, ::testing::UnorderedElementsAre(0, 1, 2));
  EXPECT_EQ(pages.free(), 0);
  EXPECT_FALSE(pages.Reserve(1, &got));
  EXPECT_TRUE(pages.Reserve(0, &got));
}

TEST(PageAllocatorTest, TakesMemoryForPagesInUseNotForAllThatThereAre) {
  PageAllocator pages(std::numeric_limits<int32_t>::max());  // would be 16 GiB
  std::vector<int32_t> got;
  EXPECT_TRUE(pages.Reserve(2, &got));
  EXPECT_THAT(got, ElementsAre(0, 1));
  EXPECT_EQ(pages.free(), std::numeric_limits<int32_t>::max() - 2);
  pages.Release(0);
  EXPECT_EQ(pages.used(), 1);
  EXPECT_TRUE(pages.Reserve(2, &got));
  EXPECT_THAT(got, ElementsAre(0, 1, 0, 2)) << "pages that were used are used again first";
  EXPECT_EQ(pages.used(), 3);
}

TEST(PageAllocatorTest, CountsSharedPagesAndFreesWithTheLastHolder) {
  PageAllocator pages(2);
  std::vector<int32_t> got;
  ASSERT_TRUE(pages.Reserve(1, &got));
  pages.Retain(got[0]);
  pages.Retain(got[0]);
  EXPECT_TRUE(pages.IsShared(got[0]));
  EXPECT_EQ(pages.shared(), 1);
  pages.Release(got[0]);
  EXPECT_TRUE(pages.IsShared(got[0]));
  pages.Release(got[0]);
  EXPECT_FALSE(pages.IsShared(got[0]));
  EXPECT_EQ(pages.shared(), 0);
  EXPECT_EQ(pages.used(), 1);
  pages.Release(got[0]);
  EXPECT_EQ(pages.used(), 0);
}

// ---------------------------------------------------------------------------------------- order

TEST(SequenceOrderTest, OneSequenceIsServedInOrder) {
  SequenceOrder order;
  SequenceOrder::Member a{{1}}, b{{1}}, c{{2}};
  std::vector<SequenceOrder::Member*> runnable;
  EXPECT_TRUE(order.Enter(&a));
  EXPECT_FALSE(order.Enter(&b));
  EXPECT_TRUE(order.Enter(&c));
  order.Leave(&a, &runnable);
  EXPECT_THAT(runnable, ElementsAre(&b));
  order.Leave(&b, &runnable);
  order.Leave(&c, &runnable);
  EXPECT_TRUE(order.empty());
}

TEST(SequenceOrderTest, AMemberOfSeveralSequencesWaitsForAll) {
  SequenceOrder order;
  SequenceOrder::Member a{{1}}, b{{2}}, both{{1, 2}}, after{{2}};
  std::vector<SequenceOrder::Member*> runnable;
  order.Enter(&a);
  order.Enter(&b);
  EXPECT_FALSE(order.Enter(&both));
  EXPECT_FALSE(order.Enter(&after));
  order.Leave(&b, &runnable);
  EXPECT_THAT(runnable, IsEmpty());
  order.Leave(&a, &runnable);
  EXPECT_THAT(runnable, ElementsAre(&both));
  runnable.clear();
  order.Leave(&both, &runnable);
  EXPECT_THAT(runnable, ElementsAre(&after));
}

TEST(SequenceOrderTest, GivingUpInTheMiddleUnblocksNobodyElse) {
  SequenceOrder order;
  SequenceOrder::Member a{{1}}, b{{1, 2}}, c{{1}}, d{{2}};
  std::vector<SequenceOrder::Member*> runnable;
  order.Enter(&a);
  order.Enter(&b);
  order.Enter(&c);
  order.Enter(&d);
  order.Leave(&b, &runnable);  // heads 2's queue, not 1's
  EXPECT_THAT(runnable, ElementsAre(&d));
  runnable.clear();
  order.Leave(&a, &runnable);
  EXPECT_THAT(runnable, ElementsAre(&c));
}

// -------------------------------------------------------------------------------------- batches

class BatcherTest : public ::testing::Test {
 protected:
  using Clock = Batcher::Clock;

  Batcher::Candidate Candidate(int* request, int32_t rows, int32_t entries, int arrival_us) {
    return {request, rows, entries, start_ + std::chrono::microseconds(arrival_us)};
  }
  Clock::time_point At(int us) const { return start_ + std::chrono::microseconds(us); }

  const Clock::time_point start_ = Clock::now();
  int a_ = 0, b_ = 0, c_ = 0, d_ = 0;
  const BatchKey layer0_{.cache = 1, .layer = 0};
  const BatchKey layer1_{.cache = 1, .layer = 1};
};

TEST_F(BatcherTest, TheOldestThatFitAreWithinTheLimits) {
  const BatchLimits limits{.max_rows = 10, .max_entries = 3};
  const auto fit = [&](std::vector<Batcher::Candidate> c) {
    return Batcher::Fitting(c, limits).size();
  };
  EXPECT_EQ(fit({}), 0u);
  EXPECT_EQ(fit({Candidate(&a_, 4, 1, 0), Candidate(&b_, 6, 1, 0)}), 2u);
  EXPECT_EQ(fit({Candidate(&a_, 4, 1, 0), Candidate(&b_, 7, 1, 0), Candidate(&c_, 1, 1, 0)}), 1u);
  EXPECT_EQ(fit({Candidate(&a_, 1, 2, 0), Candidate(&b_, 1, 2, 0)}), 1u);
  EXPECT_EQ(fit({Candidate(&a_, 100, 1, 0), Candidate(&b_, 1, 1, 0)}), 1u) << "runs alone";
}

TEST_F(BatcherTest, RequestsOfOneKeyShareAStepAndTheOldestKeyGoesFirst) {
  Batcher batcher({.max_rows = 100, .max_entries = 100});
  batcher.Add(layer1_, Candidate(&a_, 1, 1, 0));
  batcher.Add(layer0_, Candidate(&b_, 1, 1, 1));
  batcher.Add(layer1_, Candidate(&c_, 1, 1, 2));
  const auto first = batcher.Take(At(10));
  ASSERT_TRUE(first.has_value());
  EXPECT_EQ(first->key, layer1_);
  EXPECT_THAT(first->requests, ElementsAre(&a_, &c_));
  const auto second = batcher.Take(At(10));
  ASSERT_TRUE(second.has_value());
  EXPECT_THAT(second->requests, ElementsAre(&b_));
  EXPECT_FALSE(batcher.Take(At(10)).has_value());
}

TEST_F(BatcherTest, ARequestThatYieldsLetsThoseGoFirstThatComeSoMuchLater) {
  Batcher batcher({.max_rows = 100, .max_entries = 1});
  Batcher::Candidate yields = Candidate(&a_, 1, 1, 0);
  yields.yield = std::chrono::milliseconds(1);
  batcher.Add(layer0_, yields);
  batcher.Add(layer0_, Candidate(&b_, 1, 1, 500));
  batcher.Add(layer0_, Candidate(&c_, 1, 1, 1500));
  batcher.Add(layer1_, Candidate(&d_, 1, 1, 999));
  std::vector<void*> order;
  while (const auto batch = batcher.Take(At(2000))) order.push_back(batch->requests.front());
  EXPECT_THAT(order, ElementsAre(&b_, &d_, &a_, &c_));
  // It waits for nobody who is not there.
  batcher.Add(layer0_, yields);
  EXPECT_TRUE(batcher.Take(At(0)).has_value());
}

TEST_F(BatcherTest, ACallerWithManyRequestsDoesNotGoAheadOfAllOthers) {
  Batcher batcher({.max_rows = 100, .max_entries = 1});
  for (int i = 0; i < 10; ++i) {  // of other layers, so that none shares a step
    Batcher::Candidate many = Candidate(&a_, 1, 1, 0);
    many.caller = "many";
    batcher.Add({.cache = 1, .layer = i}, many);
  }
  const auto take = [&] { return batcher.Take(At(10'000))->requests.front(); };
  EXPECT_EQ(take(), &a_);
  Batcher::Candidate one = Candidate(&b_, 1, 1, 250);
  one.caller = "one";
  batcher.Add({.cache = 2}, one);
  for (const int behind : {0, 100, 200}) EXPECT_EQ(take(), &a_) << behind;
  EXPECT_EQ(take(), &b_);
  for (int i = 4; i < 10; ++i) EXPECT_EQ(take(), &a_);
  EXPECT_TRUE(batcher.empty());
  // By now it has none that waits.
  Batcher::Candidate again = Candidate(&a_, 1, 1, 5'000);
  again.caller = "many";
  batcher.Add({.cache = 1}, again);
  one.arrival = At(5'001);
  batcher.Add({.cache = 2}, one);
  EXPECT_EQ(take(), &a_);
  EXPECT_TRUE(batcher.Remove({.cache = 2}, &b_));
  EXPECT_TRUE(batcher.empty());
}

// Of each caller a step takes a turn: 16 requests that are nothing but requests.
TEST_F(BatcherTest, BesideOneWhoHasFewAStepTakesFewOfEach) {
  Batcher batcher({}, std::chrono::milliseconds(20));
  const auto add = [&](int* request, const char* caller) {
    Batcher::Candidate candidate = Candidate(request, 1, 1, 0);
    candidate.caller = caller;
    candidate.turns = CallerShare::kOfACall;
    batcher.Add(layer0_, candidate);
  };
  const auto sizes_of_steps = [&] {
    std::vector<size_t> sizes;
    while (const auto batch = batcher.Take(At(10))) sizes.push_back(batch->requests.size());
    return sizes;
  };
  const auto add_many = [&](int* request, const char* caller) {
    for (int i = 0; i < 40; ++i) add(request, caller);
  };
  add(&d_, "");  // whoever finds nobody is not counted
  add_many(&a_, "many");
  EXPECT_THAT(sizes_of_steps(), ElementsAre(41u)) << "who is alone may take all";
  add(&d_, "");
  add_many(&a_, "many");
  add_many(&b_, "as many");
  EXPECT_THAT(sizes_of_steps(), ElementsAre(81u)) << "and where all have many";

  add(&d_, "");
  add_many(&a_, "many");
  add(&c_, "few");
  const auto first = batcher.Take(At(10));
  EXPECT_THAT(first->requests, SizeIs(18)) << "and passes over those of one who has enough";
  EXPECT_THAT(first->requests, Contains(&c_));
  EXPECT_FALSE(first->is_turn);
  EXPECT_FALSE(batcher.Take(At(10), /*turns=*/false).has_value()) << "a turn at a time";
  add(&c_, "few");
  EXPECT_THAT(batcher.Take(At(10), /*turns=*/false)->requests, ElementsAre(&c_))
      << "which others need not wait for";
  const auto second = batcher.Take(At(10));
  EXPECT_THAT(second->requests, SizeIs(16));
  EXPECT_TRUE(second->is_turn);
  EXPECT_FALSE(batcher.Take(At(10), /*turns=*/false).has_value()) << "it had many a moment ago";
  EXPECT_THAT(sizes_of_steps(), ElementsAre(8u));
}

TEST_F(BatcherTest, TurnsOfLongRequestsMayHaveToWait) {
  Batcher batcher({.max_rows = 100, .max_entries = 100});
  const Clock::time_point now = At(10);
  Batcher::Candidate turn = Candidate(&a_, 1, 1, 0);
  turn.in_turns = true;
  batcher.Add({.cache = 1}, turn);
  EXPECT_FALSE(batcher.Take(now, /*turns=*/false).has_value());
  batcher.Add({.cache = 2}, Candidate(&b_, 1, 1, 5));
  EXPECT_EQ(batcher.Take(now, /*turns=*/false)->key.cache, 2u);
  EXPECT_EQ(batcher.Take(now)->key.cache, 1u);
  EXPECT_TRUE(batcher.empty());
}

TEST_F(BatcherTest, BatchesWhoseOldestRequestIsPassedOverWait) {
  Batcher batcher({});
  batcher.Add({.cache = 1}, Candidate(&a_, 1, 1, 0));
  batcher.Add({.cache = 2}, Candidate(&b_, 1, 1, 5));
  const auto a = [this](const void* request) { return request == &a_; };
  EXPECT_EQ(batcher.Take(At(10), /*turns=*/true, a)->key.cache, 2u);
  EXPECT_FALSE(batcher.Take(At(10), /*turns=*/true, a).has_value());
  EXPECT_EQ(batcher.Take(At(10))->key.cache, 1u);
}

TEST_F(BatcherTest, AWindowHoldsABatchUntilItClosesOrTheBatchIsFull) {
  Batcher batcher({.max_rows = 2, .max_entries = 100, .window = std::chrono::microseconds(50)});
  batcher.Add(layer0_, Candidate(&a_, 1, 1, 0));
  EXPECT_FALSE(batcher.Take(At(49)).has_value());
  EXPECT_EQ(batcher.NextDue(), At(50));
  batcher.Add(layer0_, Candidate(&b_, 1, 1, 20));
  EXPECT_EQ(batcher.NextDue(), At(0)) << "full";
  EXPECT_THAT(batcher.Take(At(21))->requests, ElementsAre(&a_, &b_));
  batcher.Add(layer0_, Candidate(&c_, 1, 1, 30));
  EXPECT_THAT(batcher.Take(At(80))->requests, ElementsAre(&c_));
  EXPECT_FALSE(batcher.NextDue().has_value());
}

TEST_F(BatcherTest, ARemovedRequestIsInNoBatch) {
  Batcher batcher({});
  batcher.Add(layer0_, Candidate(&a_, 1, 1, 0));
  batcher.Add(layer0_, Candidate(&b_, 1, 1, 0));
  EXPECT_TRUE(batcher.Remove(layer0_, &a_));
  EXPECT_FALSE(batcher.Remove(layer0_, &a_));
  EXPECT_FALSE(batcher.Remove(layer1_, &b_));
  EXPECT_THAT(batcher.Take(At(1))->requests, ElementsAre(&b_));
}

// --------------------------------------------------------------------------------------- errors

TEST(ErrorsTest, DetailsSurviveTheJourney) {
  const absl::Status status = BeyondEnd("entries[1].first_position", 9, 4);
  const google::rpc::Status rpc = ToRpcStatus(status);
  EXPECT_EQ(rpc.code(), static_cast<int>(grpc::StatusCode::OUT_OF_RANGE));
  ASSERT_EQ(rpc.details_size(), 2);
  google::rpc::BadRequest bad;
  ASSERT_TRUE(rpc.details(0).UnpackTo(&bad));
  EXPECT_EQ(bad.field_violations(0).field(), "entries[1].first_position");
  google::rpc::ErrorInfo info;
  ASSERT_TRUE(rpc.details(1).UnpackTo(&info));
  EXPECT_EQ(info.metadata().at("length"), "4");
  EXPECT_EQ(info.domain(), kErrorDomain);

  const absl::Status back = FromRpcStatus(rpc);
  EXPECT_EQ(back.code(), status.code());
  EXPECT_EQ(back.message(), status.message());
  EXPECT_EQ(FieldOf(back), "entries[1].first_position");
  EXPECT_EQ(ToRpcStatus(back).SerializeAsString(), rpc.SerializeAsString());
}

TEST(ErrorsTest, EveryCodeHasItsGrpcTwin) {
  for (int code = 0; code <= 16; ++code) {
    EXPECT_EQ(static_cast<int>(ToGrpcCode(static_cast<absl::StatusCode>(code))), code);
  }
}

TEST(ErrorsTest, WhatBreaksTheGroupIsAbortedAndTheRestStays) {
  const std::chrono::milliseconds delay(1500);
  const absl::Status aborted = FromOutcome(absl::DeadlineExceededError("late"), delay);
  EXPECT_EQ(aborted.code(), absl::StatusCode::kAborted);
  google::rpc::RetryInfo retry;
  const auto rpc = ToRpcStatus(aborted);
  bool found = false;
  for (const auto& detail : rpc.details()) found |= detail.UnpackTo(&retry);
  ASSERT_TRUE(found);
  EXPECT_EQ(retry.retry_delay().seconds(), 1);
  EXPECT_EQ(retry.retry_delay().nanos(), 500'000'000);
  EXPECT_EQ(FromOutcome(absl::UnavailableError("gone"), delay).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(FromOutcome(absl::InvalidArgumentError("q"), delay).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(FromOutcome(absl::OkStatus(), delay).ok());
}

// ----------------------------------------------------------------------------------------- specs

v1::CacheSpec Spec() {
  v1::CacheSpec spec;
  spec.set_layers(3);
  spec.set_q_heads(8);
  spec.set_kv_heads(2);
  spec.set_head_dim(128);
  spec.set_capacity_tokens(100);
  return spec;
}

TEST(ResolveSpecTest, FillsDefaultsAndRoundsTheCapacityUp) {
  const auto resolved = ResolveSpec(Spec(), 4);
  ASSERT_TRUE(resolved.ok()) << resolved.status();
  EXPECT_EQ(resolved->spec.num_pages, 2);  // of 16 * 4 tokens
  EXPECT_EQ(resolved->public_spec.capacity_tokens(), 128);
  EXPECT_EQ(resolved->public_spec.page_size(), 16);
  EXPECT_EQ(resolved->public_spec.interleave(), 16);
  EXPECT_EQ(resolved->public_spec.kv_dtype(), v1::DTYPE_FP8_E4M3);
  EXPECT_FLOAT_EQ(resolved->public_spec.sm_scale(), 1 / std::sqrt(128.0f));
  EXPECT_EQ(resolved->spec.layers.size(), 3u);
}

TEST(ResolveSpecTest, ValuesHaveTheDimsOfKeysUnlessTheSpecSaysOtherwise) {
  v1::CacheSpec spec = Spec();
  EXPECT_EQ(ResolveSpec(spec, 1)->public_spec.value_head_dim(), 128);
  spec.set_head_dim(192);
  EXPECT_EQ(ResolveSpec(spec, 1)->public_spec.value_head_dim(), 192);
  spec.set_value_head_dim(128);
  const auto resolved = ResolveSpec(spec, 1);
  ASSERT_TRUE(resolved.ok()) << resolved.status();
  EXPECT_EQ(resolved->public_spec.value_head_dim(), 128);
  EXPECT_FLOAT_EQ(resolved->spec.sm_scale, 1 / std::sqrt(192.0f));
}

TEST(ResolveSpecTest, ALayerWithDimsOfItsOwnHasTheirScale) {
  v1::CacheSpec spec = Spec();
  for (int i = 0; i < 3; ++i) spec.add_layer_specs();
  spec.mutable_layer_specs(1)->set_head_dim(64);
  spec.mutable_layer_specs(1)->set_q_heads(12);
  spec.mutable_layer_specs(2)->set_sm_scale(0.5f);
  const auto scale = [&](size_t layer) {
    const auto resolved = ResolveSpec(spec, 1);
    return GeometryOf(resolved->spec, resolved->spec.layers[layer]).sm_scale;
  };
  EXPECT_FLOAT_EQ(scale(0), 1 / std::sqrt(128.0f));
  EXPECT_FLOAT_EQ(scale(1), 1 / std::sqrt(64.0f));
  EXPECT_FLOAT_EQ(scale(2), 0.5f);
  spec.set_sm_scale(0.25f);  // given for the cache, it holds for every layer without one
  EXPECT_FLOAT_EQ(scale(1), 0.25f);
  EXPECT_FLOAT_EQ(scale(2), 0.5f);
}

TEST(LayerGroupsTest, OnlyGroupsWithAnFp8LayerRoundQueriesToFp8) {
  worker::CacheSpec spec{.kv_dtype = DType::kFp8E4M3, .fp8_queries = true, .fp8_weights = true};
  spec.layers.resize(2);
  spec.layers[1].kv_dtype = DType::kBf16;
  spec.layers[1].window = {.left = 10};
  const LayerGroups groups(WindowsOf(spec), /*apart=*/true);
  ASSERT_EQ(groups.size(), 2);
  const worker::CacheSpec first = SpecOf(spec, groups[groups.PlaceOf(0).group], 8);
  const worker::CacheSpec second = SpecOf(spec, groups[groups.PlaceOf(1).group], 8);
  EXPECT_TRUE(first.fp8_queries && first.fp8_weights);
  EXPECT_FALSE(second.fp8_queries || second.fp8_weights);
}

TEST(ResolveSpecTest, NamesTheFieldAtFault) {
  const auto field = [](const std::function<void(v1::CacheSpec*)>& spoil) {
    v1::CacheSpec spec = Spec();
    spoil(&spec);
    const auto resolved = ResolveSpec(spec, 4);
    EXPECT_EQ(resolved.status().code(), absl::StatusCode::kInvalidArgument);
    return FieldOf(resolved.status());
  };
  EXPECT_EQ(field([](auto* s) { s->set_layers(0); }), "spec.layers");
  EXPECT_EQ(field([](auto* s) { s->set_layers(1 << 30); }), "spec.layers");
  EXPECT_EQ(field([](auto* s) { s->set_q_heads(7); }), "spec.q_heads");
  EXPECT_EQ(field([](auto* s) { s->set_kv_heads(0); }), "spec.kv_heads");
  EXPECT_EQ(field([](auto* s) { s->set_head_dim(112); }), "spec.head_dim");
  EXPECT_EQ(field([](auto* s) { s->set_page_size(17); }), "spec.page_size");
  EXPECT_EQ(field([](auto* s) { s->set_page_size(-16); }), "spec.page_size");
  EXPECT_EQ(field([](auto* s) { s->set_interleave(3); }), "spec.interleave");
  EXPECT_EQ(field([](auto* s) { s->set_kv_dtype(static_cast<v1::DType>(77)); }), "spec.kv_dtype");
  EXPECT_EQ(field([](auto* s) { s->set_sm_scale(-1); }), "spec.sm_scale");
  EXPECT_EQ(field([](auto* s) { s->set_soft_cap(-1); }), "spec.soft_cap");
  EXPECT_EQ(field([](auto* s) {
              s->set_kv_dtype(v1::DTYPE_F16);
              s->set_fp8_queries(true);
            }),
            "spec.fp8_queries");
  EXPECT_EQ(field([](auto* s) { s->set_fp8_weights(true); }), "spec.fp8_weights");
  EXPECT_EQ(field([](auto* s) { s->set_capacity_tokens(0); }), "spec.capacity_tokens");
  EXPECT_EQ(field([](auto* s) { s->set_capacity_tokens(INT64_MAX); }), "spec.capacity_tokens");
  EXPECT_EQ(field([](auto* s) {
              s->add_layer_specs();
              s->add_layer_specs();
            }),
            "spec.layer_specs");
  EXPECT_EQ(field([](auto* s) { s->add_layer_specs()->add_sinks(1); }),
            "spec.layer_specs[0].sinks");
  EXPECT_EQ(field([](auto* s) { s->add_layer_specs()->mutable_window()->set_left(-1); }),
            "spec.layer_specs[0].window.left");
}

}  // namespace
}  // namespace tributary::service
