// The client against the real service: coordinator, workers and gRPC front in one process.
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <latch>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/half.h"
#include "kernels/reference.h"
#include "service/api/server.h"
#include "service/client/client.h"
#include "service/coordinator/coordinator.h"
#include "service/workers/embedded_group.h"
#include "tests/service/client/fake_service.h"
#include "tests/support/compare.h"
#include "tests/support/quantized_output.h"

namespace tributary::client {
namespace {

constexpr int kQHeads = 4;
constexpr int kKvHeads = 2;
constexpr int kHeadDim = 64;
constexpr char kCache[] = "model";

class RealService {
 public:
  explicit RealService(const std::string& target) {
    auto log = std::make_shared<const telemetry::Logger>(telemetry::LogLevel::kWarning,
                                                         telemetry::LogFormat::kText);
    coordinator_ = std::make_unique<service::Coordinator>(
        service::CoordinatorOptions{}, service::CreateEmbeddedGroup({.workers = 3, .threads = 3}),
        log);
    auto server = service::Server::Start({.listen = {target}}, coordinator_.get());
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    const absl::Status started = coordinator_->Start();
    EXPECT_TRUE(started.ok()) << started;
  }
  ~RealService() {
    server_->Drain(std::chrono::steady_clock::now() + std::chrono::seconds(5));
    coordinator_->Stop();
    server_.reset();
  }

 private:
  std::unique_ptr<service::Coordinator> coordinator_;
  std::unique_ptr<service::Server> server_;
};

struct Dims {
  int key = kHeadDim;
  int value = kHeadDim;
};

v1::CacheSpec Spec(Dims dims = {}) {
  v1::CacheSpec spec;
  spec.set_layers(2);
  spec.set_q_heads(kQHeads);
  spec.set_kv_heads(kKvHeads);
  spec.set_head_dim(dims.key);
  spec.set_value_head_dim(dims.value);
  spec.set_kv_dtype(v1::DTYPE_BF16);
  spec.set_capacity_tokens(1 << 16);
  return spec;
}

// K, V and Q of a sequence, bf16, so that a bf16 cache holds them exactly.
struct Tokens {
  Tokens(int n, uint32_t seed, Dims of_heads = {}) : count(n), dims(of_heads) {
    std::mt19937 dice(seed);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<uint16_t>& values, int heads, int dim) {
      values.resize(static_cast<size_t>(count) * heads * dim);
      for (uint16_t& value : values) value = Bf16FromFloat(normal(dice));
    };
    fill(q, kQHeads, dims.key);
    fill(k, kKvHeads, dims.key);
    fill(v, kKvHeads, dims.value);
  }
  const uint16_t* Q(int t) const { return q.data() + static_cast<size_t>(t) * kQHeads * dims.key; }
  const uint16_t* K(int t) const { return k.data() + static_cast<size_t>(t) * kKvHeads * dims.key; }
  const uint16_t* V(int t) const {
    return v.data() + static_cast<size_t>(t) * kKvHeads * dims.value;
  }

  // Causal attention of all tokens.
  ReferenceResult Reference() const {
    std::vector<KeyRange> keys;
    for (int t = 0; t < count; ++t) keys.push_back({0, t + 1});
    const NewTokensEntry entry{.row_begin = 0, .row_count = count};
    NewTokensParams p;
    p.q = q.data();
    p.k = k.data();
    p.v = v.data();
    p.rows = count;
    p.q_heads = kQHeads;
    p.kv_heads = kKvHeads;
    p.key_dim = dims.key;
    p.value_dim = dims.value;
    p.head_count = kQHeads;
    p.entries = {&entry, 1};
    p.keys = keys.data();
    p.sm_scale = 1.0f / std::sqrt(static_cast<float>(dims.key));
    return ReferenceNewTokens(p);
  }

  int count;
  Dims dims;
  std::vector<uint16_t> q, k, v;
};

struct Results {
  explicit Results(const Tokens& tokens)
      : row(static_cast<size_t>(kQHeads) * tokens.dims.value),
        output(static_cast<size_t>(tokens.count) * row),
        lse(static_cast<size_t>(tokens.count) * kQHeads) {}
  uint16_t* Output(int t) { return output.data() + static_cast<size_t>(t) * row; }
  float* Lse(int t) { return lse.data() + static_cast<size_t>(t) * kQHeads; }

