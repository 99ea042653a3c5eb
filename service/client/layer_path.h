// How the layers of a host's session go to the service and come back.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "service/client/mailbox_memory.h"
#include "service/client/session.h"
#include "service/client/session_messages.h"
#include "service/client/session_stream.h"
#include "tributary/v1/session.pb.h"

namespace tributary::client {

// Which layer of a session goes to the service, or which piece of one.
struct LayerPlace {
  uint64_t step_id = 0;
  int32_t layer = 0;   // its number in the cache
  int32_t piece = 0;   // the piece's number in the layer
  uint32_t count = 0;  // the session's number of the piece
};

// Callers have checked the layers: they have the session's dtypes and the shape of the layer.
class LayerPath {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  virtual ~LayerPath() = default;
  // Copies q, k and v to where the service takes them. CANCELLED: the session is over, and its
  // stream says why.
  virtual absl::Status HandOver(const LayerPlace& place, const SessionLayer& layer,
                                Deadline until) = 0;
  // Waits for the results of a layer that was handed over, and copies them. The caller takes
  // results back in order, and before it fills the layer's slot anew.
  virtual absl::Status TakeBack(const LayerPlace& place, const SessionLayer& layer,
                                Deadline until) = 0;
  // Ends every wait. May be called on any thread.
  virtual void End(const absl::Status& why) = 0;
};

std::unique_ptr<LayerPath> CreateMailboxPath(std::unique_ptr<MailboxMemory> memory,
                                             ElementBytes bytes, std::chrono::nanoseconds spin);
// The stream outlives it.
std::unique_ptr<LayerPath> CreateMessagePath(SessionStream* stream, ElementBytes bytes);

}  // namespace tributary::client
