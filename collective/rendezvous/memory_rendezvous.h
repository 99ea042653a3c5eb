// A rendezvous for ranks that are threads of one process.
#pragma once

#include <condition_variable>
#include <map>
#include <mutex>
#include <string>

#include "collective/rendezvous/rendezvous.h"

namespace tributary::collective {

class MemoryRendezvous final : public Rendezvous {
 public:
  Status Set(const std::string& key, const std::string& value) override;
  Status Get(const std::string& key, std::string* value, Deadline deadline) override;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

}  // namespace tributary::collective