  size_t row;  // elements of an output
  std::vector<uint16_t> output;
  std::vector<float> lse;
};

AttendCall CallOf(const Tokens& tokens, Results& results, uint64_t sequence, int first, int rows,
                  const char* cache = kCache) {
  return {.cache_id = cache,
          .layer = 1,
          .entries = {{sequence, first, rows, rows}},
          .dtype = v1::DTYPE_BF16,
          .q = tokens.Q(first),
          .k = tokens.K(first),
          .v = tokens.V(first),
          .q_heads = kQHeads,
          .kv_heads = kKvHeads,
          .head_dim = tokens.dims.key,
          .value_head_dim = tokens.dims.value,
          .output = results.Output(first),
          .lse = results.Lse(first)};
}

class ClientServiceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto created = Connect()->CreateCache(kCache, Spec());
    ASSERT_TRUE(created.ok()) << created.status();
    EXPECT_EQ(created->ranks(), 3);
    EXPECT_EQ(created->spec().page_size(), 16);
  }

  std::unique_ptr<Client> Connect(size_t shared_memory_bytes = 0) {
    auto client =
        Client::Connect({.target = socket_.target(), .shared_memory_bytes = shared_memory_bytes});
    EXPECT_TRUE(client.ok()) << client.status();
    return *std::move(client);
  }

  // The first 30 tokens, in both layers.
  static void AppendThirty(Client& client, uint64_t sequence, const Tokens& tokens) {
    for (const int layer : {0, 1}) {
      ASSERT_EQ(client.Append({.cache_id = kCache,
                               .layer = layer,
                               .entries = {{sequence, 0, 30}},
                               .dtype = v1::DTYPE_BF16,
                               .k = tokens.K(0),
                               .v = tokens.V(0),
                               .kv_heads = kKvHeads,
                               .head_dim = kHeadDim}),
                absl::OkStatus());
    }
  }

  // A prompt, then token by token.
  Results Generate(Client& client, const Tokens& tokens) {
    Results results(tokens);
    const auto sequence = client.OpenSequence(kCache);
    EXPECT_TRUE(sequence.ok()) << sequence.status();
    const int prompt = tokens.count / 2;
    absl::Status status = client.Attend(CallOf(tokens, results, *sequence, 0, prompt));
    for (int t = prompt; status.ok() && t < tokens.count; ++t) {
      status = client.Attend(CallOf(tokens, results, *sequence, t, 1));
    }
    EXPECT_EQ(status, absl::OkStatus());
    return results;
  }

  SocketPath socket_;
  RealService service_{socket_.target()};
};

TEST_F(ClientServiceTest, ResultsAreTheReferencesInlineAndInSharedMemory) {
  const Tokens tokens(90, 1);
  const ReferenceResult expected = tokens.Reference();
  Results inline_results = Generate(*Connect(), tokens);
  Results shared_results = Generate(*Connect(1 << 20), tokens);

  std::vector<float> output;
  for (const uint16_t value : inline_results.output) output.push_back(FloatFromBf16(value));
  const test::Tolerance tolerance =
      test::RoundedTo(DType::kBf16, test::AttentionTolerance(DType::kBf16));
  EXPECT_TRUE(test::AllClose(output, expected.o, tolerance, {tokens.count, kQHeads, kHeadDim}));
  EXPECT_TRUE(test::AllClose(inline_results.lse, expected.lse, test::kAttentionTolerance,
                             {tokens.count, kQHeads}));
  EXPECT_EQ(inline_results.output, shared_results.output);
  EXPECT_EQ(inline_results.lse, shared_results.lse);
}

TEST_F(ClientServiceTest, ValuesMayBeNarrowerThanKeys) {
  const Dims dims{.key = 192, .value = 128};
  const Tokens tokens(50, 4, dims);
  const ReferenceResult expected = tokens.Reference();
  const test::Tolerance tolerance =
      test::RoundedTo(DType::kBf16, test::AttentionTolerance(DType::kBf16));
  for (const size_t shared_memory_bytes : {size_t{0}, size_t{4} << 20}) {
    SCOPED_TRACE(shared_memory_bytes);
    const auto client = Connect(shared_memory_bytes);
    ASSERT_TRUE(client->CreateCache("narrow", Spec(dims)).ok());
    const auto sequence = client->OpenSequence("narrow");
    ASSERT_TRUE(sequence.ok()) << sequence.status();
    constexpr int kPrompt = 30;
    ASSERT_EQ(client->Append({.cache_id = "narrow",
                              .layer = 1,
                              .entries = {{*sequence, 0, kPrompt}},
                              .dtype = v1::DTYPE_BF16,
                              .k = tokens.K(0),
                              .v = tokens.V(0),
                              .kv_heads = kKvHeads,
                              .head_dim = dims.key,
                              .value_head_dim = dims.value}),
              absl::OkStatus());
    Results results(tokens);
    const int rows = tokens.count - kPrompt;
    ASSERT_EQ(client->Attend(CallOf(tokens, results, *sequence, kPrompt, rows, "narrow")),
              absl::OkStatus());
    std::vector<float> output;
    const std::vector<float> last(expected.o.end() - static_cast<int64_t>(rows * results.row),
                                  expected.o.end());
    for (size_t i = kPrompt * results.row; i < results.output.size(); ++i) {
      output.push_back(FloatFromBf16(results.output[i]));
    }
    EXPECT_TRUE(test::AllClose(output, last, tolerance, {rows, kQHeads, dims.value}));
    EXPECT_EQ(client->DeleteCache("narrow"), absl::OkStatus());
  }
}

