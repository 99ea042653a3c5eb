// One of many groups: an AttentionService that counts pages and answers with the queries.
#pragma once

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <set>
#include <string>

#include "base/status/rpc_errors.h"
#include "base/sync/mutex.h"
#include "tests/service/client/fake_service.h"
#include "tributary/v1/attention.grpc.pb.h"

namespace tributary::client {

// A sequence takes a page with its first token and one for each 16 more.
class StubGroup final : public v1::AttentionService::Service {
 public:
  StubGroup(uint64_t id, int64_t pages) : id_(id), pages_(pages) { Start(); }
  ~StubGroup() override { Stop(); }

  void Start() {
    grpc::ServerBuilder builder;
    builder.AddListeningPort(socket_.target(), grpc::InsecureServerCredentials());
    builder.RegisterService(this);
    builder.SetSyncServerOption(grpc::ServerBuilder::NUM_CQS, 1);
    server_ = builder.BuildAndStart();
  }
  void Stop() {
    if (server_ == nullptr) return;
    server_->Shutdown(std::chrono::system_clock::now());
    server_.reset();
  }
  // As a group that has lost what it held and begins anew.
  void Forget(uint64_t new_id) {
    const MutexLock lock(mutex_);
    id_ = new_id;
    lengths_.clear();
    caches_.clear();
  }

  // From now on calls of AttendStream are counted and get no answer.
  void StopAnswering() {
    const MutexLock lock(mutex_);
    silent_ = true;
  }

  std::string target() const { return socket_.target(); }
  size_t sequences() const {
    const MutexLock lock(mutex_);
    return lengths_.size();
  }
  bool Has(uint64_t sequence) const {
    const MutexLock lock(mutex_);
    return lengths_.count(sequence) > 0;
  }
  bool HasCache(const std::string& cache) const {
    const MutexLock lock(mutex_);
    return caches_.count(cache) > 0;
  }
  // Calls that named a sequence that is not here.
  int strangers() const {
    const MutexLock lock(mutex_);
    return strangers_;
  }
  int attends() const {
    const MutexLock lock(mutex_);
    return attends_;
  }
  int topologies() const {
    const MutexLock lock(mutex_);
    return topologies_;
  }

 private:
  int64_t UsedPages() const TRIBUTARY_REQUIRES(mutex_) {
    int64_t used = 0;
    for (const auto& [id, length] : lengths_) used += (length + 15) / 16;
    return used;
  }
  template <typename Entries>
  absl::Status CheckEntries(const Entries& entries) TRIBUTARY_REQUIRES(mutex_) {
    for (int i = 0; i < entries.size(); ++i) {
      if (lengths_.count(entries[i].sequence_id()) > 0) continue;
      ++strangers_;
      return NotFound("sequence", std::to_string(entries[i].sequence_id()),
                      EntryField(i, "sequence_id"));
    }
    return absl::OkStatus();
  }
  static grpc::Status ToGrpc(const absl::Status& status) {
    if (status.ok()) return grpc::Status::OK;
    const google::rpc::Status rpc = ToRpcStatus(status);
    return {static_cast<grpc::StatusCode>(rpc.code()), rpc.message(), rpc.SerializeAsString()};
  }

