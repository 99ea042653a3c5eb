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
  uint32_t passed = 0;   // the gate that was passed last, counted; only where `handed_over` is used
  uint32_t ended = 0;    // layers that the steps which have ended had together, served or not
  uint32_t failure = 0;  // SessionCounter::failure
  uint32_t failed_at = 0;  // the layer that the wait in vain was for; written before `failure`
};

// The gate ahead of layer `layer` of a step of `layers`. There is one more, behind the last layer,
// where nothing is awaited: it advances the counter and tells the progress.
struct Gate {
  uint32_t* arrived = nullptr;   // null: there is no gate
  uint32_t* finished = nullptr;  // on ranks but rank 0: the word that rank 0 awaits
  uint32_t* status = nullptr;
  SessionCounter* counter = nullptr;
  SessionProgress* progress = nullptr;  // as the GPU addresses it
  uint64_t bound = 0;                   // of the wait, ns
  int32_t layer = 0;
  int32_t layers = 0;
  // The host rings from the GPU that the mailbox lies on, and no other GPU reads it.
  bool one_gpu = false;
  // Where both sides wait by stream memory operations (session.proto): the words of the mailbox.
  // The stream then waits for `handed_over` ahead of the gate, and ahead of that FinishKernel has
  // said that the layer before is finished. Null: whoever passes the gate does all of it.
  uint32_t* handed_over = nullptr;
  uint32_t* handed_back = nullptr;
  // Of several ranks. Not 0 when an exchange of this rank has failed: null: there is none.
  const uint32_t* exchange_failure = nullptr;
  // On rank 0, of steps without results, which no exchange holds together: the words that the other
  // ranks set as `finished`, `kPeerWords` apart, the first being rank 1's. Null: nothing is
  // awaited.
  const uint32_t* peers = nullptr;
  int32_t ranks = 1;
};

inline constexpr int kPeerWords = 32;  // two words never share a sector

}  // namespace tributary::mailbox
