#include "collective/transport/transport.h"

#include <string>

#include "collective/gloo/gloo.h"
#include "collective/peers/announcement.h"
#include "collective/tls/tls.h"

namespace tributary::collective {

const char* Describe(Transport transport) {
  switch (transport) {
    case Transport::kGloo:
      return "Gloo over TCP";
    case Transport::kTls:
      return "TCP under TLS 1.3";
  }
  return "?";
}

Status AgreeOnTransport(Transport own, const GroupPlace& place, Rendezvous& rendezvous,
                        Deadline deadline) {
  if (Status s = CheckPlace(place); !s.ok()) return s;
  if (Status s = Announce("transport", place, Describe(own), rendezvous); !s.ok()) return s;
  for (int peer = 0; peer < place.size; ++peer) {
    if (peer == place.rank) continue;
    std::string theirs;
    if (Status s = AwaitAnnouncement("transport", place, peer, rendezvous, deadline, &theirs);
        !s.ok()) {
      return s;
    }
    if (theirs != Describe(own)) {
      return {StatusCode::kFailedPrecondition,
              "rank " + std::to_string(peer) + " reaches its peers by " + theirs + ", rank " +
                  std::to_string(place.rank) + " by " + Describe(own)};
    }
  }
  return Status::Ok();
}

Status CreatePeerCommunicator(Transport transport, const GroupPlace& place, Rendezvous& rendezvous,
                              Deadline deadline, std::unique_ptr<Communicator>* out) {
  return transport == Transport::kTls
             ? CreateTlsCommunicator({.place = place}, rendezvous, deadline, out)
             : CreateGlooCommunicator(place, rendezvous, deadline, out);
}

}  // namespace tributary::collective
