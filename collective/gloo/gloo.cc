#include "collective/gloo/gloo.h"

#include <utility>

#include "collective/gloo/gloo_mesh.h"
#include "collective/gloo/gloo_transfers.h"
#include "collective/in_process.h"
#include "collective/peers/broken_pipes.h"
#include "collective/peers/peer_communicator.h"

namespace tributary::collective {

Status CreateGlooCommunicator(const GroupPlace& place, Rendezvous& rendezvous, Deadline deadline,
                              std::unique_ptr<Communicator>* out) {
  if (Status s = CheckPlace(place); !s.ok()) return s;
  if (place.size == 1) {  // no peers, no network
    *out = std::move(CreateInProcessGroup(1, place.epoch)[0]);
    return Status::Ok();
  }
  IgnoreBrokenPipes();
  GlooMesh mesh;
  if (Status s = ConnectMesh(place, rendezvous, deadline, &mesh); !s.ok()) return s;
  auto communicator =
      MakePeerCommunicator(place, std::make_unique<GlooTransfers>(place, std::move(mesh)));
  // Our connections stand; those among the peers may not.
  if (Status s = communicator->Barrier(deadline); !s.ok()) return s;
  *out = std::move(communicator);
  return Status::Ok();
}

}  // namespace tributary::collective
