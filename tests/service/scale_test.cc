// Sizes that a small test would not reach.
#include <gtest/gtest.h>

#include <cmath>
#include <thread>

#include "kernels/element.h"
#include "tests/service/model_host.h"
#include "tests/service/test_service.h"
#include "tests/support/compare.h"

namespace tributary::service::testing {
namespace {

#ifdef TRIBUTARY_SHORT_GRID
constexpr int kSequences = 512;
constexpr int64_t kLongTokens = 1 << 18;
constexpr int kClients = 16;
#else
constexpr int kSequences = 4096;
constexpr int64_t kLongTokens = 1 << 22;
constexpr int kClients = 64;
#endif

TEST(ScaleTest, ManyOpenSequences) {
  TestService service({.workers = 4});
  v1::CacheSpec spec = SmallSpec();
  spec.set_layers(1);
  spec.set_kv_heads(1);
  spec.set_q_heads(2);
  spec.set_capacity_tokens(int64_t{kSequences} * 64);
  ASSERT_TRUE(CreateCache(service.stub(), "m", spec).ok());
  ModelHost host(&service.stub(), "m", spec, DType::kF32, 3);
  for (int id = 1; id <= kSequences; ++id) {
    ASSERT_TRUE(Open(service.stub(), "m", id).ok());
  }
  // Every sequence gets a token, many sequences a call; then some get a second one.
  constexpr int kEntries = 128;
  for (int first = 1; first <= kSequences; first += kEntries) {
    std::vector<std::pair<uint64_t, int32_t>> entries;
    for (int i = 0; i < kEntries; ++i) entries.emplace_back(first + i, 1);
    host.Step(0, entries);
  }
  host.Step(0, {{1, 1}, {kSequences / 2, 2}, {kSequences, 3}});
  const v1::CacheInfo cache = service.Topology().caches(0);
  EXPECT_EQ(cache.sequences(), kSequences);
  EXPECT_EQ(cache.pages_used(), kSequences);
  EXPECT_EQ(cache.pages_total(), kSequences);
  EXPECT_EQ(cache.sequence_size(), kSequences);
}

TEST(ScaleTest, OneVeryLongSequence) {
  TestService service({.workers = 4});
  v1::CacheSpec spec;
  spec.set_layers(1);
  spec.set_q_heads(1);
  spec.set_kv_heads(1);
  spec.set_head_dim(64);
  spec.set_page_size(128);
  spec.set_kv_dtype(v1::DTYPE_FP8_E4M3);
  spec.set_capacity_tokens(kLongTokens + 512);
  ASSERT_TRUE(CreateCache(service.stub(), "long", spec).ok());
  ASSERT_TRUE(Open(service.stub(), "long", 1).ok());
  // Tokens are windows into one random array, so that the reference needs no copy of all of them:
  // token t is [64 * (t mod kPeriod) + 3 * (t / kPeriod), + 64).
  constexpr int32_t kChunk = 1 << 16;
  constexpr int64_t kPeriod = kChunk;
  const int64_t periods = kLongTokens / kPeriod;
  const std::vector<float> k = RandomValues(64 * kPeriod + 3 * periods, 1);
  const std::vector<float> v = RandomValues(64 * kPeriod + 3 * periods, 2);
  for (int64_t period = 0; period < periods; ++period) {
    v1::AppendRequest request;
    request.set_cache_id("long");
    v1::AppendEntry* entry = request.add_entries();
    entry->set_sequence_id(1);
    entry->set_first_position(period * kPeriod);
    entry->set_tokens(kChunk);
    const auto chunk = [&](const std::vector<float>& values) {
      const auto begin = values.begin() + 3 * period;
      return InlineTensor(DType::kBf16, {kChunk, 1, 64}, {begin, begin + 64 * kPeriod});
    };
    *request.mutable_k() = chunk(k);
    *request.mutable_v() = chunk(v);
    v1::AppendReply reply;
    const grpc::Status status = Append(service.stub(), request, &reply);
    ASSERT_TRUE(status.ok()) << status.error_message();
    ASSERT_EQ(reply.lengths(0), (period + 1) * kPeriod);
  }
  v1::AttendRequest query = QueryOf(spec, "long", 1, kLongTokens - 1, 1);
  query.set_return_lse(true);
  v1::AttendReply reply;
  const grpc::Status status = Attend(service.stub(), query, &reply);
  ASSERT_TRUE(status.ok()) << status.error_message();

  // What the cache holds of a value that came as bf16.
  const auto stored = [](const std::vector<float>& values) {
    std::vector<double> out(values.size());
    for (size_t i = 0; i < values.size(); ++i) {
      unsigned char bytes[2];
      StoreElement(DType::kBf16, bytes, 0, values[i]);
      const float given = LoadElement(DType::kBf16, bytes, 0);
      StoreElement(DType::kFp8E4M3, bytes, 0, given);
      out[i] = LoadElement(DType::kFp8E4M3, bytes, 0);
    }
    return out;
  };
  const std::vector<double> held_k = stored(k), held_v = stored(v);
  const std::vector<float> q = ValuesOf(query.q());
  double sum = 0;  // logits are small: no maximum is needed in float64
  std::vector<double> o(64, 0);
  for (int64_t token = 0; token < kLongTokens; ++token) {
    const int64_t at = 64 * (token % kPeriod) + 3 * (token / kPeriod);
    double logit = 0;
    for (int d = 0; d < 64; ++d) logit += q[d] * held_k[at + d];
    const double weight = std::exp(logit / 8);
    sum += weight;
    for (int d = 0; d < 64; ++d) o[d] += weight * held_v[at + d];
  }
  for (double& x : o) x /= sum;
  EXPECT_TRUE(test::AllClose(ValuesOf(reply.output()), o, test::kAttentionTolerance, {1, 1, 64}));
  EXPECT_TRUE(test::AllClose(ValuesOf(reply.lse()), std::vector<double>{std::log(sum)},
                             test::kAttentionTolerance, {1, 1}));
  EXPECT_EQ(service.Topology().caches(0).sequence(0).length(), kLongTokens);
}

TEST(ScaleTest, ManyClientsAtOnce) {
  TestService service({.workers = 4});
  v1::CacheSpec spec = SmallSpec();
  spec.set_capacity_tokens(int64_t{kClients} * 128);
  ASSERT_TRUE(CreateCache(service.stub(), "m", spec).ok());
  std::vector<std::thread> clients;
  for (int client = 0; client < kClients; ++client) {
    clients.emplace_back([&, client] {
      const auto stub = v1::AttentionService::NewStub(service.NewChannel());
      ModelHost host(stub.get(), "m", spec, DType::kF32, 50 + client);
      host.Open(1 + client);
      host.Step(0, {{1 + client, 20}});
      for (int token = 0; token < 20; ++token) host.Step(0, {{1 + client, 1}});
    });
  }
  for (std::thread& client : clients) client.join();
  const auto statistics = service.Topology().statistics();
  EXPECT_EQ(statistics.requests(), 21u * kClients);
  EXPECT_EQ(statistics.requests_failed(), 0u);
  EXPECT_LT(statistics.steps(), statistics.requests()) << "clients share steps";
}

}  // namespace
}  // namespace tributary::service::testing
