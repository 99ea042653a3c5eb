// What stands between two layers of a step on the service's GPU: the layer before is called
// finished, and the layer behind begins when it has arrived.
#pragma once

#include <cstdint>

namespace tributary::mailbox {

// What the service keeps on its GPU for a session besides the mailbox. Launches read and advance
// it, so that a captured graph of a step may be launched for ever.
struct alignas(8) SessionCounter {
  uint32_t first_count = 0;  // the session's number of the step's first layer
  uint32_t failure = 0;      // Awaited of the first wait that was in vain; 0: none
};

// What the host sees without asking the GPU; in pinned memory. Read `failure` after `ended`.
struct SessionProgress {
  uint32_t ended = 0;      // layers that the steps which have ended had together, served or not
  uint32_t failure = 0;    // SessionCounter::failure
  uint32_t failed_at = 0;  // the layer that the wait in vain was for; written before `failure`
};

// The gate ahead of layer `layer` of a step of `layers`. There is one more, behind the last layer,
// where nothing is awaited: it advances the counter and tells the progress.
struct Gate {
  uint32_t* arrived = nullptr;  // null: there is no gate
  uint32_t* finished = nullptr;
  uint32_t* status = nullptr;
  SessionCounter* counter = nullptr;
  SessionProgress* progress = nullptr;  // as the GPU addresses it
  uint64_t bound = 0;                   // of the wait, ns
  int32_t layer = 0;
  int32_t layers = 0;
  bool one_gpu = false;  // the host rings from the GPU that the mailbox lies on
};

}  // namespace tributary::mailbox
