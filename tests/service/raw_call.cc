#include "tests/service/raw_call.h"

#include <grpcpp/generic/generic_stub.h>

namespace tributary::service::testing {

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
  grpc::Slice whole;
  if (reply.status.ok() && bytes.DumpToSingleSlice(&whole).ok()) {
    reply.bytes.assign(reinterpret_cast<const char*>(whole.begin()), whole.size());
  }
  return reply;
}

RawReply CheckHealth(const std::string& address, const std::string& service) {
  return RawCall(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()),
                 "/grpc.health.v1.Health/Check",
                 std::string("\x0a") + static_cast<char>(service.size()) + service,
                 std::chrono::seconds(20));
}

}  // namespace tributary::service::testing
