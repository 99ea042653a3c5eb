// A closed loop of attention calls against a service: every loop makes its next call when the last
// one is answered, as a model host does.
//
// A loop generates for `batch` sequences at once: a step is one Attend of every layer, in order,
// each with `rows` new tokens (and as many query rows) a sequence. With a session the step is
// submitted first. When a window of steps is full
// the sequences are rolled back to the context's length, so that the length of a run does not
// change what is measured.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/rpc/channel_security.h"
#include "kernels/dtype.h"
#include "service/cli/latencies.h"
#include "service/client/layer_times.h"
#include "tributary/v1/attention.pb.h"
#include "tributary/v1/session.pb.h"

namespace tributary::cli {

struct LoadOptions {
  std::string target;
  ChannelSecurity security;
  int32_t connections = 1;
  int32_t sequences = 4;  // a multiple of batch
  int32_t batch = 4;      // sequences of one call; loops = sequences / batch
  int32_t layers = 2;
  int64_t context = 4096;       // tokens of each sequence
  int32_t rows = 1;             // new tokens and query rows of a sequence in a step
  int64_t rollback_steps = 64;  // after so many steps, sequences are cut back to the context
  int32_t q_heads = 32;
  int32_t kv_heads = 8;
  int32_t head_dim = 128;
  int32_t value_head_dim = 0;  // 0: head_dim
  int32_t page_size = 16;
  DType dtype = DType::kBf16;                     // of q, k, v and output
  DType kv_dtype = DType::kFp8E4M3;               // of the cache
  size_t shared_memory_bytes = size_t{64} << 20;  // of each connection; 0: tensors in messages
  // Steps go through a session of each loop, whose memory is this. (Unspecified: shared memory over
  // a Unix socket, and messages over TCP.)
  bool session = false;
  v1::SessionMemory session_memory = v1::SESSION_MEMORY_UNSPECIFIED;
  int32_t slot_rows = 0;   // rows, and new tokens, of a session's slot; 0: those of a step
  int32_t host_gpu = 0;    // by CUDA's ordinal: where q, k and v lie of sessions on GPUs
  bool breakdown = false;  // whether layers of sessions on GPUs are timed there
  std::chrono::milliseconds warmup{1'000};
  std::chrono::milliseconds duration{10'000};
  std::chrono::milliseconds timeout{30'000};  // of a call

  int32_t ValueDim() const { return value_head_dim == 0 ? head_dim : value_head_dim; }
  int32_t StepRows() const { return batch * rows; }  // of a loop's step
  int32_t SlotRows() const { return slot_rows == 0 ? StepRows() : slot_rows; }
};

// INVALID_ARGUMENT names the flag.
absl::Status CheckLoad(const LoadOptions& options);

// Where the time of layers went that were timed on GPUs (client::LayerTimes).
struct LayerBreakdown {
  Latencies fill, ring_seen, attention, exchange, ring_back, wait;

  void Add(const client::LayerTimes& times);
  void Merge(const LayerBreakdown& other);
  bool empty() const { return fill.count() == 0; }
};

struct LoadResult {
  double seconds = 0;  // measured, without filling and warm-up
  uint64_t requests = 0;
  uint64_t steps = 0;
  uint64_t tokens = 0;  // generated: steps * batch * rows
  // Of the cache, as kernels must read them to answer the requests (bytes of K and V elements).
  double kv_bytes_read = 0;
  Latencies request_latency;
  Latencies step_latency;
  LayerBreakdown breakdown;                // empty unless it was asked for
  std::map<std::string, uint64_t> errors;  // by status code
  std::string first_error;
  v1::CreateCacheReply cache;
  v1::Statistics service;  // what the service did while we measured
};

// Told from time to time by the caller's thread: "filling", "warm-up" or "running", how much of it
// is done (0..1), and a note.
using LoadProgress = std::function<void(const std::string&, double, const std::string&)>;

// Creates a cache of its own, fills it, measures, deletes the cache. Ends early, with what there
// is, when `stop` becomes true.
absl::StatusOr<LoadResult> RunLoad(const LoadOptions& options, const std::atomic<bool>& stop,
                                   const LoadProgress& progress);

}  // namespace tributary::cli
