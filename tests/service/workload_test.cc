// What the service computes, against the float64 reference: random lives of sequences, several
// hosts at once.
#include <gtest/gtest.h>

#include <cmath>
#include <thread>

#include "tests/service/model_host.h"
#include "tests/service/test_service.h"

namespace tributary::service::testing {
namespace {

#ifdef TRIBUTARY_SHORT_GRID
constexpr int kMoves = 20;
constexpr int kHosts = 2;
#else
constexpr int kMoves = 60;
constexpr int kHosts = 4;
#endif

// One host's sequences live: they grow by tokens, blocks and prompts, fork, roll back and close.
void Live(ModelHost& host, uint64_t first_id, int moves) {
  uint64_t next_id = first_id;
  std::vector<uint64_t> open;
  const auto pick = [&] { return open[host.random()() % open.size()]; };
  for (int move = 0; move < moves && !::testing::Test::HasFailure(); ++move) {
    const int what = static_cast<int>(host.random()() % 10);
    if (open.empty() || (what == 0 && open.size() < 4)) {
      host.Open(next_id);
      open.push_back(next_id++);
    } else if (what == 1 && open.size() < 4) {
      const uint64_t parent = pick();
      const int64_t held = std::min(host.length(parent, 0), host.length(parent, 1));
      host.Fork(parent, next_id,
                held == 0 ? 0 : static_cast<int64_t>(host.random()() % (held + 1)));
      open.push_back(next_id++);
    } else if (what == 2) {
      const uint64_t id = pick();
      const int64_t held = std::max<int64_t>(1, host.length(id, 0));
      host.Truncate(id, held - static_cast<int64_t>(host.random()() % held));
    } else if (what == 3 && open.size() > 1) {
      host.Close(open.back());
      open.pop_back();
    } else if (what == 4) {
      host.Append(0, pick(), 1 + host.random()() % 40);
    } else if (what == 5) {
      const uint64_t id = pick();
      const int32_t layer = host.random()() % 2;
      if (host.length(id, layer) > 0) host.LookBack(layer, id, 1);
    } else {
      const uint64_t id = pick();
      const int32_t tokens = what == 6 ? 70 + host.random()() % 60 : 1 + host.random()() % 5;
      for (int32_t layer = 0; layer < 2; ++layer) host.Step(layer, {{id, tokens}});
      if (what == 7) host.RepeatLastStep();
      if (what == 8 && open.size() > 1) host.Step(1, {{open[0], 1}, {open[1], 3}});
    }
  }
}

struct Case {
  int workers;
  v1::DType kv;
  DType dtype;
};

class WorkloadTest : public ::testing::TestWithParam<Case> {};

TEST_P(WorkloadTest, SeveralHostsGetWhatTheReferenceSays) {
  TestService service({.workers = GetParam().workers});
  v1::CacheSpec spec = SmallSpec();
  spec.set_kv_dtype(GetParam().kv);
  spec.set_interleave(8);
  spec.set_capacity_tokens(40'000);
  v1::LayerSpec* full = spec.add_layer_specs();
  full->add_k_scale(0.5f);
  v1::LayerSpec* windowed = spec.add_layer_specs();
  windowed->mutable_window()->set_left(37);
  for (int head = 0; head < 4; ++head) windowed->add_sinks(0.25f * head);
  ASSERT_TRUE(CreateCache(service.stub(), "m", spec).ok());

  std::vector<std::thread> hosts;
  for (int i = 0; i < kHosts; ++i) {
    hosts.emplace_back([&, i] {
      const auto stub = v1::AttentionService::NewStub(service.NewChannel());
      ModelHost host(stub.get(), "m", spec, GetParam().dtype, 100 + i);
      Live(host, 1 + 1000 * i, kMoves);
    });
  }
  for (std::thread& host : hosts) host.join();

  const v1::GetTopologyReply topology = service.Topology();
  EXPECT_EQ(topology.statistics().requests_failed(), 0u);
  EXPECT_EQ(topology.statistics().steps_aborted(), 0u);
  // Every page is somebody's, and who shares is counted right.
  int64_t held = 0;
  for (const auto& sequence : topology.caches(0).sequence()) held += sequence.pages();
  EXPECT_GE(held, topology.caches(0).pages_used());
  for (const auto& sequence : topology.caches(0).sequence()) {
    v1::CloseSequenceRequest request;
    request.set_cache_id("m");
    request.set_sequence_id(sequence.sequence_id());
    v1::CloseSequenceReply reply;
    grpc::ClientContext context;
    EXPECT_TRUE(service.stub().CloseSequence(&context, request, &reply).ok());
  }
  EXPECT_EQ(service.Topology().caches(0).pages_used(), 0);
}

// End to end over layers that differ: what calls carry, and get back, has the shape of their layer.
TEST(LayersTest, LayersMayDifferInHeadsAndDims) {
  TestService service({.workers = 3});
  v1::CacheSpec spec = SmallSpec();
  spec.set_layers(4);
  spec.set_interleave(4);
  spec.set_kv_dtype(v1::DTYPE_BF16);
  spec.set_head_dim(192);
  spec.set_value_head_dim(128);
  spec.add_layer_specs();
  v1::LayerSpec* narrow = spec.add_layer_specs();
  narrow->set_head_dim(80);
  narrow->set_q_heads(3);
  narrow->set_kv_heads(1);
  narrow->set_kv_dtype(v1::DTYPE_FP8_E4M3);
  for (int head = 0; head < 3; ++head) narrow->add_sinks(0.5f * head);
  v1::LayerSpec* windowed = spec.add_layer_specs();
  windowed->set_head_dim(96);
  windowed->mutable_window()->set_left(21);
  v1::LayerSpec* wide = spec.add_layer_specs();
  wide->set_value_head_dim(192);
  wide->set_kv_dtype(v1::DTYPE_FP8_E5M2);
  ASSERT_TRUE(CreateCache(service.stub(), "m", spec).ok());
  const v1::CacheSpec shown = service.Topology().caches(0).spec();
  EXPECT_EQ(shown.value_head_dim(), 128);
  EXPECT_EQ(shown.layer_specs(1).head_dim(), 80);
  EXPECT_FLOAT_EQ(shown.layer_specs(1).sm_scale(), 1 / std::sqrt(80.0f));

  ModelHost host(&service.stub(), "m", spec, DType::kF32, 17);
  for (const uint64_t sequence : {1, 2}) host.Open(sequence);
  for (int32_t layer = 0; layer < 4; ++layer) {
    SCOPED_TRACE(layer);
    host.Step(layer, {{1, 90}, {2, 7}});  // prefill
    host.Append(layer, 2, 20);
    host.Step(layer, {{2, 1}, {1, 5}});
    host.RepeatLastStep();
    host.LookBack(layer, 1, 9);
    host.Draft(layer, {{1, 8}, {2, 16}}, -1);
  }
}

INSTANTIATE_TEST_SUITE_P(Grid, WorkloadTest,
                         ::testing::Values(Case{1, v1::DTYPE_BF16, DType::kF32},
                                           Case{4, v1::DTYPE_FP8_E4M3, DType::kF32},
                                           Case{4, v1::DTYPE_F16, DType::kF16},
                                           Case{3, v1::DTYPE_FP8_E5M2, DType::kBf16}));

}  // namespace
}  // namespace tributary::service::testing
