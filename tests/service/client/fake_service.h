// An AttentionService on a private Unix socket whose answers a test scripts.
#pragma once

#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "tributary/v1/attention.grpc.pb.h"

namespace tributary::client {

// A Unix socket's path in a directory that goes with it.
class SocketPath {
 public:
  SocketPath() {
    char name[] = "/tmp/tributary-test-XXXXXX";
    directory_ = mkdtemp(name);
  }
  ~SocketPath() {
    unlink(path().c_str());
    rmdir(directory_.c_str());
  }
  SocketPath(const SocketPath&) = delete;
  SocketPath& operator=(const SocketPath&) = delete;

  std::string path() const { return directory_ + "/socket"; }
  std::string target() const { return "unix:" + path(); }

 private:
  std::string directory_;
};

inline google::rpc::Status RpcError(grpc::StatusCode code, int retry_delay_ms = -1,
                                    const std::string& field = "") {
  google::rpc::Status status;
  status.set_code(code);
  status.set_message("scripted");
  if (retry_delay_ms >= 0) {
    google::rpc::RetryInfo info;
    info.mutable_retry_delay()->set_nanos(retry_delay_ms * 1'000'000);
    status.add_details()->PackFrom(info);
  }
  if (!field.empty()) {
    google::rpc::BadRequest bad;
    bad.add_field_violations()->set_field(field);
    status.add_details()->PackFrom(bad);
  }
  return status;
}

inline grpc::Status GrpcError(grpc::StatusCode code, int retry_delay_ms = -1,
                              const std::string& field = "") {
  return {code, "scripted", RpcError(code, retry_delay_ms, field).SerializeAsString()};
}

class FakeService final : public v1::AttentionService::Service {
 public:
  // What to do with a call of a stream; its results have the request's q as output.
  struct Verdict {
    google::rpc::Status status;  // OK by default
    bool silent = false;         // no reply, ever
    bool end_stream = false;     // instead of a reply
    grpc::Status end_status;
  };
  std::function<Verdict(const v1::AttendRequest&)> on_attend;
  // The outcome of a unary call by name and number (from 1).
  std::function<grpc::Status(const std::string& method, int attempt)> on_unary;

  // How a session ends, which it does as soon as it is open.
  grpc::Status session_end;

  explicit FakeService(const SocketPath& socket) : target_(socket.target()) { Start(); }
  ~FakeService() override { Stop(); }

  void Start() {
    grpc::ServerBuilder builder;
    builder.AddListeningPort(target_, grpc::InsecureServerCredentials());
    builder.RegisterService(this);
    builder.SetMaxReceiveMessageSize(-1);
    server_ = builder.BuildAndStart();
  }
  // Breaks every connection, as the end of the process would.
  void Stop() {
    if (server_ == nullptr) return;
    stopping_ = true;
    server_->Shutdown(std::chrono::system_clock::now());
    server_.reset();
    ForgetRegions();
    stopping_ = false;
  }

  int attempts(const std::string& method) const {
    std::lock_guard lock(mutex_);
    const auto it = attempts_.find(method);
    return it == attempts_.end() ? 0 : it->second;
  }
  // Keys of the objects that registrations named: of the memory, or of a GPU's memory's owner.
  std::vector<std::string> regions() const {
    std::lock_guard lock(mutex_);
    return regions_;
  }
  // Whether a region of that name is registered.
  bool Knows(const std::string& region) const {
    std::lock_guard lock(mutex_);
    return known_.count(region) > 0;
  }
  void ForgetRegions() {
    std::lock_guard lock(mutex_);
    known_.clear();
  }
  int streams() const { return streams_; }
  // What calls, streams and renewals presented, in order: "stream: NAME".
  std::vector<std::string> leases() const {
    std::lock_guard lock(mutex_);
    return leases_;
  }

 private:
  grpc::Status Unary(const std::string& method) {
    int attempt = 0;
    {
      std::lock_guard lock(mutex_);
      attempt = ++attempts_[method];
    }
    return on_unary ? on_unary(method, attempt) : grpc::Status::OK;
  }

