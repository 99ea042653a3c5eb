// Ranks as processes, over Gloo's TCP transport.
//
// A rank that is gone breaks the communicators of its peers at once, also between operations. A
// rank that hangs is noticed at the deadline of the first peer to reach it; the others then lose
// that peer (kUnavailable). An abort, too, is seen by peers as a lost rank. When ranks enter
// different operations, or the same with different sizes, all of them run into their deadlines.
//
// Traffic is neither encrypted nor authenticated: keep it inside a network that only ranks reach,
// or take the communicator of tls/tls.h.
#pragma once

#include <memory>

#include "collective/communicator.h"
#include "collective/peers/group_place.h"
#include "collective/rendezvous/rendezvous.h"

namespace tributary::collective {

// Connects to every peer; returns when all ranks did or the deadline passed. Keys put into the
// rendezvous carry the epoch, so a store may serve many generations. An epoch is used once: after a
// failure the next attempt takes a new one, or it may meet the addresses of this one.
//
// kInvalidArgument: rank, size or host; kFailedPrecondition: a rank expects a group of another
// size, or this build has no Gloo; kDeadlineExceeded: the rank named did not come; kUnavailable: it
// came and is gone.
//
// Ignores SIGPIPE, unless the process handles it: Gloo writes to sockets whose peer may be gone.
Status CreateGlooCommunicator(const GroupPlace& place, Rendezvous& rendezvous, Deadline deadline,
                              std::unique_ptr<Communicator>* out);

}  // namespace tributary::collective
