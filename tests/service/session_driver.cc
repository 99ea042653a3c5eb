#include "tests/service/session_driver.h"

#include <gtest/gtest.h>

#include <chrono>

namespace tributary::service::testing {

namespace {

v1::SessionRequest RequestOf(const v1::OpenSession& open) {
  v1::SessionRequest request;
  *request.mutable_open() = open;
  return request;
}

}  // namespace

SessionDriver::SessionDriver(v1::AttentionService::Stub& stub, const v1::OpenSession& open,
                             const v1::ProbeResult* times)
    : SessionDriver(stub, RequestOf(open), times) {}

SessionDriver::SessionDriver(v1::AttentionService::Stub& stub, const v1::SessionRequest& first,
                             const v1::ProbeResult* times) {
  context_.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  stream_ = stub.AttendSession(&context_);
  stream_->Write(first);
  v1::SessionReply reply;
  bool read = stream_->Read(&reply);
  was_probed_ = read && reply.has_probe();
  if (was_probed_ && times != nullptr) {
    SendTimes(*times);
    read = stream_->Read(&reply);
  }
  is_open_ = read && reply.has_opened();
  opened_ = reply.opened();
}

SessionDriver::~SessionDriver() {
  if (finished_) return;
  Cancel();
  Finish();
}

v1::SubmitStep SessionDriver::StepOf(uint64_t step_id,
                                     const std::vector<v1::AttendRequest>& requests) {
  v1::SubmitStep step;
  step.set_step_id(step_id);
  step.set_mode(requests.front().mode());
  step.set_first_layer(requests.front().layer());
  step.set_layers(static_cast<int32_t>(requests.size()));
  for (const v1::AttendEntry& entry : requests.front().entries()) {
    v1::SessionStepEntry* to = step.add_entries();
    to->set_sequence_id(entry.sequence_id());
    to->set_first_position(entry.first_position());
    to->set_query_rows(entry.query_rows());
    to->set_new_tokens(entry.new_tokens());
  }
  return step;
}

void SessionDriver::Submit(const v1::SubmitStep& step) {
  v1::SessionRequest request;
  *request.mutable_submit() = step;
  stream_->Write(request);
}

void SessionDriver::SendLayer(uint64_t step_id, const v1::AttendRequest& from) {
  v1::SessionRequest request;
  v1::LayerInput* layer = request.mutable_layer();
  layer->set_step_id(step_id);
  layer->set_layer(from.layer());
  layer->set_q(from.q().inline_());
  layer->set_k(from.k().inline_());
  layer->set_v(from.v().inline_());
  stream_->Write(request);
}

void SessionDriver::SendClose() {
  v1::SessionRequest request;
  request.mutable_close();
  stream_->Write(request);
}

void SessionDriver::SendTimes(const v1::ProbeResult& times) {
  v1::SessionRequest request;
  *request.mutable_probed() = times;
  stream_->Write(request);
}

v1::SessionReply SessionDriver::Read() {
  v1::SessionReply reply;
  EXPECT_TRUE(stream_->Read(&reply)) << "the stream has ended";
  return reply;
}

v1::StepAccepted SessionDriver::ReadAccepted() {
  const v1::SessionReply reply = Read();
  EXPECT_TRUE(reply.has_accepted()) << reply.ShortDebugString();
  return reply.accepted();
}

v1::StepEnded SessionDriver::ReadEnded() {
  const v1::SessionReply reply = Read();
  EXPECT_TRUE(reply.has_ended()) << reply.ShortDebugString();
  return reply.ended();
}

v1::LayerOutput SessionDriver::ReadLayer() {
  const v1::SessionReply reply = Read();
  EXPECT_TRUE(reply.has_layer()) << reply.ShortDebugString();
  return reply.layer();
}

v1::AttendReply SessionDriver::ReadReply(const v1::AttendRequest& request, v1::DType dtype) {
  const v1::LayerOutput layer = ReadLayer();
  EXPECT_EQ(layer.layer(), request.layer());
  v1::AttendReply reply;
  reply.mutable_output()->set_dtype(dtype);
  *reply.mutable_output()->mutable_shape() = request.q().shape();
  reply.mutable_output()->set_inline_(layer.output());
  reply.mutable_lse()->set_dtype(v1::DTYPE_F32);
  reply.mutable_lse()->add_shape(request.q().shape(0));
  reply.mutable_lse()->add_shape(request.q().shape(1));
  reply.mutable_lse()->set_inline_(layer.lse());
  for (const v1::AttendEntry& entry : request.entries()) {
    const bool keeps = request.mode() != v1::ATTEND_MODE_DFLASH;  // a draft's tokens are not kept
    reply.add_lengths(entry.first_position() + (keeps ? entry.new_tokens() : 0));
  }
  return reply;
}

grpc::Status SessionDriver::Finish() {
  finished_ = true;
  v1::SessionReply reply;
  while (stream_->Read(&reply)) {
  }
  return stream_->Finish();
}

v1::OpenSession MessagesSession(int32_t rows) {
  v1::OpenSession open;
  open.set_cache_id("m");
  open.set_memory(v1::SESSION_MEMORY_MESSAGES);
  open.set_max_rows(rows);
  open.set_max_new_tokens(rows);
  open.set_q_dtype(v1::DTYPE_F32);
  open.set_return_lse(true);
  return open;
}

}  // namespace tributary::service::testing
