// What a test changes of the machine for its own processes: the network between workers, and a
// process's wall clock.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "tests/fault/programs.h"
#include "tests/support/process.h"

namespace tributary::test {

// A network of the workers' own: each lives in a network namespace, with an interface to a bridge.
// Unix sockets reach across. It takes root's rights and the program `ip`.
class PeerNetwork {
 public:
  explicit PeerNetwork(int workers) : workers_(workers) {}
  ~PeerNetwork();
  PeerNetwork(const PeerNetwork&) = delete;
  PeerNetwork& operator=(const PeerNetwork&) = delete;

  // Why it cannot be made, or nothing. Workers that are started afterwards live in it.
  std::string Make();
  // What starts a worker in its namespace, and the address that it has there; empty before Make.
  Launcher launcher(int rank) const;
  std::string host(int rank) const;
  // From now on nothing arrives between a worker and the others, in either direction. Their
  // connections are not closed.
  void Cut(int rank) const;
  void Mend(int rank) const;

 private:
  std::string NameOf(int rank) const;  // of its namespace
  static std::string AddressOf(int rank);

  const int workers_;
  bool made_ = false;
};

// The wall clock of a process, moved by libfaketime. Its steady clock stays as it is.
class MovableClock {
 public:
  // Why there is none, or nothing. Processes that are started afterwards by launcher() have it.
  std::string Make(const TemporaryDirectory& directory);
  Launcher launcher() const { return launcher_; }
  // It is seen within a second.
  void Jump(std::chrono::seconds by);

 private:
  std::string file_;
  Launcher launcher_;
  std::chrono::seconds offset_{0};
};

}  // namespace tributary::test
