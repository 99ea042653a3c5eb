// What hosts say of a model step, in every kind of session.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tributary/v1/session.pb.h"

namespace tributary::client {

struct SessionEntry {
  uint64_t sequence_id = 0;
  int64_t first_position = 0;
  int32_t query_rows = 0;  // 0 in an append-only step
  int32_t new_tokens = 0;
  std::optional<int64_t> truncate_to;  // first rolls the sequence back
  std::optional<uint64_t> fork_from;   // first makes it a fork of another
  std::optional<int64_t> fork_length;
};

struct SessionStep {
  v1::AttendMode mode = v1::ATTEND_MODE_CAUSAL;
  int32_t first_layer = 0;
  int32_t layers = 1;
  std::vector<SessionEntry> entries;
  bool append_only = false;
};

// Rows of heads, on the device or in memory of the host, as the session has it. Within a head
// elements are dense; rows and heads lie so many elements apart, so a view of a fused projection or
// of a transposed tensor is taken as it is. On a device strides are multiples of 16 bytes. `data`
// null: none.
struct HeadRows {
  void* data = nullptr;
  int32_t rows = 0;
  int32_t heads = 0;
  int32_t dim = 0;
  int64_t row_stride = 0;   // 0: heads * dim
  int64_t head_stride = 0;  // 0: dim
};

// One layer of a submitted step.
struct SessionLayer {
  HeadRows q;
  HeadRows k;  // as many rows as the step has new tokens
  HeadRows v;
  HeadRows output;       // of q's rows and heads; without data: the results are not copied
  float* lse = nullptr;  // [rows, heads], with return_lse
};

// A session for hosts that compute with CUDA (cuda/device_session.h).
struct DeviceSessionOptions {
  std::string cache_id;
  // Query rows and new tokens that a slot has room for. A step may have more, a prompt for example:
  // its layers then go in pieces.
  int32_t max_rows = 1;
  int32_t max_new_tokens = 1;
  v1::DType dtype = v1::DTYPE_BF16;  // of q, k, v and output: F32, BF16 or F16
  bool return_lse = false;
  int32_t max_steps = 2;  // submitted and not over, at a time
  // How long a launch waits for the service, and the service for a launch, before the session is
  // given up.
  std::chrono::milliseconds wait_timeout{10'000};
  // Processes that the model's heads are split over, and whether each of them has all KV heads
  // (session.proto, JoinSession).
  int32_t endpoints = 1;
  bool kv_replicated = false;
  // Whether layers are timed on the GPUs (TakeTimes). Exchanges then begin when attention has
  // ended, where they would otherwise go along with it.
  bool timed = false;
};

// Which endpoint of which session a process is to be: its place among the processes of a host whose
// model is split over heads. The process with endpoint 0 opens the session with `endpoints` set,
// and tells the others opened().session_id() and opened().endpoint_secret().
struct EndpointOptions {
  uint64_t session_id = 0;
  std::string secret;
  int32_t endpoint = 1;                                          // 1 to endpoints - 1
  std::chrono::nanoseconds spin{std::chrono::microseconds(50)};  // HOST: as in HostSessionOptions
};

}  // namespace tributary::client
