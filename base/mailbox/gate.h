// What stands between two layers of a step on the service's GPU: the layer before is called
// finished, and the layer behind begins when it has arrived.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tributary::mailbox {

// What the service keeps on its GPU for a session besides the mailbox. Launches read and advance
// it, so that a captured graph of a step may be launched for ever.
struct alignas(32) SessionCounter {
  uint32_t first_count = 0;  // the session's number of the step's first layer
  uint32_t failure = 0;      // Awaited: how the first wait in vain ended; 0 while none has
  // How many layers' gates have been passed, or waited at in vain: for launches that begin before
  // that (Gate::begun). In a sector of its own, because many thread blocks look at it.
  alignas(32) uint32_t passed = 0;
};

// Whom a launch asks whether the gate ahead of it has been passed.
struct GatePassage {
  const SessionCounter* counter = nullptr;  // null: it was, before the launch began
  int32_t layer = 0;
};

// What the host sees without asking the GPU; in pinned memory. Read `failure` after `ended`.
struct SessionProgress {
  uint32_t passed = 0;   // gates that were passed; written only where `handed_over` is used
  uint32_t ended = 0;    // layers of all steps that have ended, carried out or not
  uint32_t failure = 0;  // SessionCounter::failure
  // The next two are written before `failure`: the layer that the wait in vain was for, and, where
  // an endpoint of several is to blame, 1 + its number.
  uint32_t failed_at = 0;
  uint32_t silent = 0;
};

// The gate ahead of layer `layer` of a step of `layers`. There is one more, behind the last layer,
// where nothing is awaited: it advances the counter and tells the progress.
struct Gate {
  // Control words of the mailbox are endpoint 0's.
  uint32_t* arrived = nullptr;   // null where there is no gate
  uint32_t unit = 1;             // what a layer adds to `arrived`, and to `begun`
  uint32_t* finished = nullptr;  // on ranks but rank 0: the one word that rank 0 awaits
  uint32_t* status = nullptr;
  SessionCounter* counter = nullptr;
  SessionProgress* progress = nullptr;  // as the GPU addresses it
  uint64_t bound = 0;                   // how long the wait may take, ns
  int32_t layer = 0;
  int32_t layers = 0;
  // Whether the mailbox and the host are on this GPU. What the two tell each other then needs no
  // order for the whole system, whoever else reads the mailbox: only the host reads results.
  bool one_gpu = false;
  // The word by which the host tells that it has begun to hand a layer over (MailboxLayout.begun).
  // The launch behind the gate may begin then. It must not read the slot before the gate's launch
  // has ended, or the gate has been passed (GatePassage). Null where the host does not tell, or
  // there are several endpoints.
  const uint32_t* begun = nullptr;
  // Words of the mailbox where both sides wait by stream memory operations (session.proto). Then
  // FinishKernel says that the layer before is finished, and the stream waits for `handed_over`
  // before the gate is passed. Both are null elsewhere: whoever passes the gate does all of it.
  uint32_t* handed_over = nullptr;
  uint32_t* handed_back = nullptr;
  // A word that is not 0 once an exchange of this rank has failed; null where a rank is alone.
  const uint32_t* exchange_failure = nullptr;
  // Rank 0 awaits the other ranks here in steps without results, which have no exchange: these are
  // the words that they set as `finished`, `kPeerWords` apart, rank 1's first. Null elsewhere:
  // nothing is awaited.
  const uint32_t* peers = nullptr;
  int32_t ranks = 1;
};

// A gate of a session with several endpoints, or whose layers are timed. Kernels that pass gates
// are made for both kinds, so that what is added here costs the other one nothing.
struct SharedGate : Gate {
  int32_t endpoints = 1;  // that hand a layer over
  int32_t told = 1;  // that are told when it is finished; on ranks but rank 0: 1, which is rank 0
  // Where the layers are timed: the stamps of slot 0 (layout.h), how far slots lie apart, and how
  // many there are. Null elsewhere, and on ranks but rank 0.
  std::byte* stamps = nullptr;
  size_t slot_bytes = 0;
  uint32_t slots = 1;

  // Whether the gate is more than its Gate.
  bool is_shared() const { return endpoints > 1 || stamps != nullptr; }
};

// How long a hand-over that has begun may take, in nanoseconds. It takes microseconds, and
// milliseconds where processes take turns on the host's GPU or a tool looks at its kernels.
// Launches that began meanwhile keep multiprocessors from other work of the GPU, so a host that
// never ends one is not waited for as long as one that has not begun.
inline constexpr uint64_t kMostOfHandOver = 1'000'000'000;

inline constexpr int kPeerWords = 32;  // two words never share a sector

}  // namespace tributary::mailbox