  grpc::Status CreateCache(grpc::ServerContext*, const v1::CreateCacheRequest* request,
                           v1::CreateCacheReply* reply) override {
    *reply->mutable_spec() = request->spec();
    return Unary("CreateCache");
  }
  grpc::Status DeleteCache(grpc::ServerContext*, const v1::DeleteCacheRequest*,
                           v1::DeleteCacheReply*) override {
    return Unary("DeleteCache");
  }
  grpc::Status OpenSequence(grpc::ServerContext* context, const v1::OpenSequenceRequest* request,
                            v1::OpenSequenceReply* reply) override {
    RememberLease("call", *context);
    reply->set_sequence_id(request->sequence_id());
    Remember(request->sequence_id());
    return Unary("OpenSequence");
  }
  grpc::Status UpdateSequences(grpc::ServerContext*, const v1::UpdateSequencesRequest* request,
                               v1::UpdateSequencesReply*) override {
    for (const v1::SequenceUpdate& update : request->updates()) {
      if (update.has_fork()) Remember(update.fork().sequence_id());
    }
    return Unary("UpdateSequences");
  }
  grpc::Status ForkSequence(grpc::ServerContext*, const v1::ForkSequenceRequest* request,
                            v1::ForkSequenceReply* reply) override {
    reply->set_sequence_id(request->sequence_id());
    Remember(request->sequence_id());
    return Unary("ForkSequence");
  }
  grpc::Status TruncateSequence(grpc::ServerContext*, const v1::TruncateSequenceRequest* request,
                                v1::TruncateSequenceReply* reply) override {
    reply->set_length(request->length());
    return Unary("TruncateSequence");
  }
  grpc::Status CloseSequence(grpc::ServerContext*, const v1::CloseSequenceRequest*,
                             v1::CloseSequenceReply*) override {
    return Unary("CloseSequence");
  }
  grpc::Status Append(grpc::ServerContext*, const v1::AppendRequest*, v1::AppendReply*) override {
    return Unary("Append");
  }
  grpc::Status GetTopology(grpc::ServerContext*, const v1::GetTopologyRequest*,
                           v1::GetTopologyReply* reply) override {
    reply->set_epoch(9);
    return Unary("GetTopology");
  }
  grpc::Status GetLimits(grpc::ServerContext*, const v1::GetLimitsRequest*,
                         v1::GetLimitsReply*) override {
    return Unary("GetLimits");
  }
  grpc::Status RenewLease(grpc::ServerContext*, const v1::RenewLeaseRequest* request,
                          v1::RenewLeaseReply* reply) override {
    reply->set_timeout_seconds(0.03);
    {
      std::lock_guard lock(mutex_);
      leases_.push_back("renewed: " + request->lease());
    }
    return Unary("RenewLease");
  }
  grpc::Status RegisterSharedMemory(grpc::ServerContext*,
                                    const v1::RegisterSharedMemoryRequest* request,
                                    v1::RegisterSharedMemoryReply*) override {
    {
      std::lock_guard lock(mutex_);
      regions_.push_back(request->has_system() ? request->system().key()
                                               : request->cuda_ipc().owner_key());
      if (request->has_system()) Map(*request);
    }
    const grpc::Status status = Unary("RegisterSharedMemory");
    std::lock_guard lock(mutex_);
    if (status.ok()) known_.insert(request->name());
    return status;
  }
  grpc::Status UnregisterSharedMemory(grpc::ServerContext*,
                                      const v1::UnregisterSharedMemoryRequest* request,
                                      v1::UnregisterSharedMemoryReply*) override {
    {
      std::lock_guard lock(mutex_);
      known_.erase(request->name());
    }
    return Unary("UnregisterSharedMemory");
  }

  grpc::Status AttendStream(
      grpc::ServerContext* context,
      grpc::ServerReaderWriter<v1::AttendReply, v1::AttendRequest>* stream) override {
    ++streams_;
    RememberLease("stream", *context);
    v1::AttendRequest request;
    while (stream->Read(&request)) {
      const Verdict verdict = on_attend ? on_attend(request) : Verdict();
      if (verdict.end_stream) return verdict.end_status;
      if (verdict.silent) continue;
      v1::AttendReply reply;
      reply.set_request_id(request.request_id());
      if (verdict.status.code() != 0) {
        *reply.mutable_status() = verdict.status;
      } else {
        Answer(request, reply);
      }
      stream->Write(reply);
    }
    return stopping_ ? grpc::Status(grpc::StatusCode::UNAVAILABLE, "stopping") : grpc::Status::OK;
  }

  grpc::Status AttendSession(
      grpc::ServerContext*,
      grpc::ServerReaderWriter<v1::SessionReply, v1::SessionRequest>* stream) override {
    v1::SessionRequest first;
    v1::SessionReply opened;
    opened.mutable_opened();
    stream->Read(&first);
    stream->Write(opened);
    return session_end;
  }

  // For good: a test's process ends soon.
  void Map(const v1::RegisterSharedMemoryRequest& request) {
    const int file = shm_open(request.system().key().c_str(), O_RDWR, 0);
    if (file < 0) return;
    void* data = mmap(nullptr, request.byte_size(), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    mapped_[request.name()] = static_cast<std::byte*>(data);
  }

  // The output is q, except in memory of a GPU: there is none.
  void Answer(const v1::AttendRequest& request, v1::AttendReply& reply) {
    if (!request.has_output()) {
      *reply.mutable_output() = request.q();
      return;
    }
    *reply.mutable_output() = request.output();
    size_t bytes = sizeof(float);
    for (const int64_t extent : request.q().shape()) bytes *= static_cast<size_t>(extent);
    std::lock_guard lock(mutex_);
    if (mapped_.count(request.q().shared_memory().region()) == 0) return;
    std::memcpy(At(request.output()), At(request.q()), bytes);
  }
  std::byte* At(const v1::Tensor& tensor) {
    return mapped_.at(tensor.shared_memory().region()) + tensor.shared_memory().offset();
  }

  void Remember(uint64_t id) {
    std::lock_guard lock(mutex_);
    ids.push_back(id);
  }

  void RememberLease(const std::string& by, const grpc::ServerContext& context) {
    const auto found = context.client_metadata().find("tributary-lease");
    if (found == context.client_metadata().end()) return;
    std::lock_guard lock(mutex_);
    leases_.push_back(by + ": " + std::string(found->second.data(), found->second.size()));
  }

  const std::string target_;
  mutable std::mutex mutex_;
  std::map<std::string, int> attempts_;
  std::vector<std::string> regions_;
  std::vector<std::string> leases_;
  std::set<std::string> known_;
  std::map<std::string, std::byte*> mapped_;
  std::atomic<int> streams_{0};
  std::atomic<bool> stopping_{false};
  std::unique_ptr<grpc::Server> server_;

 public:
  std::vector<uint64_t> ids;  // asked for by Open and Fork; read when no call is in flight
};

}  // namespace tributary::client
