// The stream of a session: steps are submitted on it, and it lives as long as the session.
#pragma once

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/sync/mutex.h"
#include "tributary/v1/attention.grpc.pb.h"
#include "tributary/v1/session.pb.h"

namespace tributary::client {

// Thread safe. One thread of its own reads what the service says.
class SessionStream {
 public:
  // Times round trips for the service (session.proto, SessionProbe).
  using Probe = std::function<absl::StatusOr<v1::ProbeResult>(const v1::SessionProbe&)>;

  // Opens or joins a session, as the first message says, and presents `lease` unless that is empty;
  // `deadline` holds for that alone. `probe` is called on this thread when the service asks for
  // round trips; a request with `measures` set needs one. Errors are the service's refusal,
  // DEADLINE_EXCEEDED, and those of `probe`.
  static absl::StatusOr<std::unique_ptr<SessionStream>> Open(
      v1::AttentionService::StubInterface* stub, const v1::SessionRequest& first,
      const std::string& lease, std::chrono::steady_clock::time_point deadline,
      const Probe& probe = nullptr);
  // Ends the session at once, if it has not ended.
  ~SessionStream();
  SessionStream(const SessionStream&) = delete;
  SessionStream& operator=(const SessionStream&) = delete;

  const v1::SessionOpened& opened() const { return opened_; }
  // `ended` is called once, on the stream's thread, as soon as the session is over; at once if it
  // is.
  void OnEnd(std::function<void(const absl::Status&)> ended);

  // The service's answer to a step: accepted, or why not. Steps are submitted one after the other.
  absl::StatusOr<v1::StepAccepted> Submit(const v1::SubmitStep& step,
                                          std::chrono::steady_clock::time_point deadline);
  // The same for a step that endpoint 0 submits, for the other endpoints of the session.
  absl::StatusOr<v1::StepAccepted> AwaitAccepted(uint64_t step_id,
                                                 std::chrono::steady_clock::time_point deadline);
  // What became of an accepted step: OK when it was carried out.
  absl::Status Await(uint64_t step_id, std::chrono::steady_clock::time_point deadline);
  // Hands over a layer, where the session's memory is MESSAGES.
  absl::Status SendLayer(v1::LayerInput layer);
  // Returns the results of that piece of the layer. Results of earlier pieces that nobody asked for
  // are dropped.
  absl::StatusOr<v1::LayerOutput> AwaitLayer(uint64_t step_id, int32_t layer, int32_t piece,
                                             std::chrono::steady_clock::time_point deadline);
  // Why the session is over; OK while it is not.
  absl::Status status() const;
  // The same; waits for the end.
  absl::Status AwaitEnd(std::chrono::steady_clock::time_point deadline) const;
  // Ends the session at once.
  void Cancel() { context_.TryCancel(); }
  // Ends the session when its steps are over. The status with which it ended.
  absl::Status Close(std::chrono::steady_clock::time_point deadline);

 private:
  SessionStream() = default;
  void Read();
  absl::Status Answer(const v1::SessionProbe& asked, const Probe& probe);
  absl::Status Write(const v1::SessionRequest& request);
  void Handle(v1::SessionReply& reply) TRIBUTARY_REQUIRES(mutex_);

  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriterInterface<v1::SessionRequest, v1::SessionReply>> stream_;
  v1::SessionOpened opened_;  // set before Open returns
  std::thread reader_;

  Mutex write_mutex_;  // one write at a time

  mutable Mutex mutex_;
  mutable CondVar changed_;
  bool is_open_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  std::optional<v1::SessionProbe> asked_ TRIBUTARY_GUARDED_BY(mutex_);  // not answered yet
  absl::Status why_ TRIBUTARY_GUARDED_BY(mutex_);  // OK until the session is over
  std::function<void(const absl::Status&)> on_end_ TRIBUTARY_GUARDED_BY(mutex_);
  std::map<uint64_t, v1::StepAccepted> accepted_ TRIBUTARY_GUARDED_BY(mutex_);  // not asked for yet
  std::map<uint64_t, absl::Status> ended_ TRIBUTARY_GUARDED_BY(mutex_);
  std::deque<v1::LayerOutput> layers_ TRIBUTARY_GUARDED_BY(mutex_);
};

}  // namespace tributary::client
