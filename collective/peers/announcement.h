// What a rank publishes in the rendezvous for the peers that connect to it.
#pragma once

#include <string>
#include <string_view>

#include "collective/communicator.h"
#include "collective/peers/group_place.h"
#include "collective/rendezvous/rendezvous.h"
#include "kernels/status.h"

namespace tributary::collective {

// Publishes `body`, which is `transport`'s own, and the size of the group that this rank believes
// in. Keys carry the epoch and the transport, so a store may serve many generations.
Status Announce(std::string_view transport, const GroupPlace& place, const std::string& body,
                Rendezvous& rendezvous);

// Waits for what `peer` announced. kFailedPrecondition: it expects a group of another size;
// kInternal: it published something else; other errors are the rendezvous'. All name the peer.
Status AwaitAnnouncement(std::string_view transport, const GroupPlace& place, int peer,
                         Rendezvous& rendezvous, Deadline deadline, std::string* body);

}  // namespace tributary::collective
