#include "tests/fault/fake_worker.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>

#include <chrono>

#include "google/rpc/error_details.pb.h"
#include "worker/rpc/protocol.h"

namespace tributary::test {

FakeWorker::FakeWorker(const std::string& address)
    : channel_(grpc::CreateChannel(address, grpc::InsecureChannelCredentials())),
      stub_(v1::GroupService::NewStub(channel_)) {
  context_.set_wait_for_ready(true);
  context_.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  stream_ = stub_->Session(&context_);
}

FakeWorker::~FakeWorker() {
  context_.TryCancel();
  Finish();
}

void FakeWorker::Register(uint64_t instance_id, int rank,
                          const std::function<void(v1::WorkerMessage*)>& change) {
  v1::WorkerMessage message;
  v1::Registration* registration = message.mutable_registration();
  registration->set_protocol_version(worker::kProtocolVersion);
  registration->set_build_version(worker::BuildVersion());
  registration->set_instance_id(instance_id);
  registration->set_host("127.0.0.1");
  registration->set_backend("cpu");
  if (rank >= 0) registration->set_rank(rank);
  if (change) change(&message);
  stream_->Write(message);
}

void FakeWorker::Send(uint64_t epoch, const std::function<void(v1::WorkerMessage*)>& fill) {
  v1::WorkerMessage message;
  message.set_epoch(epoch);
  fill(&message);
  stream_->Write(message);
}

void FakeWorker::SendReady(uint64_t epoch) {
  Send(epoch, [](v1::WorkerMessage* m) { m->mutable_ready(); });
}

void FakeWorker::SendReply(uint64_t epoch, uint64_t number, int rank, int code) {
  Send(epoch, [&](v1::WorkerMessage* m) {
    m->mutable_reply()->set_number(number);
    m->mutable_reply()->set_rank(rank);
    if (code == 0) return;
    m->mutable_reply()->mutable_status()->set_code(code);
    m->mutable_reply()->mutable_status()->set_message("as the test said");
  });
}

v1::CoordinatorMessage FakeWorker::Next(v1::CoordinatorMessage::BodyCase kind) {
  v1::CoordinatorMessage message;
  while (stream_->Read(&message)) {
    if (message.body_case() == kind) return message;
  }
  return {};
}

uint64_t FakeWorker::Join(uint64_t instance_id, int rank) {
  Register(instance_id, rank);
  const uint64_t epoch = Next(v1::CoordinatorMessage::kConfigure).epoch();
  SendReady(epoch);
  return epoch;
}

grpc::Status FakeWorker::Finish() {
  if (!end_.has_value()) {
    stream_->WritesDone();
    v1::CoordinatorMessage message;
    while (stream_->Read(&message)) {
    }
    end_ = stream_->Finish();
  }
  return *end_;
}

std::string FakeWorker::FieldOf(const grpc::Status& status) {
  google::rpc::Status details;
  details.ParseFromString(status.error_details());
  for (const google::protobuf::Any& detail : details.details()) {
    google::rpc::BadRequest request;
    if (detail.UnpackTo(&request) && request.field_violations_size() == 1) {
      return request.field_violations(0).field();
    }
  }
  return "";
}

}  // namespace tributary::test
