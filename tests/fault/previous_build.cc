// Linked into a worker in place of the sources that say what it is: a build of the version before.
#include "base/process/version.h"
#include "worker/rpc/protocol.h"

namespace tributary {

std::string BuildVersion() { return "0.0.9-gprevious"; }

namespace worker {

ProtocolRange SpokenProtocol() {
  return {.minimum = kProtocolVersion - 2, .current = kProtocolVersion - 1};
}

}  // namespace worker
}  // namespace tributary
