// Requests of unary calls that may outlive their call.
//
// gRPC frees a request when its call is finished. A slow worker may hold a command that borrows the
// request's bytes for longer. So requests are allocated here, and shared.
#pragma once

#include <grpcpp/grpcpp.h>
#include <grpcpp/support/message_allocator.h>

#include <memory>

namespace tributary::service {

template <typename Request, typename Reply>
class SharedRequestAllocator : public grpc::MessageAllocator<Request, Reply> {
 public:
  grpc::MessageHolder<Request, Reply>* AllocateMessages() override { return new Holder; }

  // The request of the call that `context` belongs to.
  static std::shared_ptr<const Request> RequestOf(grpc::CallbackServerContext* context) {
    return static_cast<Holder*>(context->GetRpcAllocatorState())->shared;
  }

 private:
  struct Holder : grpc::MessageHolder<Request, Reply> {
    Holder() {
      this->set_request(shared.get());
      this->set_response(&reply);
    }
    void Release() override { delete this; }

    const std::shared_ptr<Request> shared = std::make_shared<Request>();
    Reply reply;
  };
};

}  // namespace tributary::service
