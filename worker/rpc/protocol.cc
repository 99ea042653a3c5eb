#include "worker/rpc/protocol.h"

namespace tributary::worker {

ProtocolRange SpokenProtocol() {
  return {.minimum = kMinProtocolVersion, .current = kProtocolVersion};
}

}  // namespace tributary::worker
