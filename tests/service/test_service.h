// A whole service in the test's process: coordinator, workers, and the gRPC servers on Unix
// sockets.
#pragma once

#include <grpcpp/grpcpp.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "google/rpc/error_details.pb.h"
#include "kernels/dtype.h"
#include "service/api/server.h"
#include "service/coordinator/coordinator.h"
#include "service/workers/worker_group.h"
#include "tests/support/process.h"
#include "tributary/v1/attention.grpc.pb.h"

namespace tributary::service::testing {

class TestService {
 public:
  struct Options {
    int workers = 4;
    CoordinatorOptions coordinator;
    int max_calls_per_stream = 256;
    // How callers are let in; addresses and what is stated above are filled in.
    ServerOptions server;
  };

  explicit TestService(Options options);
  // With a group of the test's.
  TestService(Options options, std::unique_ptr<WorkerGroup> group);
  ~TestService();

  void WaitReady();
  void WaitNotReady();
  v1::AttentionService::Stub& stub() { return *stub_; }
  std::shared_ptr<grpc::Channel> NewChannel() const;
  std::string address() const { return server_->addresses().front(); }
  std::string admin_address() const { return server_->admin_address(); }
  Coordinator& coordinator() { return *coordinator_; }
  Server& server() { return *server_; }

  // What the service holds, without what changes by asking or by time. Two equal snapshots: nothing
  // was changed.
  std::string State();
  v1::GetTopologyReply Topology();

 private:
  void SetReady(bool ready);

  test::TemporaryDirectory directory_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ready_ = false;
  std::unique_ptr<Coordinator> coordinator_;
  std::unique_ptr<Server> server_;
  std::unique_ptr<v1::AttentionService::Stub> stub_;
};

// ------------------------------------------------------------------------------------- requests

// A small cache: 2 layers, 4/2 heads of 64, pages of 16 tokens.
v1::CacheSpec SmallSpec();

// Values as an inline tensor of `dtype`.
v1::Tensor InlineTensor(DType dtype, const std::vector<int64_t>& shape,
                        const std::vector<float>& values);
std::vector<float> ValuesOf(const v1::Tensor& tensor);
// Deterministic values of size about 1.
std::vector<float> RandomValues(size_t count, uint64_t seed);

// `tokens` new tokens with a query row each, at `first`; values from `seed`.
v1::AttendRequest AttendOf(const v1::CacheSpec& spec, const std::string& cache, uint64_t sequence,
                           int64_t first, int32_t tokens, int32_t layer = 0, uint64_t seed = 1);
// Query rows alone.
v1::AttendRequest QueryOf(const v1::CacheSpec& spec, const std::string& cache, uint64_t sequence,
                          int64_t first, int32_t rows, int32_t layer = 0, uint64_t seed = 1);
v1::AppendRequest AppendOf(const v1::CacheSpec& spec, const std::string& cache, uint64_t sequence,
                           int64_t first, int32_t tokens, int32_t layer = 0, uint64_t seed = 1);

grpc::Status CreateCache(v1::AttentionService::Stub& stub, const std::string& name,
                         const v1::CacheSpec& spec);
grpc::Status Open(v1::AttentionService::Stub& stub, const std::string& cache, uint64_t sequence);
grpc::Status Attend(v1::AttentionService::Stub& stub, const v1::AttendRequest& request,
                    v1::AttendReply* reply);
grpc::Status Append(v1::AttentionService::Stub& stub, const v1::AppendRequest& request,
                    v1::AppendReply* reply);

// --------------------------------------------------------------------------------------- details

// This process as a client of a service at a Unix socket, in quota failures: "client:uid:N".
std::string Me();
// The field a status names, "" for none.
std::string FieldOf(const grpc::Status& status);
template <typename Detail>
bool DetailOf(const google::rpc::Status& status, Detail* detail) {
  for (const auto& any : status.details()) {
    if (any.UnpackTo(detail)) return true;
  }
  return false;
}
template <typename Detail>
bool DetailOf(const grpc::Status& status, Detail* detail) {
  google::rpc::Status rpc;
  return rpc.ParseFromString(status.error_details()) && DetailOf(rpc, detail);
}

}  // namespace tributary::service::testing
