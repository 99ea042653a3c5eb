// Where things lie in the mailbox of a session. proto/tributary/v1/session.proto says what they are
// for, and carries the same numbers from the service, which decides them, to the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

// These functions run on both sides.
#ifdef __CUDACC__
#define TRIBUTARY_MAILBOX_DEVICE __host__ __device__
#else
#define TRIBUTARY_MAILBOX_DEVICE
#endif

namespace tributary::mailbox {

// Control words and tensors begin at multiples of this many bytes, so that no two of them share a
// cache line of a CPU or a sector of a GPU.
inline constexpr size_t kAlignment = 128;
// Where several endpoints share a mailbox, each has control words of its own. Those of one begin so
// many bytes behind those of the endpoint before.
inline constexpr size_t kControlBytes = 8 * kAlignment;

// Bytes that one slot has room for: the most that any layer of a step takes.
struct SlotRoom {
  size_t q = 0;
  size_t k = 0;
  size_t v = 0;
  size_t output = 0;
  size_t lse = 0;  // 0: the session returns no LSE
};

// When a layer came to a point on the service's GPU, in nanoseconds of that GPU's clock.
struct SlotStamps {
  uint64_t seen = 0;      // all endpoints had handed it over
  uint64_t attended = 0;  // this rank's attention was over; 0 where nothing is exchanged after it
  uint64_t finished = 0;  // its results were in the slot
};

// Parts of a layer where hand-overs are counted in parts. Each thread block of a hand-over adds its
// own, and waits for no other block and no answer.
inline constexpr uint32_t kLayerParts = 1 << 16;

// Offsets in bytes. Those of control words and of the first slot count from the mailbox's begin,
// those of tensors from the slot's.
struct Layout {
  size_t arrived = 0;         // uint32: layers that the host has handed over, or parts (`begun`)
  size_t finished = 0;        // uint32: layers whose results are in their slots
  size_t status = 0;          // uint32: 0, or the google.rpc.Code with which the session ended
  size_t service_sleeps = 0;  // uint32: not 0 while the service sleeps on `arrived`
  size_t host_sleeps = 0;     // uint32: not 0 while the host sleeps on `finished`
  // Two uint32 for waits by stream memory operations: 1 while a layer is handed over and not taken,
  // or handed back and not taken; 0 otherwise. Any other value ends a wait.
  size_t handed_over = 0;
  size_t handed_back = 0;
  // uint32: layers whose hand-over has begun and cannot be held up. Where this word is there, it
  // and `arrived` count parts of layers, kLayerParts of each. 0: the host does not count in parts,
  // or there are several endpoints.
  size_t begun = 0;
  size_t first_slot = 0;
  size_t slot_bytes = 0;
  int32_t slots = 0;
  size_t q = 0;
  size_t k = 0;
  size_t v = 0;
  size_t output = 0;
  size_t lse = 0;
  size_t stamps = 0;  // SlotStamps; 0: the session's layers are not timed
  size_t bytes = 0;   // size of the whole mailbox
  friend bool operator==(const Layout&, const Layout&) = default;

  // Where the slot of the session's layer number `count` begins.
  TRIBUTARY_MAILBOX_DEVICE size_t SlotOf(uint32_t count) const {
    return first_slot + (count % static_cast<uint32_t>(slots)) * slot_bytes;
  }
  // What a layer adds to `arrived`, and to `begun`.
  uint32_t arrived_unit() const { return begun != 0 ? kLayerParts : 1; }
  // The same mailbox with the control words of another endpoint. This is endpoint 0's.
  Layout OfEndpoint(int32_t endpoint) const {
    Layout other = *this;
    for (size_t Layout::*word :
         {&Layout::arrived, &Layout::finished, &Layout::status, &Layout::service_sleeps,
          &Layout::host_sleeps, &Layout::handed_over, &Layout::handed_back}) {
      other.*word += static_cast<size_t>(endpoint) * kControlBytes;
    }
    return other;
  }
};

// What a mailbox has beyond doorbells and tensors.
struct LayoutOptions {
  int32_t endpoints = 1;  // that share it
  bool timed = false;     // slots have room for stamps
  bool in_parts = false;  // hand-overs are counted in parts (Layout::begun); of one endpoint
};

inline Layout LayOut(int32_t slots, const SlotRoom& room, const LayoutOptions& options = {}) {
  size_t end = 0;
  const auto place = [&end](size_t bytes) {
    const size_t begin = end;
    end += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return begin;
  };
  Layout layout;
  layout.slots = slots;
  layout.arrived = place(sizeof(uint32_t));
  layout.finished = place(sizeof(uint32_t));
  layout.status = place(sizeof(uint32_t));
  layout.service_sleeps = place(sizeof(uint32_t));
  layout.host_sleeps = place(sizeof(uint32_t));
  layout.handed_over = place(sizeof(uint32_t));
  layout.handed_back = place(sizeof(uint32_t));
  if (options.in_parts) layout.begun = place(sizeof(uint32_t));
  layout.first_slot = kControlBytes * static_cast<size_t>(options.endpoints);
  end = 0;
  layout.q = place(room.q);
  layout.k = place(room.k);
  layout.v = place(room.v);
  layout.output = place(room.output);
  layout.lse = place(room.lse);
  if (options.timed) layout.stamps = place(sizeof(SlotStamps));
  layout.slot_bytes = end;
  layout.bytes = layout.first_slot + layout.slot_bytes * static_cast<size_t>(slots);
  return layout;
}

// Values of google.rpc.Code in the status word: a wait was in vain; a rank lost another one.
inline constexpr uint32_t kDeadlineExceeded = 4;
inline constexpr uint32_t kAborted = 10;

// Written to a word, it ends a wait by stream memory operations: no value waited for is larger.
inline constexpr uint32_t kEndsWaits = 0x40000000;

// How a wait for a doorbell ended.
enum class Awaited : uint32_t {
  kReached = 0,
  kEnded = 1,     // the status word is not 0
  kTimedOut = 2,  // the bound passed first
};

// Whether a doorbell has reached a count, modulo 2^32.
TRIBUTARY_MAILBOX_DEVICE inline bool Reached(uint32_t doorbell, uint32_t count) {
  return static_cast<int32_t>(doorbell - count) >= 0;
}

}  // namespace tributary::mailbox
