#include "collective/rendezvous/memory_rendezvous.h"

namespace tributary::collective {

Status MemoryRendezvous::Set(const std::string& key, const std::string& value) {
  MutexLock lock(mutex_);
  values_[key] = value;
  changed_.NotifyAll();
  return Status::Ok();
}

Status MemoryRendezvous::Get(const std::string& key, std::string* value, Deadline deadline) {
  const MutexLock lock(mutex_);
  while (!values_.contains(key)) {
    if (!changed_.WaitUntil(mutex_, deadline) && !values_.contains(key)) {
      return {StatusCode::kDeadlineExceeded, "rendezvous: '" + key + "' was not set in time"};
    }
  }
  *value = values_[key];
  return Status::Ok();
}

}  // namespace tributary::collective
