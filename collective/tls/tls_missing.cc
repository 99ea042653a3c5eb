// Stands in for tls.cc where OpenSSL is not installed.
#include "collective/tls/tls.h"

namespace tributary::collective {

Status CreateTlsCommunicator(const TlsOptions& options, Rendezvous& rendezvous, Deadline deadline,
                             std::unique_ptr<Communicator>* out) {
  return {StatusCode::kFailedPrecondition,
          "built without OpenSSL: install libssl-dev and configure again"};
}

}  // namespace tributary::collective
