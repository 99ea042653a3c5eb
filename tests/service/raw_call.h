// Unary calls whose messages are bytes: what no generated stub would send, and services that have
// none here.
#pragma once

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <memory>
#include <string>

namespace tributary::service::testing {

struct RawReply {
  grpc::Status status;
  std::string bytes;
};

// `method` is "/package.Service/Method".
RawReply RawCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                 const std::string& request, std::chrono::seconds timeout);

// grpc.health.v1.Health/Check of a service's name, by hand: the generated code is no part of gRPC's
// packages.
RawReply CheckHealth(const std::string& address, const std::string& service);
// What it says of a service that serves, and of one that does not.
inline constexpr char kServing[] = "\x08\x01";
inline constexpr char kNotServing[] = "\x08\x02";

// grpc.health.v1.Health/Watch of a service's name.
class HealthWatch {
 public:
  HealthWatch(const std::string& address, const std::string& service);
  ~HealthWatch();
  HealthWatch(const HealthWatch&) = delete;
  HealthWatch& operator=(const HealthWatch&) = delete;

  // What it says next, which it does when that changes; "" when it has ended or says nothing.
  std::string Next();

 private:
  bool Done();  // of the operation begun last

  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;
};

}  // namespace tributary::service::testing
