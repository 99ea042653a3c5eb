// Those who have connected to a rank and not proved yet that they are a peer. Internal to this
// room.
#pragma once

#include <poll.h>

#include <chrono>
#include <cstddef>
#include <functional>
#include <list>
#include <memory>
#include <vector>

#include "base/rpc/descriptor.h"
#include "collective/communicator.h"
#include "collective/tls/tls_connection.h"
#include "collective/tls/tls_identity.h"

namespace tributary::collective {

// Anybody who reaches the port can be one. So each has a short time, and a newcomer takes the place
// of whoever has been there longest when there are too many: who is silent, or speaks anything but
// this group's TLS, holds nobody up.
class TlsStrangers {
 public:
  static constexpr std::chrono::seconds kPatience{5};

  // `most`: so many are there at once. `identity` outlives this.
  TlsStrangers(const TlsIdentity& identity, std::vector<Fingerprint> trusted,
               uint64_t records_per_key, size_t most)
      : identity_(identity),
        trusted_(std::move(trusted)),
        records_per_key_(records_per_key),
        most_(most) {}

  void Add(Descriptor socket);
  // Goes on with everybody's handshake. Those who are through are handed over.
  void Advance(const std::function<void(std::unique_ptr<TlsConnection>)>& proved);

  // What the caller waits for before it calls Advance again, and how long at most.
  void AppendTo(std::vector<pollfd>* waits) const;
  Deadline next_look() const;

 private:
  struct Stranger {
    std::unique_ptr<TlsConnection> connection;
    Deadline until;
  };

  const TlsIdentity& identity_;
  const std::vector<Fingerprint> trusted_;
  const uint64_t records_per_key_;
  const size_t most_;
  std::list<Stranger> strangers_;  // the longest there first
};

}  // namespace tributary::collective
