// A host with a random model: makes steps, and knows in float64 what each must give.
#pragma once

#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/dtype.h"
#include "tests/support/compare.h"
#include "tests/worker/dense_model.h"
#include "tributary/v1/attention.grpc.pb.h"
#include "worker/cache_spec.h"

namespace tributary::service::testing {

class ModelHost {
 public:
  // Sequences of `cache`, which exists with `spec`; `dtype` is of q, k, v and output.
  ModelHost(v1::AttentionService::Stub* stub, std::string cache, const v1::CacheSpec& spec,
            DType dtype, uint64_t seed);

  // All below: EXPECTs that the service answers OK and right.
  void Open(uint64_t sequence);
  void Fork(uint64_t parent, uint64_t child, int64_t length);
  void Truncate(uint64_t sequence, int64_t length);
  void Close(uint64_t sequence);
  // Each (sequence, tokens) gets new tokens at its end, with queries.
  void Step(int32_t layer, const std::vector<std::pair<uint64_t, int32_t>>& entries);
  // New tokens without queries.
  void Append(int32_t layer, uint64_t sequence, int32_t tokens);
  // Query rows over what is held, the last row at the last token.
  void LookBack(int32_t layer, uint64_t sequence, int32_t rows);
  // A draft's block of rows for each (sequence, rows), behind what it holds (or behind its first
  // `context` tokens). Nothing is kept.
  void Draft(int32_t layer, const std::vector<std::pair<uint64_t, int32_t>>& entries,
             int64_t context = -1);
  // Sends the last Step or Draft again: the reply must be the same, bit for bit.
  void RepeatLastStep();

  int64_t length(uint64_t sequence, int32_t layer) const;
  std::mt19937_64& random() { return random_; }

  // For callers that send the requests themselves: one that appends and attends, and the check of
  // its reply. Calls must be made and checked in the order of each sequence's positions.
  v1::AttendRequest MakeStep(int32_t layer,
                             const std::vector<std::pair<uint64_t, int32_t>>& entries);
  v1::AttendRequest MakeDraft(int32_t layer,
                              const std::vector<std::pair<uint64_t, int32_t>>& entries,
                              int64_t context = -1);
  void Check(const v1::AttendRequest& request, const v1::AttendReply& reply);
  // The same for outputs that are to be as close as this.
  void Check(const v1::AttendRequest& request, const v1::AttendReply& reply,
             const test::Tolerance& output);

 private:
  worker::testing::DenseLayer& Layer(uint64_t sequence, int32_t layer);
  worker::LayerGeometry Geometry(int32_t layer) const {
    return GeometryOf(spec_, spec_.layers[layer]);
  }
  v1::AttendRequest NewRequest(int32_t layer, v1::AttendMode mode) const;
  // Puts K/V of `rows` tokens into the request and random queries beside them.
  void Fill(int64_t rows, const std::vector<float>& k, const std::vector<float>& v,
            v1::AttendRequest* request);
  // What a draft's rows are held against: their context, and the block behind it, whose K/V follow
  // those of `token` others.
  worker::testing::DenseLayer WithBlock(const v1::AttendRequest& request, int entry, int64_t token);
  // Values that survive a round trip through the host's dtype.
  std::vector<float> Values(size_t count);
  void Send(const v1::AttendRequest& request);

  v1::AttentionService::Stub* const stub_;
  const std::string cache_;
  const worker::CacheSpec spec_;
  const DType dtype_;
  std::mt19937_64 random_;
  std::map<std::pair<uint64_t, int32_t>, worker::testing::DenseLayer> layers_;
  v1::AttendRequest last_request_;
  v1::AttendReply last_reply_;
};

}  // namespace tributary::service::testing
