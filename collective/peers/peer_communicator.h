// A communicator between processes, over whatever carries its messages.
#pragma once

#include <memory>

#include "collective/communicator.h"
#include "collective/peers/group_place.h"
#include "collective/peers/transfers.h"

namespace tributary::collective {

// The shapes of operations: what goes to which peer, and what comes of it.
std::unique_ptr<Communicator> MakePeerCommunicator(const GroupPlace& place,
                                                   std::unique_ptr<Transfers> transfers);

}  // namespace tributary::collective
