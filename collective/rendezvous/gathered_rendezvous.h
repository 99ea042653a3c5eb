// A rendezvous for ranks that have a communicator already, and want to make something more of it.
#pragma once

#include <map>
#include <string>

#include "collective/communicator.h"
#include "collective/rendezvous/rendezvous.h"

namespace tributary::collective {

// Every Set is a gathering of all ranks: they set the same keys but for the rank at the end
// ("prefix/RANK"), in the same order. So a Get waits for nothing. Used from one thread at a time.
class GatheredRendezvous final : public Rendezvous {
 public:
  // The most bytes that a value may have.
  static constexpr size_t kMostBytes = 1000;

  // `deadline` holds for every Set.
  GatheredRendezvous(Communicator& comm, Deadline deadline) : comm_(comm), deadline_(deadline) {}

  // kInvalidArgument: the value of some rank is too long. All ranks then fail alike. Other errors
  // are the communicator's.
  Status Set(const std::string& key, const std::string& value) override;
  // kInternal when the key was not set.
  Status Get(const std::string& key, std::string* value, Deadline deadline) override;

 private:
  Communicator& comm_;
  const Deadline deadline_;
  std::map<std::string, std::string> values_;
};

}  // namespace tributary::collective
