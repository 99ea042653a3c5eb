// Requests that share a step, as one command, and the command's result as their replies.
#pragma once

#include <cstdint>
#include <memory>
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
// command's tensors point to: request messages and regions, or the buffer.
struct BuiltStep {
  worker::StepCommand command;
  std::shared_ptr<const void> owner;
};
BuiltStep BuildStep(const std::vector<ReservedRequest>& requests, bool copy_shared);

// Whether rank 0's reply holds the result of a step of `query_rows` rows in a layer of this
// geometry, no more and no less. INTERNAL (WRONG_RESULT) with both sizes otherwise: what a worker
// sends is not read, nor given to a host, before this said OK.
absl::Status CheckResult(const worker::LayerGeometry& geometry, int64_t query_rows,
                         const worker::Reply& merged);

// Writes rows [first_row, ...) of a step's result as the reply to one request. `o` and `lse` are
// the step's, as in worker::Reply; they passed CheckResult, or are empty when no result is wanted
// on the host.
void WriteReply(const StepRequest& request, const worker::CacheSpec& spec, int64_t first_row,
                const std::vector<float>& o, const std::vector<float>& lse, v1::AttendReply* reply);

}  // namespace tributary::service
