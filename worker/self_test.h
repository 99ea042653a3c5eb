// What a device must get right before its worker says that it is ready: two tokens appended and
// attended over, against the known answer. Shows kernels that were not built for the device, a
// driver that does not fit, and memory that does not hold what was written.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "worker/backend.h"
#include "worker/command.h"

namespace tributary::worker {

// Runs it on a rank and a group of its own. The error says what failed; kInternal: a wrong answer.
absl::Status SelfTest(std::unique_ptr<Backend> backend);

// Whether that is the right reply to the test's step.
absl::Status CheckSelfTestReply(const Reply& reply);

}  // namespace tributary::worker
