// A session for hosts that compute on CPUs: the host submits a whole model step, and then hands
// over one layer after another and gets its results. docs/sessions.md shows how.
//
// clang-format off
//   auto session = HostSession::Open({.target = "unix:/run/tributary.sock"},
//                                    {.cache_id = "my-model", .max_rows = 32, ...});
//   auto step = (*session)->Submit({.first_layer = 0, .layers = 32, .entries = {...}});
//   for (int layer = 0; layer < 32; ++layer) {
//     ... q, k, v ...
//     absl::Status done = (*session)->Attend({.q = q, .k = k, .v = v, .output = output});
//   }
//   absl::Status kept = (*session)->Await(*step);
// clang-format on
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "service/client/client.h"
#include "service/client/session.h"
#include "tributary/v1/session.pb.h"

namespace tributary::client {

struct HostSessionOptions {
  std::string cache_id;
  int32_t max_rows = 1;             // query rows of a step
  int32_t max_new_tokens = 1;       // new tokens of a step
  v1::DType dtype = v1::DTYPE_F32;  // of q, k and v: F32, BF16 or F16
  // F32, BF16, F16, or FP8_E4M3 with each layer's o_scale; by default `dtype`.
  v1::DType output_dtype = v1::DTYPE_UNSPECIFIED;
  bool return_lse = false;
  int32_t max_steps = 2;  // submitted and not over, at a time
  // How long the service waits for a layer before the session is given up. The host waits for the
  // service a tenth longer, 100 ms at least.
  std::chrono::milliseconds wait_timeout{10'000};
  // HOST: through shared memory. MESSAGES: over the connection, from any machine. Unspecified: HOST
  // over a Unix socket where the service offers it, and MESSAGES otherwise.
  v1::SessionMemory memory = v1::SESSION_MEMORY_UNSPECIFIED;
  // HOST: how long a wait keeps its eyes open before it sleeps.
  std::chrono::nanoseconds spin{std::chrono::microseconds(50)};
  // HOST: processes that the model's heads are split over, and whether each of them has all KV
  // heads (session.proto, JoinSession).
  int32_t endpoints = 1;
  bool kv_replicated = false;
};

// Used from one thread at a time. Every wait ends by its bound, also when the service dies.
class HostSession {
 public:
  // FAILED_PRECONDITION, open.memory: the service has no such memory for this host.
  static absl::StatusOr<std::unique_ptr<HostSession>> Open(const ConnectOptions& connect,
                                                           const HostSessionOptions& options);
  // Joins a session with several endpoints. Its q, k, v and output are the heads of
  // opened().shapes(), and every function is called as endpoint 0 calls it, with the same steps.
  // INVALID_ARGUMENT, join.session_id: the session's memory is not HOST.
  static absl::StatusOr<std::unique_ptr<HostSession>> Join(const ConnectOptions& connect,
                                                           const EndpointOptions& options);
  // Ends the session at once, if it has not ended, for all its endpoints.
  virtual ~HostSession() = default;

  // Returns when the service has accepted the step, or refused it: then nothing has changed, and
  // none of its layers may be handed over. May be called while earlier steps run. The step's
  // number, for Await. (An endpoint that joined waits for what becomes of the step of endpoint 0.)
  virtual absl::StatusOr<uint64_t> Submit(const SessionStep& step) = 0;
  // Hands over the next layer, in the order of steps and layers, and waits for its results. What it
  // is given is the caller's again when it returns. INVALID_ARGUMENT names what does not fit the
  // step; the layer has then not been handed over. Any other error is why the session is over.
  virtual absl::Status Attend(const SessionLayer& layer) = 0;
  // The same for a layer of an append-only step, without waiting for what becomes of it.
  virtual absl::Status Append(const HeadRows& k, const HeadRows& v) = 0;

  // What became of a step; waits until it is over.
  virtual absl::Status Await(uint64_t step) = 0;
  // Ends the session when its steps are over. The status with which it ended.
  virtual absl::Status Close() = 0;
  // Why the session is over; OK while it is not.
  virtual absl::Status status() const = 0;
  virtual const v1::SessionOpened& opened() const = 0;
};

}  // namespace tributary::client
