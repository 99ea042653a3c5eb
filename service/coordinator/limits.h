// What the service can do, as GetLimits tells it.
#pragma once

#include "service/coordinator/coordinator_options.h"
#include "service/workers/worker_group.h"
#include "tributary/v1/attention.pb.h"

namespace tributary::service {

// All but what the front decides: messages, calls and streams in flight, shared memory.
v1::GetLimitsReply LimitsOf(const CoordinatorOptions& options, const WorkerGroup& group);

}  // namespace tributary::service
