// Where ranks meet before they have connections: a key-value store that all of them reach.
#pragma once

#include <string>

#include "collective/communicator.h"
#include "kernels/status.h"

namespace tributary::collective {

class Rendezvous {
 public:
  virtual ~Rendezvous() = default;
  virtual Status Set(const std::string& key, const std::string& value) = 0;
  // Waits until the key is set.
  virtual Status Get(const std::string& key, std::string* value, Deadline deadline) = 0;
};

}  // namespace tributary::collective
