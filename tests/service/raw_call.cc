#include "tests/service/raw_call.h"

namespace tributary::service::testing {
namespace {

constexpr std::chrono::seconds kHealthTimeout{20};

std::string BytesOf(grpc::ByteBuffer& buffer) {
  grpc::Slice whole;
  if (!buffer.DumpToSingleSlice(&whole).ok()) return "";
  return {reinterpret_cast<const char*>(whole.begin()), whole.size()};
}

// A HealthCheckRequest.
std::string HealthRequest(const std::string& service) {
  return std::string("\x0a") + static_cast<char>(service.size()) + service;
}

}  // namespace

RawReply RawCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                 const std::string& request, std::chrono::seconds timeout) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + timeout);
  const grpc::Slice slice(request);
  const grpc::ByteBuffer message(&slice, 1);
  grpc::CompletionQueue queue;
  const auto call = stub.PrepareUnaryCall(&context, method, message, &queue);
  call->StartCall();
  RawReply reply;
  grpc::ByteBuffer bytes;
  call->Finish(&bytes, &reply.status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  if (reply.status.ok()) reply.bytes = BytesOf(bytes);
  return reply;
}

RawReply CheckHealth(const std::string& address, const std::string& service) {
  return RawCall(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()),
                 "/grpc.health.v1.Health/Check", HealthRequest(service), kHealthTimeout);
}

HealthWatch::HealthWatch(const std::string& address, const std::string& service) {
  context_.set_deadline(std::chrono::system_clock::now() + 3 * kHealthTimeout);
  grpc::GenericStub stub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  call_ = stub.PrepareCall(&context_, "/grpc.health.v1.Health/Watch", &queue_);
  call_->StartCall(nullptr);
  if (!Done()) return;
  const grpc::Slice request(HealthRequest(service));
  call_->WriteLast(grpc::ByteBuffer(&request, 1), grpc::WriteOptions(), nullptr);
  Done();
}

HealthWatch::~HealthWatch() {
  context_.TryCancel();
  grpc::Status status;
  call_->Finish(&status, nullptr);
  Done();
}

std::string HealthWatch::Next() {
  grpc::ByteBuffer reply;
  call_->Read(&reply, nullptr);
  return Done() ? BytesOf(reply) : "";
}

bool HealthWatch::Done() {
  void* tag = nullptr;
  bool ok = false;
  return queue_.Next(&tag, &ok) && ok;  // by the context's deadline
}

}  // namespace tributary::service::testing
