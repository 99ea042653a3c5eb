// The two launches with which a host's GPU hands a layer over and gets it back.
//
// Nothing that changes from layer to layer is an argument: the number of the layer lies on the
// device and advances there. So a CUDA graph that has captured these launches may be launched for
// ever, as long as the shapes stay.
#pragma once

#include <cuda_runtime.h>

#include <chrono>
#include <cstdint>

#include "base/mailbox/layout.h"
#include "service/client/layer_stamps.h"

namespace tributary::client {

// What the host keeps on its GPU for a session.
struct alignas(16) HostCounter {
  // The session's number of the layer that is taken back next, or handed over where none is under
  // way.
  uint32_t count = 0;
  uint32_t tickets = 0;  // blocks of the launch under way that are through
  // 0, or the google.rpc.Code with which a wait ended. From then on nothing is awaited, handed over
  // or taken back.
  uint32_t failure = 0;
  uint32_t unfinished = 0;  // layers handed over without a result, and not known to be finished
};

// What the CPU sees without asking the GPU; in pinned memory.
struct HostFailure {
  uint32_t status = 0;  // HostCounter::failure
  // How many layers were handed over and taken back; counted only where the stream waits.
  uint32_t handed_over = 0;
  uint32_t taken_back = 0;
};

// The layers of a timed session that were taken back last, in pinned memory.
struct LayerRecords {
  static constexpr uint32_t kLayers = 4096;
  uint32_t taken = 0;  // layers of the session that were taken back, modulo 2^32
  // Of layer number n of the session in n % kLayers.
  LayerStamps layers[kLayers];
};

// A session as the host's launches see it. All pointers are the GPU's.
struct MailboxView {
  std::byte* mailbox = nullptr;
  mailbox::Layout layout;
  HostCounter* counter = nullptr;
  HostFailure* failure = nullptr;
  uint64_t bound = 0;         // how long a wait may take, ns
  bool one_gpu = false;       // the mailbox lies on the GPU that launches
  bool several_gpus = false;  // GPUs of other ranks read it
  // Whether results are awaited by stream memory operations (session.proto). These have no bound,
  // so the caller of the launches watches HostFailure, and ends a wait by writing to `handed_back`.
  bool stream_waits = false;
};

// Where the stamps of a timed session lie; null elsewhere.
struct Timing {
  LayerStamps* stamps = nullptr;    // of the layers under way, [slots]
  LayerRecords* records = nullptr;  // of the layers that were taken back
};

// Heads in a slot: so many in each row, of which this host has those from `first` on. 0: a row has
// this host's heads and no others.
struct SlotHeads {
  int32_t all = 0;
  int32_t first = 0;
  bool operator==(const SlotHeads&) const = default;
};

// One tensor of a layer: `rows` rows of `heads` heads of `head_bytes` bytes. Rows and heads lie so
// many bytes apart; within a head elements are dense. All are multiples of 16.
struct StridedTensor {
  const std::byte* data = nullptr;
  int32_t rows = 0;
  int32_t heads = 0;
  int32_t head_bytes = 0;
  int64_t row_stride = 0;
  int64_t head_stride = 0;
};

// How a layer is handed over. Whatever is not as it is here takes launches of another kind, so that
// it costs all others nothing.
struct HandOver {
  // Nothing will be taken back (append-only), so this launch advances the counter. It is not set
  // where the stream waits, for all layers are taken back there.
  bool no_result = false;
  // 1: the layer before has been handed over, and is taken back after this one. Then there are two
  // slots at least, and the stream does not wait. 0 elsewhere.
  uint32_t ahead = 0;
  SlotHeads q;
  SlotHeads kv;
  Timing timing;
};

// Waits until the layer's slot is free, writes q, k and v into it, and rings.
cudaError_t LaunchHandOver(const MailboxView& session, const StridedTensor& q,
                           const StridedTensor& k, const StridedTensor& v, const HandOver& how,
                           cudaStream_t stream);

enum class Element : uint8_t { kF32, kBf16, kF16 };

// Where results go: `rows` rows of `heads` heads of `value_dim` elements. Rows and heads lie so
// many elements apart; within a head elements are dense, in vectors of 8. Slots hold f32, which is
// rounded on the way. A null pointer means that the result is not wanted.
struct ResultTarget {
  void* output = nullptr;
  float* lse = nullptr;              // dense, [rows, heads]
  Element element = Element::kBf16;  // of `output`
  int32_t rows = 0;
  int32_t heads = 0;
  int32_t value_dim = 0;
  int64_t row_stride = 0;
  int64_t head_stride = 0;
};

// How a layer is taken back; as HandOver.
struct TakeBack {
  SlotHeads q;
  Timing timing;
};

// Waits until the layer is finished, copies the results, and advances the counter. Where the
// session has ended, or the bound passes, the results are NaN and HostFailure says why.
cudaError_t LaunchTakeBack(const MailboxView& session, const ResultTarget& target,
                           const TakeBack& how, cudaStream_t stream);

// The median time of a round trip (SessionProbe) by each way of waiting, in seconds. 0: it could
// not be timed.
struct RoundTrips {
  double memory_ops = 0;
  double spinning = 0;
};
// Makes `rounds` round trips of each way on the stream and waits for them, until `until` at the
// latest. After that the caller ends the session, and what is left in the stream ends with it.
cudaError_t TimeRoundTrips(const MailboxView& session, int32_t rounds,
                           std::chrono::steady_clock::time_point until, cudaStream_t stream,
                           RoundTrips* out);

// Loads the kernels, so that no launch has to do it.
cudaError_t LoadSessionKernels();

}  // namespace tributary::client
