// Sequences that were forked have their common pages read once: results are those of sequences that
// share nothing, bit for bit, and those of the reference.
#include <gtest/gtest.h>

#include <vector>

#include "tests/service/model_host.h"
#include "tests/service/test_service.h"

namespace tributary::service::testing {
namespace {

class CascadeTest : public ::testing::TestWithParam<int> {
 protected:
  // The rows of one call that has each of the sequences, and of calls of each alone.
  void ExpectCompanyChangesNothing(ModelHost& host,
                                   const std::vector<std::pair<uint64_t, int32_t>>& entries) {
    const v1::AttendRequest request = host.MakeStep(0, entries);
    v1::AttendReply together;
    ASSERT_TRUE(Attend(service_.stub(), request, &together).ok());
    host.Check(request, together);
    const size_t row_q = request.q().inline_().size() / request.q().shape(0);
    const size_t row_k = request.k().inline_().size() / request.k().shape(0);
    const size_t row_o = together.output().inline_().size() / together.output().shape(0);
    size_t row = 0;
    for (const v1::AttendEntry& entry : request.entries()) {
      const auto rows = static_cast<size_t>(entry.query_rows());
      v1::AttendRequest alone = request;
      alone.clear_entries();
      *alone.add_entries() = entry;
      const auto cut = [&](v1::Tensor* tensor, size_t row_bytes) {
        tensor->set_shape(0, entry.query_rows());
        tensor->set_inline_(tensor->inline_().substr(row * row_bytes, rows * row_bytes));
      };
      cut(alone.mutable_q(), row_q);
      cut(alone.mutable_k(), row_k);
      cut(alone.mutable_v(), row_k);
      v1::AttendReply reply;
      ASSERT_TRUE(Attend(service_.stub(), alone, &reply).ok());
      EXPECT_EQ(reply.output().inline_(),
                together.output().inline_().substr(row * row_o, rows * row_o))
          << "sequence " << entry.sequence_id();
      row += rows;
    }
  }

  TestService service_{{.workers = GetParam()}};
};
INSTANTIATE_TEST_SUITE_P(Ranks, CascadeTest, ::testing::Values(1, 2));

TEST_P(CascadeTest, ForksAndForksOfForks) {
  v1::CacheSpec spec = SmallSpec();
  spec.set_layers(1);
  spec.set_capacity_tokens(60'000);
  ASSERT_TRUE(CreateCache(service_.stub(), "m", spec).ok());
  ModelHost host(&service_.stub(), "m", spec, DType::kF32, 3);
  const int32_t unit = 1024 * GetParam();  // tokens whose slots are a unit on each rank
  host.Open(1);
  host.Open(9);
  host.Append(0, 1, 2 * unit + 300);
  host.Append(0, 9, 50);
  host.Fork(1, 2, 2 * unit + 100);
  host.Fork(1, 3, 2 * unit + 300);
  host.Fork(1, 4, unit + 5);
  host.Append(0, 3, unit);
  host.Fork(3, 5, 3 * unit + 250);
  ExpectCompanyChangesNothing(host, {{1, 1}, {9, 1}, {2, 1}, {3, 1}, {4, 1}, {5, 1}});
  ExpectCompanyChangesNothing(host, {{5, 4}, {1, 2}, {3, 4}, {4, 1}});
  // Rolled back, written anew, closed: what is shared is less from then on.
  host.Truncate(2, unit / 2);
  host.Append(0, 2, unit);
  host.Close(3);
  ExpectCompanyChangesNothing(host, {{2, 1}, {1, 1}, {5, 1}, {4, 3}});
}

}  // namespace
}  // namespace tributary::service::testing
