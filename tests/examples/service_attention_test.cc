// Attention by the service against local attention over a cache rounded alike, layer inputs given.
#include "examples/tinylm/service_attention.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "examples/tinylm/generate.h"
#include "examples/tinylm/local_attention.h"
#include "examples/tinylm/session_attention.h"
#include "tests/examples/fixtures.h"

namespace tributary::tinylm {
namespace {

// Sums of floats in another order, and values of size about 1.
constexpr float kTolerance = 2e-5f;

// Rows a call: single steps, chunks read back from the cache, and prefills (more than 64 rows) on
// an empty and on a filled cache.
constexpr int64_t kCalls[] = {1, 1, 2, 13, 64, 1, 65, 3, 130, 1, 1};

struct Case {
  int workers = 0;
  DType kv_dtype = DType::kBf16;
};

class ServiceAttentionTest : public testing::TestWithParam<Case> {};

TEST_P(ServiceAttentionTest, AttendsAsLocalAttentionDoes) {
  const ModelConfig& config = ShippedModel().config();
  const Service service = StartService(GetParam().workers);
  const RemoteAttention remote = OpenAttention(service, {.kv_dtype = GetParam().kv_dtype});
  EXPECT_EQ(remote.cache->ranks(), GetParam().workers);
  LocalAttention local(config, {.kv_dtype = GetParam().kv_dtype});

  std::srand(1);  // Eigen's Random draws from it
  for (const bool again : {false, true}) {
    int64_t position = 0;
    for (const int64_t rows : kCalls) {
      const Matrix q = 4 * Matrix::Random(rows, config.q_heads * config.head_dim);
      for (const int32_t layer : {0, config.layers - 1}) {
        const Matrix k = Matrix::Random(rows, config.kv_heads * config.head_dim);
        const Matrix v = Matrix::Random(rows, config.kv_heads * config.head_dim);
        Matrix expected(rows, q.cols());
        Matrix actual(rows, q.cols());
        ASSERT_TRUE(local.Attend(layer, position, q, k, v, expected).ok());
        const absl::Status status = remote.attention->Attend(layer, position, q, k, v, actual);
        ASSERT_TRUE(status.ok()) << status;
        EXPECT_LT((actual - expected).cwiseAbs().maxCoeff(), kTolerance)
            << rows << " rows at " << position << ", layer " << layer << (again ? ", again" : "");
      }
      position += rows;
    }
    // The second time over the pages of the first.
    ASSERT_TRUE(local.Reset().ok());
    const absl::Status reset = remote.attention->Reset();
    ASSERT_TRUE(reset.ok()) << reset;
  }
}

INSTANTIATE_TEST_SUITE_P(Groups, ServiceAttentionTest,
                         testing::Values(Case{1, DType::kBf16}, Case{1, DType::kFp8E4M3},
                                         Case{3, DType::kF16}, Case{4, DType::kBf16},
                                         Case{4, DType::kF16}, Case{4, DType::kFp8E4M3},
                                         Case{4, DType::kFp8E5M2}),
                         [](const testing::TestParamInfo<Case>& param) {
                           return "Dcp" + std::to_string(param.param.workers) + "_" +
                                  Name(param.param.kv_dtype);
                         });

// Calls and sessions are two ways to the same numbers, over shared memory and over messages, with
// tokens that are taken back.
TEST(SessionAttention, GivesWhatCallsGive) {
  const Service service = StartService(3);
  const RemoteAttention calls = OpenAttention(service, {});
  const RemoteAttention cache = OpenAttention(service, {});
  const absl::StatusOr<std::unique_ptr<SessionAttention>> session =
      SessionAttention::Open(cache.cache.get(), {.target = service.embedded->target()});
  ASSERT_TRUE(session.ok()) << session.status();
  const Sampler greedy;
  for (const char* prompt : {"And it came to pass", "In the beginning"}) {
    const auto expected = Generate(ShippedModel(), prompt, 40, greedy, *calls.attention);
    const auto actual = Generate(ShippedModel(), prompt, 40, greedy, **session);
    ASSERT_TRUE(expected.ok()) << expected.status();
    ASSERT_TRUE(actual.ok()) << actual.status();
    EXPECT_EQ(*actual, *expected);
    ASSERT_TRUE(calls.attention->Truncate(7).ok());
    ASSERT_TRUE((*session)->Truncate(7).ok());
    const ModelConfig& config = ShippedModel().config();
    const Matrix q = Matrix::Random(2, config.q_heads * config.head_dim);
    const Matrix kv = Matrix::Random(2, config.kv_heads * config.head_dim);
    for (int32_t layer = 0; layer < config.layers; ++layer) {
      Matrix one(2, q.cols());
      Matrix other(2, q.cols());
      ASSERT_TRUE(calls.attention->Attend(layer, 7, q, kv, kv, one).ok());
      ASSERT_TRUE((*session)->Attend(layer, 7, q, kv, kv, other).ok());
      EXPECT_EQ(one, other);
    }
    ASSERT_TRUE(calls.attention->Reset().ok());
    ASSERT_TRUE((*session)->Reset().ok());
  }
}

TEST(ServiceAttention, PassesTheServicesRefusalOn) {
  const Service service = StartService(2);
  const RemoteAttention remote = OpenAttention(service, {.capacity_tokens = 64});
  const ModelConfig& config = ShippedModel().config();
  const Matrix q = Matrix::Zero(1, config.q_heads * config.head_dim);
  const Matrix kv = Matrix::Zero(1, config.kv_heads * config.head_dim);
  Matrix out(1, q.cols());
  EXPECT_EQ(remote.attention->Attend(0, 5, q, kv, kv, out).code(), absl::StatusCode::kOutOfRange);
  const Matrix many_q = Matrix::Zero(65, q.cols());
  const Matrix many_kv = Matrix::Zero(65, kv.cols());
  Matrix many_out(65, q.cols());
  EXPECT_EQ(remote.attention->Attend(0, 0, many_q, many_kv, many_kv, many_out).code(),
            absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace tributary::tinylm
