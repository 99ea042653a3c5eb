// A worker by hand: says what the test tells it to, and shows what it hears. Of itself it says
// one thing only, that it has aborted when it is told to.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "tributary/v1/worker.grpc.pb.h"

namespace tributary::test {

class FakeWorker {
 public:
  // Dials. The session is cancelled after 20 seconds, so that no wait is endless.
  explicit FakeWorker(const std::string& address);
  ~FakeWorker();

  // A registration that is accepted, unless `change` spoils it.
  void Register(uint64_t instance_id, int rank,
                const std::function<void(v1::WorkerMessage*)>& change = nullptr);
  void Send(uint64_t epoch, const std::function<void(v1::WorkerMessage*)>& fill);
  void SendReady(uint64_t epoch);
  void SendReply(uint64_t epoch, uint64_t number, int rank, int code = 0);

  // The next message of this kind, others skipped; an empty one when the stream ended before.
  v1::CoordinatorMessage Next(v1::CoordinatorMessage::BodyCase kind);
  // Registers, and is part of a group: the epoch.
  uint64_t Join(uint64_t instance_id, int rank);

  // From now on does not say that it has aborted.
  void StayInEpoch();
  // Takes nothing from the stream any more, from the message after the next one on.
  void StopReading();

  // How the stream ended; ends it from this end if it has not.
  grpc::Status Finish();
  // The field a refusal names.
  static std::string FieldOf(const grpc::Status& status);

 private:
  void Write(const v1::WorkerMessage& message);
  void ReadAll();

  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::GroupService::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::WorkerMessage, v1::CoordinatorMessage>> stream_;
  std::optional<grpc::Status> end_;

  std::mutex write_mutex_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<v1::CoordinatorMessage> heard_;
  bool deaf_ = false;
  bool stays_ = false;
  bool ended_ = false;
  std::thread reader_;
};

}  // namespace tributary::test
