// Launches that stand between a session's layers: a gate (base/mailbox/gate.h), for layers whose
// own first launch does not pass it, and what goes ahead of the gate where the stream waits. There
// are also the launches that answer the round trips that a host times.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "base/mailbox/gate.h"
#include "base/mailbox/layout.h"

namespace tributary::worker {

// One warp. It begins early (griddepcontrol). The launch behind it may begin early, too, but does
// so only when the layer has arrived: it could fill the GPU, and the host must be able to compute.
absl::Status LaunchGate(const mailbox::SharedGate& gate, bool begins_early, cudaStream_t stream);

// A layer's tensors on their way from the mailbox, which lies on another GPU, to this one. Offsets
// are the same there and here; here there is one slot.
struct FetchArgs {
  mailbox::SharedGate gate;
  mailbox::Layout layout;
  const std::byte* mailbox = nullptr;
  std::byte* to = nullptr;
  size_t bytes[3] = {};  // of q, k and v; multiples of 16
};
// Passes the gate and brings the layer's tensors here, where all launches of the layer read them:
// blocks of an attention launch that read the same lines of another GPU's memory wait for each
// other (about 30 us with one for each multiprocessor). What comes behind it in the stream, and
// may begin early, finds them here.
absl::Status LaunchFetch(const FetchArgs& args, bool begins_early, cudaStream_t stream);

// Calls the layer ahead of the gate finished, where the stream waits (Gate::handed_over).
absl::Status LaunchFinish(const mailbox::SharedGate& gate, bool begins_early, cudaStream_t stream);

// Stamps a timed layer: what the stream has been given of it is over (SlotStamps::attended).
absl::Status LaunchStamp(const mailbox::SharedGate& gate, cudaStream_t stream);

// The words of a SessionProbe in the mailbox.
struct ProbeWords {
  const uint32_t* asked = nullptr;
  uint32_t* answered = nullptr;
  const uint32_t* status = nullptr;
  uint64_t bound = 0;  // how long one wait may take, ns
};
// Answers a round for which the stream has waited.
absl::Status LaunchAnswer(const ProbeWords& words, uint32_t round, cudaStream_t stream);
// Waits for the rounds `first` to `last` and answers them. Gives up when one does not come in time.
absl::Status LaunchAnswers(const ProbeWords& words, uint32_t first, uint32_t last,
                           cudaStream_t stream);

// Loads the kernels, so that no launch has to do it.
absl::Status LoadGate();

}  // namespace tributary::worker
