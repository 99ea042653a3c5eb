// Stands in for gloo.cc where Gloo is not installed.
#include "collective/gloo/gloo.h"

namespace tributary::collective {

Status CreateGlooCommunicator(const GroupPlace& place, Rendezvous& rendezvous, Deadline deadline,
                              std::unique_ptr<Communicator>* out) {
  return {StatusCode::kFailedPrecondition,
          "built without Gloo: install libgloo-dev and configure again"};
}

}  // namespace tributary::collective
