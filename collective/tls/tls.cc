#include "collective/tls/tls.h"

#include <utility>

#include "collective/in_process.h"
#include "collective/peers/broken_pipes.h"
#include "collective/peers/peer_communicator.h"
#include "collective/tls/tls_mesh.h"
#include "collective/tls/tls_transfers.h"

namespace tributary::collective {

Status CreateTlsCommunicator(const TlsOptions& options, Rendezvous& rendezvous, Deadline deadline,
                             std::unique_ptr<Communicator>* out) {
  const GroupPlace& place = options.place;
  if (Status s = CheckPlace(place); !s.ok()) return s;
  if (place.size == 1) {  // no peers, no network
    *out = std::move(CreateInProcessGroup(1, place.epoch)[0]);
    return Status::Ok();
  }
  IgnoreBrokenPipes();
  TlsMesh mesh;
  if (Status s = ConnectTlsMesh(options, rendezvous, deadline, &mesh); !s.ok()) return s;
  std::unique_ptr<Transfers> transfers;
  if (Status s = CreateTlsTransfers(place, std::move(mesh), &transfers); !s.ok()) return s;
  auto communicator = MakePeerCommunicator(place, std::move(transfers));
  // Our connections stand; those among the peers may not, and a peer may have refused ours.
  if (Status s = communicator->Barrier(deadline); !s.ok()) return s;
  *out = std::move(communicator);
  return Status::Ok();
}

}  // namespace tributary::collective
