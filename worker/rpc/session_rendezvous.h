// The rendezvous of one epoch, kept by the coordinator and reached over the session.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "base/sync/mutex.h"
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

  // Called by the thread that reads the session's stream.
  void Deliver(v1::RendezvousValue value);
  // Every Get that waits, or that comes later, returns kAborted.
  void Cancel(std::string reason);

 private:
  const uint64_t epoch_;
  const std::shared_ptr<Outbox> outbox_;
  Mutex mutex_;
  CondVar changed_;
  std::map<std::string, std::string> values_ TRIBUTARY_GUARDED_BY(mutex_);
  std::string cancelled_ TRIBUTARY_GUARDED_BY(mutex_);  // why; empty while in use
};

}  // namespace tributary::worker
