// Attention by the service over a session: a step is submitted once, and its layers go through
// shared memory, or in messages to a service on another machine.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "examples/tinylm/attention.h"
#include "examples/tinylm/service_attention.h"
#include "service/client/host_session.h"

namespace tributary::tinylm {

// One sequence of a cache. Tensors travel as f32. The layers of a model are called from first to
// last, each time; what is forgotten is told with the next step, and costs no call.
class SessionAttention final : public Attention {
 public:
  // `cache` outlives the result, and is of the service at `connect`.
  static absl::StatusOr<std::unique_ptr<SessionAttention>> Open(
      const ServiceCache* cache, const client::ConnectOptions& connect);
  ~SessionAttention() override;

  absl::Status Attend(int32_t layer, int64_t first_position, const Matrix& q, const Matrix& k,
                      const Matrix& v, Matrix& out) override;
  absl::Status Truncate(int64_t length) override;

 private:
  SessionAttention(const ServiceCache* cache, uint64_t sequence,
                   std::unique_ptr<client::HostSession> session);
  absl::Status Submit(int64_t first_position, int32_t rows);

  const ServiceCache* const cache_;
  const uint64_t sequence_;
  std::unique_ptr<client::HostSession> session_;
  std::optional<int64_t> truncate_to_;  // before the next step
};

}  // namespace tributary::tinylm
