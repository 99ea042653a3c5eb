// What the processes of a host do whose heads are split over endpoints: all of them make the same
// steps, each with its own heads of the same tensors, which every process draws for itself.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "service/client/host_session.h"
#include "tributary/v1/types.pb.h"

namespace tributary::service::testing {

inline constexpr int32_t kWorkQHeads = 4, kWorkKvHeads = 2, kWorkDim = 64, kWorkLayers = 2;
// Rows of the steps, which follow each other in one sequence. Slots have room for 16.
inline constexpr int32_t kWorkSteps[] = {40, 1, 1, 7, 33};
inline constexpr int32_t kWorkSlotRows = 16;

// The cache that the steps are of.
v1::CacheSpec WorkSpec();

// Tensors of a step at `position`, in one layer; all heads.
struct WorkTensors {
  WorkTensors(int64_t position, int32_t layer, int32_t rows);
  std::vector<float> q, k, v;
};

// Told of a layer's output: [rows, q_heads of the endpoint, dim].
using OnOutput = std::function<void(int32_t layer, const std::vector<float>& output)>;

// An endpoint's part of a step. An error is why the session is over.
absl::Status DriveEndpoint(client::HostSession& session, uint64_t sequence, int64_t position,
                           int32_t rows, const OnOutput& done);

std::string ToHex(const std::string& bytes);
std::string FromHex(const std::string& digits);

}  // namespace tributary::service::testing
