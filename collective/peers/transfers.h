// What carries the messages of operations between processes.
//
// Every operation sends at most one message to each peer and receives at most one, all at once,
// straight between the two ranks. A failed operation closes all connections: peers that still wait
// for this rank learn of it without waiting for their deadline.
#pragma once

#include <cstddef>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "collective/communicator.h"
#include "collective/op.h"
#include "kernels/status.h"

namespace tributary::collective {

// What goes to and comes from one peer. Both of the operation's size; nullptr also for no bytes.
struct Transfer {
  int peer = 0;
  bool sends = false;
  bool receives = false;
  const std::byte* send = nullptr;
  std::byte* recv = nullptr;
};

// Runs operations, one at a time. Owns the connections, and the first error, which all later
// operations end with. Its end closes the connections softly: what this rank sent in its last
// operation still arrives.
class Transfers {
 public:
  virtual ~Transfers() = default;

  // `bytes` is the size of every message. root: 0 where the operation has none. Errors are
  // Communicator's.
  virtual Status Run(Op op, size_t bytes, int root, const std::vector<Transfer>& transfers,
                     Deadline deadline) = 0;
  // Communicator::Abort; from any thread.
  virtual void Abort(const std::string& reason) = 0;
};

// kUnavailable, by the peers' ranks and why each of them is lost.
Status LostPeers(const std::map<int, std::string>& lost);
// kDeadlineExceeded, by the peers that did not come before the deadline of `rank`.
Status LatePeers(const std::set<int>& late, int rank);
// kAborted, as Abort of `rank` was told.
Status AbortedBy(int rank, const std::string& reason);
// The same error, which says in which operation it came up.
Status During(Op op, const Status& error);

}  // namespace tributary::collective
