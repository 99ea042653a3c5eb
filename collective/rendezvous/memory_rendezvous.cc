#include "collective/rendezvous/memory_rendezvous.h"

namespace tributary::collective {

Status MemoryRendezvous::Set(const std::string& key, const std::string& value) {
  std::lock_guard<std::mutex> lock(mutex_);
  values_[key] = value;
  changed_.notify_all();
  return Status::Ok();
}

Status MemoryRendezvous::Get(const std::string& key, std::string* value, Deadline deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!changed_.wait_until(lock, deadline, [&] { return values_.count(key) > 0; })) {
    return {StatusCode::kDeadlineExceeded, "rendezvous: '" + key + "' was not set in time"};
  }
  *value = values_[key];
  return Status::Ok();
}

}  // namespace tributary::collective
