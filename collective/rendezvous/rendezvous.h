// Where ranks meet before they have connections: a key-value store that all of them reach.
#pragma once

#include <string>

#include "collective/communicator.h"
#include "kernels/status.h"

namespace tributary::collective {

class Rendezvous {
 public:
  virtual ~Rendezvous() = default;
  // A key is set once, by one rank.
  virtual Status Set(const std::string& key, const std::string& value) = 0;
  // Waits until the key is set. kDeadlineExceeded when it was not set in time.
  virtual Status Get(const std::string& key, std::string* value, Deadline deadline) = 0;
};

}  // namespace tributary::collective
