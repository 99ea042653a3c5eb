// How the layers of a host's session go to the service and come back.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "service/client/mailbox_memory.h"
#include "service/client/session.h"
#include "service/client/session_stream.h"
#include "tributary/v1/session.pb.h"

namespace tributary::client {

// Which layer it is, or which piece of one.
struct LayerPlace {
  uint64_t step_id = 0;
  int32_t layer = 0;   // of the cache
  int32_t piece = 0;   // of the layer
  uint32_t count = 0;  // the session's number of it
};

// Layers have been checked: they are of the session's dtype and of the layer's shape.
class LayerPath {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  virtual ~LayerPath() = default;
  // Copies q, k and v to where the service takes them. CANCELLED: the session is over, and its
  // stream says why.
  virtual absl::Status HandOver(const LayerPlace& place, const SessionLayer& layer,
                                Deadline until) = 0;
  // Waits for the results of a layer that was handed over, and copies them. Results are taken in
  // order, and the slot of a layer is not filled anew before.
  virtual absl::Status TakeBack(const LayerPlace& place, const SessionLayer& layer,
                                Deadline until) = 0;
  // Ends every wait. On any thread.
  virtual void End(const absl::Status& why) = 0;
};

std::unique_ptr<LayerPath> CreateMailboxPath(std::unique_ptr<MailboxMemory> memory,
                                             int32_t element_bytes, std::chrono::nanoseconds spin);
// The stream outlives it.
std::unique_ptr<LayerPath> CreateMessagePath(SessionStream* stream, int32_t element_bytes);

}  // namespace tributary::client
