// How the layers of one session come from the host and how their results go back to it.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "service/data/session_terms.h"
#include "worker/cache_spec.h"
#include "worker/command.h"

namespace tributary::service {

// One layer of a step, or a piece of one.
struct LayerCall {
  uint64_t step_id = 0;
  int32_t layer = 0;   // its number in the cache
  int32_t piece = 0;   // the piece's number in the layer
  uint32_t count = 0;  // the session's number of the piece
  worker::LayerGeometry geometry;
  int32_t query_rows = 0;
  int32_t new_tokens = 0;
};

// What the host handed over, and where it wants the results.
struct LayerTensors {
  worker::TensorView q;
  worker::TensorView k;
  worker::TensorView v;
  worker::OutputPlace output;         // nowhere in an append-only step
  worker::OutputPlace lse;            // nowhere where none is wanted
  std::shared_ptr<const void> owner;  // keeps all of them
};

// What Take returns when `until` came first.
absl::Status NotHandedOver(const LayerCall& call, const SessionTerms& terms);

// Take and Deliver are called by the thread that carries out the steps, End from any thread.
class LayerChannel {
 public:
  virtual ~LayerChannel() = default;

  // Waits until the host has handed over the layer. DEADLINE_EXCEEDED when `until` came first, or
  // the status that End was given.
  virtual absl::StatusOr<LayerTensors> Take(const LayerCall& call,
                                            std::chrono::steady_clock::time_point until) = 0;
  // Tells the host that the layer taken last is done. `result` has its output and then its LSEs if
  // they came in the workers' reply, and is empty if the workers have put them into their places.
  virtual void Deliver(const LayerCall& call, std::span<const std::byte> result) = 0;
  // Ends every wait of both sides. Only the first call counts.
  virtual void End(const absl::Status& why) = 0;
};

}  // namespace tributary::service
