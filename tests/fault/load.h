// A host of one sequence that checks every reply against float64 attention.
//
// A call whose outcome is unknown (ABORTED, UNAVAILABLE) is repeated as it was: same positions,
// same bytes. So what the service says afterwards is checked against the same truth.
#pragma once

#include <grpcpp/client_context.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "tests/support/compare.h"
#include "tests/worker/dense_model.h"
#include "tributary/v1/attention.grpc.pb.h"
#include "worker/cache_spec.h"

namespace tributary::test {

inline constexpr char kCacheId[] = "model";

// One layer, heads enough to go round, interleave = page: the first 16 tokens lie on rank 0, the
// next 16 on rank 1, and so on. bf16, so that a cached token is the token as given.
v1::CacheSpec PublicSpec();
worker::CacheSpec ModelSpec();

std::shared_ptr<v1::AttentionService::Stub> ConnectTo(const std::string& address);

// The field an error names, "" for none.
std::string FieldOf(const grpc::Status& status);

class SequenceHost {
 public:
  // `tolerance`: of what the workers compute on.
  SequenceHost(std::shared_ptr<v1::AttentionService::Stub> stub, uint64_t sequence_id,
               const Tolerance& tolerance = kAttentionTolerance);

  grpc::Status Open();
  grpc::Status Truncate(int64_t length);
  grpc::Status Fork(SequenceHost* child, int64_t length);
  grpc::Status Close();
  // Appends `tokens` and attends over them. When the last Step did not end in OK, repeats that one
  // instead. Every reply that is OK is checked; a wrong one fails the test.
  grpc::Status Step(int tokens);
  // Attends from the last `rows` positions held, appending nothing.
  grpc::Status Look(int rows);

  // Of a status DATA_LOSS: brings what it says is missing. Adds to `brought` how many tokens that
  // are.
  grpc::Status BringBack(const grpc::Status& lost, int64_t* brought);

  // How long the service took for the last Step or Look, without what the host does itself.
  std::chrono::duration<double> last_call() const { return last_call_; }

  // Tokens known to be held: those of steps that ended in OK.
  int64_t length() const { return length_; }
  uint64_t id() const { return id_; }
  // Forgets everything: after the service said that it did.
  void Forget();

 private:
  struct Rows {
    int64_t first = 0;
    int32_t count = 0;
    std::vector<float> q, k, v;  // k and v empty: nothing is appended
  };

  grpc::Status Attend(const Rows& rows);
  void Check(const Rows& rows, const v1::AttendReply& reply) const;
  std::vector<float> RandomValues(size_t count);

  const std::shared_ptr<v1::AttentionService::Stub> stub_;
  const uint64_t id_;
  const Tolerance tolerance_;
  const worker::CacheSpec spec_ = ModelSpec();
  std::mt19937_64 random_;
  int64_t length_ = 0;
  worker::testing::DenseLayer dense_;  // with the tokens of `unsettled_`
  std::optional<Rows> unsettled_;
  std::chrono::duration<double> last_call_{};
};

}  // namespace tributary::test
