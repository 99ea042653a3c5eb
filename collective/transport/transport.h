// How the ranks of a group that are processes reach each other.
#pragma once

#include <cstdint>
#include <memory>

#include "collective/communicator.h"
#include "collective/peers/group_place.h"
#include "collective/rendezvous/rendezvous.h"
#include "kernels/status.h"

namespace tributary::collective {

enum class Transport : uint8_t {
  kGloo,  // gloo/gloo.h
  kTls,   // tls/tls.h
};

// For people: "Gloo over TCP", "TCP under TLS 1.3".
const char* Describe(Transport transport);

// Returns when every rank has said what it speaks. kFailedPrecondition, on every rank and naming
// two of them: they do not all speak the same. Other errors are those of the rendezvous, and say
// for whom this rank waited.
Status AgreeOnTransport(Transport own, const GroupPlace& place, Rendezvous& rendezvous,
                        Deadline deadline);

// Connects to every peer, as CreateGlooCommunicator and CreateTlsCommunicator say.
Status CreatePeerCommunicator(Transport transport, const GroupPlace& place, Rendezvous& rendezvous,
                              Deadline deadline, std::unique_ptr<Communicator>* out);

}  // namespace tributary::collective
