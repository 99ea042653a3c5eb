// A session for hosts that compute with CUDA: the host submits a whole model step, and its GPU
// drives the layers. docs/sessions.md shows how.
//
// clang-format off
//   auto session = DeviceSession::Open({.target = "unix:/run/tributary.sock"},
//                                      {.cache_id = "my-model", .max_rows = 32, ...});
//   (*session)->Submit({.first_layer = 0, .layers = 32, .entries = {...}});
//   for (int layer = 0; layer < 32; ++layer) {
//     ... q, k, v on `stream` ...
//     (*session)->Attend(stream, {.q = q, .k = k, .v = v, .output = output});
//   }
// clang-format on
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "service/client/client.h"
#include "service/client/layer_times.h"
#include "service/client/session.h"
#include "tributary/v1/session.pb.h"

namespace tributary::client {

// Used from one thread at a time. Its launches are made on the device that was current when it was
// opened.
class DeviceSession {
 public:
  // FAILED_PRECONDITION, open.memory: the service has no mailbox on a GPU for this host.
  static absl::StatusOr<std::unique_ptr<DeviceSession>> Open(const ConnectOptions& connect,
                                                             const DeviceSessionOptions& options);
  // Joins a session with several endpoints. Its q, k, v and output are the heads of
  // opened().shapes(), and every function is called as endpoint 0 calls it, with the same steps.
  // INVALID_ARGUMENT, join.session_id: the session's memory is not DEVICE.
  static absl::StatusOr<std::unique_ptr<DeviceSession>> Join(const ConnectOptions& connect,
                                                             const EndpointOptions& endpoint);
  // Ends the session, and waits for what it has launched.
  virtual ~DeviceSession() = default;

  // Returns when the service has accepted the step, or refused it: then nothing has changed, and
  // none of its layers may be launched. May be called while earlier steps run. The step's number,
  // for Await.
  virtual absl::StatusOr<uint64_t> Submit(const SessionStep& step) = 0;
  // Puts two small launches into `stream`: one hands the layer over, one waits and takes the
  // results back. They may be captured in a CUDA graph, which may be launched again for every later
  // step of the same shape. Layers are launched in the order of steps and layers.
  //
  // A layer of a step that is larger than a slot takes launches for each of its pieces: one piece
  // is filled while the one before it is computed. These launches are of the one step, which has
  // been submitted before, and are not captured.
  //
  // When the session ends before its time, results are NaN, and status() says why.
  virtual absl::Status Attend(cudaStream_t stream, const SessionLayer& layer) = 0;
  // The same for a layer of an append-only step: one launch, which waits for no result. An endpoint
  // without KV heads of its own leaves `data` out and states `rows` all the same.
  virtual absl::Status Append(cudaStream_t stream, const HeadRows& k, const HeadRows& v) = 0;

  // What became of a step; waits until it is over.
  virtual absl::Status Await(uint64_t step) = 0;
  // OK while the session works: as far as the stream and the GPU have said.
  virtual absl::Status status() const = 0;
  // Of a timed session: the layers, or pieces of layers, that were taken back since the last call,
  // the oldest first, and of these the last 4096. What was launched has ended when it is told.
  virtual std::vector<LayerTimes> TakeTimes() = 0;
  virtual const v1::SessionOpened& opened() const = 0;
};

}  // namespace tributary::client
