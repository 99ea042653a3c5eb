// One stream to the coordinator, from dialling to its end.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"
#include "base/rpc/security_options.h"
#include "base/sync/mutex.h"
#include "base/telemetry/log.h"
#include "tributary/v1/worker.grpc.pb.h"
#include "worker/rpc/outbox.h"
#include "worker/rpc/peer_security.h"
#include "worker/rpc/rank_thread.h"
#include "worker/rpc/readiness.h"
#include "worker/rpc/session_rendezvous.h"
#include "worker/rpc/worker_observer.h"

namespace tributary::worker {

struct SessionOptions {
  std::string host = "127.0.0.1";  // where peers reach this worker, and where it listens for them
  std::string backend = "cpu";
  std::optional<int> rank;                // that the worker asks for
  int world_size = 0;                     // that the worker expects; 0: any
  PeerTls peer_tls = PeerTls::kAuto;      // whether it reaches its peers by TLS
  ChannelSecurity security;               // of the channels to the coordinator
  std::string build_version = "unknown";  // of the program (base/process/version.h)
  // A coordinator that says nothing for so long is gone. Its Welcome states another time.
  std::chrono::milliseconds welcome_timeout{10'000};
  std::shared_ptr<const telemetry::Logger> log;                                   // null: silent
  std::shared_ptr<WorkerObserver> observer = std::make_shared<WorkerObserver>();  // never null
};

// What a worker is to a coordinator. It outlives sessions.
struct Identity {
  uint64_t instance_id = 0;
  uint64_t group_id = 0;  // whose shards these are; 0: they are empty
  uint64_t epoch = 0;     // the last one that it was configured for
};

class Session {
 public:
  // How it ended.
  struct End {
    grpc::Status status;
    bool welcomed = false;  // the coordinator had accepted the registration
    std::string field;      // the field that a refusal names
  };

  // All references outlive the session.
  Session(const SessionOptions& options, Identity& identity, RankThread& rank,
          Readiness& readiness);
  ~Session();

  // Returns when the stream is over; the communicator is aborted by then.
  End Run(const std::shared_ptr<grpc::Channel>& channel);

  // Asks the coordinator to let this worker leave. Run returns when it has agreed, or at
  // `deadline`. May be called from any thread.
  void Drain(std::chrono::steady_clock::time_point deadline);

 private:
  void Register();
  void Handle(v1::CoordinatorMessage message);
  void OnWelcome(const v1::Welcome& welcome);
  void OnConfigure(uint64_t epoch, const v1::Configure& configure);
  void OnAbort(const std::string& reason);
  void OnCommand(v1::CoordinatorMessage message);
  // Tells the coordinator regularly that this worker lives. Ends the session when the coordinator
  // is silent, or when draining takes too long. Runs until `finished_`.
  void Pulse();
  void Log(telemetry::LogLevel level, absl::string_view event) const;

  const SessionOptions& options_;
  Identity& identity_;
  RankThread& rank_;
  Readiness& readiness_;

  grpc::ClientContext context_;
  const std::shared_ptr<Outbox> outbox_ = std::make_shared<Outbox>();
  // Used by the thread that reads the stream only. The rendezvous is that of the epoch which is
  // being formed, or which is in use.
  std::shared_ptr<SessionRendezvous> rendezvous_;
  std::optional<v1::Welcome> welcome_;
  // The rank and epoch for log lines, which any thread may write.
  std::atomic<int> logged_rank_ = -1;
  std::atomic<uint64_t> logged_epoch_ = 0;

  Mutex mutex_;
  CondVar changed_;
  bool finished_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  std::chrono::steady_clock::time_point heard_ TRIBUTARY_GUARDED_BY(mutex_);
  std::chrono::milliseconds interval_ TRIBUTARY_GUARDED_BY(mutex_){1'000};
  std::chrono::milliseconds silence_ TRIBUTARY_GUARDED_BY(mutex_);
  std::optional<std::chrono::steady_clock::time_point> drain_deadline_ TRIBUTARY_GUARDED_BY(mutex_);
};

}  // namespace tributary::worker
