// Requests that share a step, as one command, and the command's result as their replies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "service/schedule/sequence_table.h"
#include "service/schedule/step_request.h"
#include "worker/cache_spec.h"
#include "worker/command.h"

namespace tributary::service {

// A request and what the sequence table reserved for it.
struct ReservedRequest {
  const StepRequest* request = nullptr;
  const StepReservation* reservation = nullptr;
};

// The step of all requests, which have one BatchKey; its layer is left to the caller. The tensors
// of a single request are not copied, except that those in memory that a host shares are with
// `copy_shared`; those of several are copied into one buffer. The owner keeps alive what the
// command's tensors point to: request messages and regions, or the buffer. The workers write
// results to memory that a host shares themselves. With `copy_shared`, and where results belong
// into the host's message, they come in the workers' reply instead.
struct BuiltStep {
  worker::StepCommand command;
  std::shared_ptr<const void> owner;
};
BuiltStep BuildStep(std::span<const ReservedRequest> requests, bool copy_shared);

// Checks that rank 0's reply holds exactly what it should of a step's outputs in a layer of this
// geometry. INTERNAL (WRONG_RESULT) names both sizes otherwise. What a worker sends is not read,
// nor given to a host, before this has returned OK.
absl::Status CheckResult(const worker::LayerGeometry& geometry,
                         std::span<const worker::StepOutput> outputs, const worker::Reply& merged);

// Writes the reply to a request whose results are `output`. `result` points to the part of them
// that came in the workers' reply, and may be null where nothing did.
void WriteReply(const StepRequest& request, const worker::StepOutput& output,
                const std::byte* result, v1::AttendReply* reply);

}  // namespace tributary::service