TEST_F(ClientServiceTest, OutputsMayBeOfAnotherType) {
  const Tokens tokens(20, 5);
  for (const size_t shared_memory_bytes : {size_t{0}, size_t{1} << 20}) {
    SCOPED_TRACE(shared_memory_bytes);
    const auto client = Connect(shared_memory_bytes);
    const auto sequence = client->OpenSequence(kCache);
    ASSERT_TRUE(sequence.ok()) << sequence.status();
    Results results(tokens);
    AttendCall call = CallOf(tokens, results, *sequence, 0, tokens.count);
    std::vector<float> exact(results.output.size());
    call.output_dtype = v1::DTYPE_F32;
    call.output = exact.data();
    ASSERT_EQ(client->Attend(call), absl::OkStatus());
    EXPECT_TRUE(test::AllClose(exact, tokens.Reference().o, test::AttentionTolerance(DType::kBf16),
                               {tokens.count, kQHeads, kHeadDim}));
    for (const auto& [proto, dtype] : {std::pair{v1::DTYPE_FP8_E4M3, DType::kFp8E4M3},
                                       std::pair{v1::DTYPE_NVFP4, DType::kNvfp4}}) {
      std::vector<uint8_t> bytes(OutputBytes(proto, exact.size()));
      call.output_dtype = proto;
      call.o_scale = 0.03f;
      call.output = bytes.data();
      ASSERT_EQ(client->Attend(call), absl::OkStatus());
      EXPECT_EQ(bytes, test::QuantizedOutput({dtype, 0.03f}, exact)) << Name(dtype);
    }
    call.output_dtype = v1::DTYPE_FP8_E5M2;
    EXPECT_EQ(FieldOf(client->Attend(call)), "output_dtype");
  }
}

TEST_F(ClientServiceTest, ARegionThatIsTooSmallChangesNothing) {
  const Tokens tokens(90, 2);
  const Results inline_results = Generate(*Connect(), tokens);
  // The prompt does not fit, single tokens do.
  const Results mixed_results = Generate(*Connect(8 << 10), tokens);
  EXPECT_EQ(inline_results.output, mixed_results.output);
}

TEST_F(ClientServiceTest, ThousandsOfCallsInFlight) {
#ifdef TRIBUTARY_SHORT_GRID
  constexpr int kSequences = 16, kTokens = 32;
#else
  constexpr int kSequences = 64, kTokens = 64;
#endif
  for (const size_t shared_memory_bytes : {size_t{0}, size_t{1} << 20}) {
    const auto client = Connect(shared_memory_bytes);
    std::vector<Tokens> tokens;
    std::vector<Results> results;
    std::vector<uint64_t> sequences;
    for (int s = 0; s < kSequences; ++s) {
      tokens.emplace_back(kTokens, 100 + s);
      results.emplace_back(tokens.back());
      sequences.push_back(*client->OpenSequence(kCache));
    }
    std::atomic<int> failed = 0;
    std::latch left(kSequences * kTokens);
    // All at once: the service keeps the order within a sequence, so nobody waits for anybody.
    for (int t = 0; t < kTokens; ++t) {
      for (int s = 0; s < kSequences; ++s) {
        client->AttendAsync(CallOf(tokens[s], results[s], sequences[s], t, 1),
                            [&](const absl::Status& status) {
                              if (!status.ok()) {
                                ++failed;
                                ADD_FAILURE() << status;
                              }
                              left.count_down();
                            });
      }
    }
    left.wait();
    ASSERT_EQ(failed, 0);
    for (int s = 0; s < kSequences; s += 7) {
      EXPECT_TRUE(test::AllClose(results[s].lse, tokens[s].Reference().lse,
                                 test::kAttentionTolerance, {kTokens, kQHeads}))
          << "sequence " << s;
    }
  }
}

