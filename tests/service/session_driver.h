// A session's stream, driven by hand: what a client library would send, message by message.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <vector>

#include "tributary/v1/attention.grpc.pb.h"

namespace tributary::service::testing {

class SessionDriver {
 public:
  // Sends the first message, and reads the reply to it into `opened` if there is one. Asked to time
  // round trips, it answers with `times`, or, where these are null, leaves it at that.
  SessionDriver(v1::AttentionService::Stub& stub, const v1::SessionRequest& first,
                const v1::ProbeResult* times = nullptr);
  SessionDriver(v1::AttentionService::Stub& stub, const v1::OpenSession& open,
                const v1::ProbeResult* times = nullptr);
  // Cancels the stream if it has not ended.
  ~SessionDriver();

  bool is_open() const { return is_open_; }
  const v1::SessionOpened& opened() const { return opened_; }
  bool was_probed() const { return was_probed_; }

  // The layers [first, first + requests.size()) with the entries of the first request; the requests
  // are those of single layers that say the same.
  static v1::SubmitStep StepOf(uint64_t step_id, const std::vector<v1::AttendRequest>& requests);

  void Submit(const v1::SubmitStep& step);
  // The tensors of a request for one layer.
  void SendLayer(uint64_t step_id, const v1::AttendRequest& request);
  void SendClose();
  void SendTimes(const v1::ProbeResult& times);

  // EXPECT that the next message is of that kind.
  v1::StepAccepted ReadAccepted();
  v1::StepEnded ReadEnded();
  v1::LayerOutput ReadLayer();
  // The next layer as the reply that a call would have got.
  v1::AttendReply ReadReply(const v1::AttendRequest& request, v1::DType dtype);

  // Reads to the end of the stream, which is what it ended with.
  grpc::Status Finish();
  // Without waiting for anything.
  void Cancel() { context_.TryCancel(); }

 private:
  v1::SessionReply Read();

  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriterInterface<v1::SessionRequest, v1::SessionReply>> stream_;
  v1::SessionOpened opened_;
  bool is_open_ = false;
  bool was_probed_ = false;
  bool finished_ = false;
};

// A session of cache "m" whose layers are messages of f32.
v1::OpenSession MessagesSession(int32_t rows);

}  // namespace tributary::service::testing
