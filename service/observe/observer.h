// What the coordinator and the gRPC front tell whoever measures, records and traces them.
//
// Calls come from any thread, some with the coordinator's lock held (marked): implementations are
// quick, do not block and do not call back.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "base/telemetry/trace.h"
#include "tributary/v1/attention.pb.h"
#include "worker/command.h"

namespace tributary::service {

// The RPCs of the public API. Calls inside a stream count like unary ones, under the stream's name.
enum class Method : uint8_t {
  kCreateCache,
  kDeleteCache,
  kOpenSequence,
  kForkSequence,
  kTruncateSequence,
  kCloseSequence,
  kAppend,
  kAttend,
  kAttendStream,
  kGetTopology,
  kRegisterSharedMemory,
  kUnregisterSharedMemory,
  kUpdateSequences,
  kGetLimits,
  kRenewLease,
};
inline constexpr int kMethods = 15;
const char* Name(Method method);

// What a client may have only so much of.
enum class ClientLimit : uint8_t {
  kCalls,
  kSequences,
  kPages,
  kCaches,
  kCacheBytes,
  kStreams,
  kBytes,
  kSessions,
  kMailboxBytes
};
inline constexpr int kClientLimits = 9;
const char* Name(ClientLimit limit);  // "calls"
// Told of each refusal for that reason.
using OnRefused = std::function<void(ClientLimit)>;

// A call as the front sees it, from the message's arrival to its answer.
struct CallRecord {
  std::chrono::steady_clock::time_point begin;
  uint64_t request_id = 0;  // of calls on streams
  telemetry::TraceContext trace;
  uint64_t span_id = 0;  // of sampled calls
  Method method = Method::kAttend;
};

// A step as the coordinator sees it.
struct StepRecord {
  struct Call {
    std::chrono::steady_clock::time_point accepted;
    telemetry::TraceContext trace;  // its span_id: the call's own span
  };

  uint64_t number = 0;            // of its command
  telemetry::TraceContext trace;  // as OnStepSubmitted returned it; its span_id: the step's own
  uint64_t epoch = 0;
  worker::CacheId cache = 0;
  int32_t layer = 0;
  worker::StepKind kind = worker::StepKind::kDecode;
  int32_t entries = 0;
  int32_t query_rows = 0;
  int32_t new_tokens = 0;
  size_t bytes_in = 0;                              // q, k and v
  std::vector<Call> calls;                          // that share it
  std::chrono::steady_clock::time_point begun;      // its calls are fixed
  std::chrono::steady_clock::time_point submitted;  // its command is built
  std::chrono::steady_clock::time_point done;       // all ranks have replied, or it was aborted
  std::chrono::steady_clock::time_point answered;   // its calls have their replies
};

class Observer {
 public:
  using Clock = std::chrono::steady_clock;

  virtual ~Observer() = default;

  // Whether OnCallBegun looks at traceparents: finding them costs a call some time.
  virtual bool traces() const { return false; }
  // `traceparent`: as the caller gave it, empty for none. `bytes`: of the request's message. Then,
  // when the call is answered, OnCallEnded.
  virtual CallRecord OnCallBegun(Method method, absl::string_view traceparent, size_t bytes) {
    return {.begin = Clock::now(), .method = method};
  }
  virtual void OnCallEnded(const CallRecord& call, const absl::Status& status, size_t bytes) {}

  // Before the command is handed to the ranks. Returns what they trace the step as.
  virtual telemetry::TraceContext OnStepSubmitted(const StepRecord& step) { return {}; }
  // `replies` by rank; those that never came are default.
  virtual void OnStepEnded(const StepRecord& step, const absl::Status& status,
                           const std::vector<worker::Reply>& replies) {}

  // A call was refused because its client has as much of something as it may. The coordinator's
  // lock may be held.
  virtual void OnLimitReached(ClientLimit limit) {}

  virtual void OnGroupReady(uint64_t epoch) {}
  virtual void OnGroupBroken(uint64_t epoch, const std::string& reason) {}

  // Adds what the coordinator does not count itself. The coordinator's lock is held.
  virtual void Fill(v1::Statistics* statistics) const {}
};

}  // namespace tributary::service
