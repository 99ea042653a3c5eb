#include "service/cli/load_session.h"

#include <chrono>
#include <cstdint>
#include <utility>

#include "base/status/status_macros.h"
#include "service/client/host_session.h"
#include "worker/rpc/dtype_conversion.h"

namespace tributary::cli {
namespace {

using Clock = std::chrono::steady_clock;

class HostLoadSession final : public LoadSession {
 public:
  HostLoadSession(std::unique_ptr<client::HostSession> session, const client::SessionLayer& layer)
      : session_(std::move(session)), layer_(layer) {}

  absl::Status Run(const client::SessionStep& step,
                   const std::function<void(double)>& layer_done) override {
    TRIBUTARY_RETURN_IF_ERROR(session_->Submit(step).status());
    for (int32_t layer = 0; layer < step.layers; ++layer) {
      const Clock::time_point asked = Clock::now();
      TRIBUTARY_RETURN_IF_ERROR(session_->Attend(layer_));
      layer_done(std::chrono::duration<double>(Clock::now() - asked).count());
    }
    return absl::OkStatus();
  }

 private:
  const std::unique_ptr<client::HostSession> session_;
  const client::SessionLayer layer_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<LoadSession>> OpenLoadSession(const LoadOptions& options,
                                                             const std::string& cache_id,
                                                             const LoadTensors& tensors) {
  if (options.session_memory == v1::SESSION_MEMORY_DEVICE) {
    return OpenDeviceLoadSession(options, cache_id, tensors);
  }
  TRIBUTARY_ASSIGN_OR_RETURN(
      std::unique_ptr<client::HostSession> session,
      client::HostSession::Open(
          {.target = options.target, .security = options.security, .timeout = options.timeout},
          {.cache_id = cache_id,
           .max_rows = options.SlotRows(),
           .max_new_tokens = options.SlotRows(),
           .dtype = ToProto(options.dtype),
           .memory = options.session_memory}));
  const int32_t rows = options.StepRows();
  const int32_t value_dim = options.ValueDim();
  return std::make_unique<HostLoadSession>(
      std::move(session),
      client::SessionLayer{.q = {tensors.q, rows, options.q_heads, options.head_dim},
                           .k = {tensors.kv, rows, options.kv_heads, options.head_dim},
                           .v = {tensors.kv, rows, options.kv_heads, value_dim},
                           .output = {tensors.output, rows, options.q_heads, value_dim}});
}

}  // namespace tributary::cli