TEST_F(ClientServiceTest, ManyThreadsShareAClient) {
  const auto client = Connect(4 << 20);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      const Tokens tokens(24, 10 + i);
      const Results results = Generate(*client, tokens);
      EXPECT_TRUE(test::AllClose(results.lse, tokens.Reference().lse, test::kAttentionTolerance,
                                 {tokens.count, kQHeads}));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// What lies in shared memory is read and written there, everything else is copied, tensor by
// tensor.
TEST_F(ClientServiceTest, TensorsMayLieWhereTheServiceReadsAndWritesThem) {
  const Tokens tokens(40, 4);
  for (const size_t pool : {size_t{0}, size_t{1} << 20}) {
    const auto client = Connect(pool);
    Results expected(tokens);
    const auto sequence = client->OpenSequence(kCache);
    ASSERT_TRUE(sequence.ok());
    const AttendCall plain = CallOf(tokens, expected, *sequence, 0, 40);
    ASSERT_EQ(client->Attend(plain), absl::OkStatus());
    const auto shared = client->AllocateShared(1 << 20);
    ASSERT_TRUE(shared.ok()) << shared.status();
    ASSERT_EQ((*shared)->bytes(), uint64_t{1} << 20);
    std::byte* const memory = (*shared)->data();
    const size_t row = size_t{40} * kHeadDim * sizeof(uint16_t);
    const size_t lse_bytes = size_t{40} * kQHeads * sizeof(float);
    for (int mask = 0; mask < 32; ++mask) {
      std::memset(memory, 0xa5, 1 << 20);
      Results results(tokens);
      AttendCall call = CallOf(tokens, results, *sequence, 0, 40);
      const auto input = [&](int bit, size_t at, size_t bytes, const void** tensor) {
        if ((mask & (1 << bit)) == 0) return;
        std::memcpy(memory + at, *tensor, bytes);
        *tensor = memory + at;
      };
      input(0, 0, kQHeads * row, &call.q);
      input(1, 100'000, kKvHeads * row, &call.k);
      input(2, 200'000, kKvHeads * row, &call.v);
      if ((mask & 8) != 0) call.output = memory + 300'000;
      if ((mask & 16) != 0) call.lse = reinterpret_cast<float*>(memory + 400'000);
      ASSERT_EQ(client->Attend(call), absl::OkStatus()) << mask;
      EXPECT_EQ(std::memcmp(call.output, plain.output, kQHeads * row), 0) << mask;
      EXPECT_EQ(std::memcmp(call.lse, plain.lse, lse_bytes), 0) << mask;
      EXPECT_EQ(memory[500'000], std::byte{0xa5});
    }
    std::byte* const k = memory + 100'000;
    const AppendCall append{.cache_id = kCache,
                            .layer = 1,
                            .entries = {{*sequence, 0, 40}},
                            .dtype = v1::DTYPE_BF16,
                            .k = k,
                            .v = memory + 200'000,
                            .kv_heads = kKvHeads,
                            .head_dim = kHeadDim};
    std::memcpy(k, tokens.K(0), kKvHeads * row);
    std::memcpy(memory + 200'000, tokens.V(0), kKvHeads * row);
    EXPECT_EQ(client->Append(append), absl::OkStatus());
    EXPECT_EQ(FieldOf(client->AllocateShared(0).status()), "bytes");
  }
}

TEST_F(ClientServiceTest, ManySequencesChangeInOneCall) {
  using Kind = SequenceUpdate::Kind;
  const auto client = Connect();
  const auto opened =
      client->UpdateSequences(kCache, {{.kind = Kind::kOpen}, {.kind = Kind::kOpen}});
  ASSERT_TRUE(opened.ok()) << opened.status();
  const uint64_t parent = opened->front();
  EXPECT_NE(parent, opened->back());
  const Tokens tokens(40, 3);
  ASSERT_NO_FATAL_FAILURE(AppendThirty(*client, parent, tokens));
  const auto changed = client->UpdateSequences(
      kCache, {{.kind = Kind::kFork, .parent_id = parent},
               {.kind = Kind::kFork, .parent_id = parent, .length = 20},
               {.kind = Kind::kTruncate, .sequence_id = parent, .length = 10},
               {.kind = Kind::kClose, .sequence_id = opened->back()}});
  ASSERT_TRUE(changed.ok()) << changed.status();
  const std::vector<int64_t> lengths = {30, 20, 10};
  for (size_t i = 0; i < lengths.size(); ++i) {
    EXPECT_EQ(*client->TruncateSequence(kCache, (*changed)[i], 99), lengths[i]);
  }
  const absl::Status refused =
      client
          ->UpdateSequences(kCache, {{.kind = Kind::kTruncate, .sequence_id = parent, .length = 1},
                                     {.kind = Kind::kClose, .sequence_id = opened->back()}})
          .status();
  EXPECT_TRUE(absl::IsNotFound(refused)) << refused;
  EXPECT_EQ(FieldOf(refused), "updates[1].close");
  EXPECT_EQ(*client->TruncateSequence(kCache, parent, 99), 10) << "all of them or none";
  EXPECT_EQ(FieldOf(client->UpdateSequences(kCache, {}).status()), "updates");
}

TEST_F(ClientServiceTest, SequencesForkRollBackAndClose) {
  const auto client = Connect(1 << 20);
  const Tokens tokens(40, 3);
  Results results(tokens), forked(tokens);
  const auto parent = client->OpenSequence(kCache);
  ASSERT_TRUE(parent.ok());
  ASSERT_NO_FATAL_FAILURE(AppendThirty(*client, *parent, tokens));
  const auto child = client->ForkSequence(kCache, *parent, 20);
  ASSERT_TRUE(child.ok()) << child.status();
  ASSERT_EQ(client->Attend(CallOf(tokens, results, *parent, 30, 10)), absl::OkStatus());
  ASSERT_EQ(client->Attend(CallOf(tokens, forked, *child, 20, 20)), absl::OkStatus());
  const ReferenceResult expected = tokens.Reference();
  for (int t = 30; t < 40; ++t) {
    for (int h = 0; h < kQHeads; ++h) {
      EXPECT_NEAR(results.Lse(t)[h], expected.lse[t * kQHeads + h], 1e-4);
      EXPECT_NEAR(forked.Lse(t)[h], expected.lse[t * kQHeads + h], 1e-4);
    }
  }

  v1::GetTopologyRequest request;
  request.set_cache_id(kCache);
  request.set_with_sequences(true);
  const auto topology = client->GetTopology(request);
  ASSERT_TRUE(topology.ok());
  ASSERT_EQ(topology->caches_size(), 1);
  EXPECT_EQ(topology->caches(0).sequences(), 2);
  EXPECT_GT(topology->caches(0).pages_used(), 0);

  EXPECT_TRUE(client->TruncateSequence(kCache, *parent, 5).ok());
  EXPECT_EQ(client->CloseSequence(kCache, *parent), absl::OkStatus());
  const absl::Status again = client->CloseSequence(kCache, *parent);
  EXPECT_TRUE(absl::IsNotFound(again)) << again;
  EXPECT_EQ(FieldOf(again), "sequence_id");
  EXPECT_EQ(client->CloseSequence(kCache, *child), absl::OkStatus());
  EXPECT_EQ(client->DeleteCache(kCache), absl::OkStatus());
  EXPECT_TRUE(absl::IsNotFound(client->OpenSequence(kCache).status()));
}

TEST_F(ClientServiceTest, RefusalsNameTheFieldWhicheverWayTensorsTravel) {
  for (const size_t shared_memory_bytes : {size_t{0}, size_t{1} << 20}) {
    const auto client = Connect(shared_memory_bytes);
    const Tokens tokens(4, 4);
    Results results(tokens);
    const auto sequence = client->OpenSequence(kCache);
    ASSERT_TRUE(sequence.ok());

    absl::Status status = client->Attend(CallOf(tokens, results, *sequence, 2, 1));
    EXPECT_TRUE(absl::IsOutOfRange(status)) << status;
    EXPECT_EQ(FieldOf(status), "entries[0].first_position");

    status = client->Attend(CallOf(tokens, results, *sequence + 1, 0, 1));
    EXPECT_TRUE(absl::IsNotFound(status)) << status;
    EXPECT_EQ(FieldOf(status), "entries[0].sequence_id");

    AttendCall wrong = CallOf(tokens, results, *sequence, 0, 1);
    wrong.layer = 2;
    status = client->Attend(wrong);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_EQ(FieldOf(status), "layer");

    EXPECT_EQ(client->Attend(CallOf(tokens, results, *sequence, 0, 4)), absl::OkStatus())
        << "the refusals changed nothing";
  }
}

}  // namespace
}  // namespace tributary::client
