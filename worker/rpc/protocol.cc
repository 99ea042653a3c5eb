#include "worker/rpc/protocol.h"

namespace tributary::worker {

const char* BuildVersion() { return TRIBUTARY_VERSION; }

}  // namespace tributary::worker
