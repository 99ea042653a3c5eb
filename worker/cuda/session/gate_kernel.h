// A gate (base/mailbox/gate.h) as a launch of its own, where the layer does not begin with a launch
// that passes the gate itself.
#pragma once

#include <cuda_runtime.h>

#include "absl/status/status.h"
#include "base/mailbox/gate.h"

namespace tributary::worker {

// One warp. It begins early (griddepcontrol). The launch behind it may begin early, too, but does
// so only when the layer has arrived: it could fill the GPU, and the host must be able to compute.
absl::Status LaunchGate(const mailbox::Gate& gate, bool begins_early, cudaStream_t stream);

// Loads the kernel, so that no launch has to.
absl::Status LoadGate();

}  // namespace tributary::worker
