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
  reader_ = std::thread([this] { ReadAll(); });
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
  registration->set_build_version("0.1.0-gfake");
  registration->set_instance_id(instance_id);
  registration->set_host("127.0.0.1");
  registration->set_backend("cpu");
  if (rank >= 0) registration->set_rank(rank);
  if (change) change(&message);
  Write(message);
}

void FakeWorker::Send(uint64_t epoch, const std::function<void(v1::WorkerMessage*)>& fill) {
  v1::WorkerMessage message;
  message.set_epoch(epoch);
  fill(&message);
  Write(message);
}

void FakeWorker::Write(const v1::WorkerMessage& message) {
  std::lock_guard<std::mutex> lock(write_mutex_);
  stream_->Write(message);
}

void FakeWorker::ReadAll() {
  v1::CoordinatorMessage message;
  while (stream_->Read(&message)) {
    const uint64_t epoch = message.epoch();
    bool answer = message.has_abort();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      heard_.push_back(std::move(message));
      changed_.notify_all();
      if (deaf_) return;
      answer = answer && !stays_;
    }
    if (answer) Send(epoch, [](v1::WorkerMessage* m) { m->mutable_aborted(); });
  }
  std::lock_guard<std::mutex> lock(mutex_);
  ended_ = true;
  changed_.notify_all();
}

void FakeWorker::StayInEpoch() {
  std::lock_guard<std::mutex> lock(mutex_);
  stays_ = true;
}

void FakeWorker::StopReading() {
  std::lock_guard<std::mutex> lock(mutex_);
  deaf_ = true;
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
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock,
                  [this] { return ended_ || !heard_.empty(); });  // the session has a deadline
    if (heard_.empty()) return {};
    const v1::CoordinatorMessage message = std::move(heard_.front());
    heard_.pop_front();
    if (message.body_case() == kind) return message;
  }
}

uint64_t FakeWorker::Join(uint64_t instance_id, int rank) {
  Register(instance_id, rank);
  const uint64_t epoch = Next(v1::CoordinatorMessage::kConfigure).epoch();
  SendReady(epoch);
  return epoch;
}

grpc::Status FakeWorker::Finish() {
  if (!end_.has_value()) {
    {
      std::lock_guard<std::mutex> lock(write_mutex_);
      stream_->WritesDone();
    }
    reader_.join();
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
