// The rendezvous of one epoch, kept by the coordinator and reached over the session.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "collective/rendezvous/rendezvous.h"
#include "tributary/v1/worker.pb.h"
#include "worker/rpc/outbox.h"

namespace tributary::worker {

class SessionRendezvous : public collective::Rendezvous {
 public:
  SessionRendezvous(uint64_t epoch, std::shared_ptr<Outbox> outbox);

  tributary::Status Set(const std::string& key, const std::string& value) override;
  tributary::Status Get(const std::string& key, std::string* value,
                        collective::Deadline deadline) override;

  // From the session's reader.
  void Deliver(v1::RendezvousValue value);
  // Every Get, waiting or to come, is kAborted.
  void Cancel(std::string reason);

 private:
  const uint64_t epoch_;
  const std::shared_ptr<Outbox> outbox_;
  absl::Mutex mutex_;
  absl::CondVar changed_;
  std::map<std::string, std::string> values_ ABSL_GUARDED_BY(mutex_);
  std::string cancelled_ ABSL_GUARDED_BY(mutex_);  // why; empty while in use
};

}  // namespace tributary::worker
