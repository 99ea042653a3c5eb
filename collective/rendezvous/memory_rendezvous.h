// A rendezvous for ranks that are threads of one process.
#pragma once

#include <map>
#include <string>

#include "base/sync/mutex.h"
#include "collective/rendezvous/rendezvous.h"

namespace tributary::collective {

class MemoryRendezvous final : public Rendezvous {
 public:
  Status Set(const std::string& key, const std::string& value) override;
  Status Get(const std::string& key, std::string* value, Deadline deadline) override;

 private:
  Mutex mutex_;
  CondVar changed_;
  std::map<std::string, std::string> values_ TRIBUTARY_GUARDED_BY(mutex_);
};

}  // namespace tributary::collective