  grpc::Status CreateCache(grpc::ServerContext*, const v1::CreateCacheRequest* request,
                           v1::CreateCacheReply* reply) override {
    const MutexLock lock(mutex_);
    caches_.insert(request->cache_id());
    *reply->mutable_spec() = request->spec();
    return grpc::Status::OK;
  }
  grpc::Status OpenSequence(grpc::ServerContext*, const v1::OpenSequenceRequest* request,
                            v1::OpenSequenceReply* reply) override {
    const MutexLock lock(mutex_);
    if (UsedPages() >= pages_) return ToGrpc(Exhausted("pages", "all are in use"));
    lengths_.emplace(request->sequence_id(), 0);
    reply->set_sequence_id(request->sequence_id());
    return grpc::Status::OK;
  }
  grpc::Status ForkSequence(grpc::ServerContext*, const v1::ForkSequenceRequest* request,
                            v1::ForkSequenceReply* reply) override {
    const MutexLock lock(mutex_);
    const auto parent = lengths_.find(request->parent_id());
    if (parent == lengths_.end()) ++strangers_;
    lengths_[request->sequence_id()] = parent == lengths_.end() ? 0 : parent->second;
    reply->set_sequence_id(request->sequence_id());
    return grpc::Status::OK;
  }
  grpc::Status CloseSequence(grpc::ServerContext*, const v1::CloseSequenceRequest* request,
                             v1::CloseSequenceReply*) override {
    const MutexLock lock(mutex_);
    if (lengths_.erase(request->sequence_id()) == 0) ++strangers_;
    return grpc::Status::OK;
  }
  grpc::Status Append(grpc::ServerContext*, const v1::AppendRequest* request,
                      v1::AppendReply*) override {
    const MutexLock lock(mutex_);
    if (absl::Status s = CheckEntries(request->entries()); !s.ok()) return ToGrpc(s);
    for (const auto& entry : request->entries()) lengths_[entry.sequence_id()] += entry.tokens();
    return grpc::Status::OK;
  }
  // Gives the queries back, and as the LSE of a row and head what the first element of q is.
  grpc::Status AttendStream(
      grpc::ServerContext*,
      grpc::ServerReaderWriter<v1::AttendReply, v1::AttendRequest>* stream) override {
    v1::AttendRequest request;
    while (stream->Read(&request)) {
      v1::AttendReply reply;
      reply.set_request_id(request.request_id());
      {
        const MutexLock lock(mutex_);
        ++attends_;
        if (silent_) continue;
        const absl::Status status = CheckEntries(request.entries());
        if (!status.ok()) *reply.mutable_status() = ToRpcStatus(status);
        for (const auto& entry : request.entries()) {
          if (status.ok()) lengths_[entry.sequence_id()] += entry.new_tokens();
        }
      }
      if (!reply.has_status()) {
        *reply.mutable_output() = request.q();
        if (request.return_lse()) {
          v1::Tensor* lse = reply.mutable_lse();
          lse->set_dtype(v1::DTYPE_F32);
          const int64_t rows = request.q().shape(0), heads = request.q().shape(1);
          const int64_t dim = request.q().shape(2);
          const auto* q = reinterpret_cast<const float*>(request.q().inline_().data());
          for (int64_t i = 0; i < rows * heads; ++i) {
            lse->mutable_inline_()->append(reinterpret_cast<const char*>(q + i * dim),
                                           sizeof(float));
          }
        }
      }
      if (!stream->Write(reply)) break;
    }
    return grpc::Status::OK;
  }
  grpc::Status GetTopology(grpc::ServerContext*, const v1::GetTopologyRequest*,
                           v1::GetTopologyReply* reply) override {
    const MutexLock lock(mutex_);
    ++topologies_;
    reply->set_state(v1::GROUP_STATE_READY);
    reply->add_workers()->set_address(socket_.target());
    for (const std::string& cache : caches_) {
      v1::CacheInfo* info = reply->add_caches();
      info->set_cache_id(cache);
      info->set_pages_total(pages_);
      info->set_pages_used(UsedPages());
      info->set_sequences(static_cast<int64_t>(lengths_.size()));
    }
    return grpc::Status::OK;
  }
  grpc::Status GetLimits(grpc::ServerContext*, const v1::GetLimitsRequest*,
                         v1::GetLimitsReply* reply) override {
    const MutexLock lock(mutex_);
    reply->set_group_id(id_);
    return grpc::Status::OK;
  }

  const SocketPath socket_;
  mutable Mutex mutex_;
  uint64_t id_ TRIBUTARY_GUARDED_BY(mutex_);
  const int64_t pages_;
  std::map<uint64_t, int64_t> lengths_ TRIBUTARY_GUARDED_BY(mutex_);
  std::set<std::string> caches_ TRIBUTARY_GUARDED_BY(mutex_);
  int strangers_ TRIBUTARY_GUARDED_BY(mutex_) = 0;
  int attends_ TRIBUTARY_GUARDED_BY(mutex_) = 0;
  bool silent_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  int topologies_ TRIBUTARY_GUARDED_BY(mutex_) = 0;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace tributary::client
