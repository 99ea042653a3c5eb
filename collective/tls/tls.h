// Ranks as processes, over TCP under TLS 1.3.
//
// Whom a rank trusts: every rank makes a key and a self-signed certificate for the epoch, which
// exist in its memory only, and announces the certificate's SHA-256 fingerprint in the rendezvous.
// Each end of a connection accepts the certificate that its peer announced, and no other. So the
// rendezvous must be one that only ranks write to; authorities, names and dates play no part.
//
// Whoever else connects is sent away, or ignored, without holding up the group. A rank that is gone
// breaks the communicators of its peers at once where they wait for it, else in the next operation
// that needs it. A rank that hangs is noticed at the deadline of the first peer to reach it; the
// others then lose that peer (kUnavailable). An abort, too, is seen by peers as a lost rank. Ranks
// that enter different operations, or the same with different sizes, get kInternal that says what
// each is in.
#pragma once

#include <cstdint>
#include <memory>

#include "collective/communicator.h"
#include "collective/peers/group_place.h"
#include "collective/rendezvous/rendezvous.h"

namespace tributary::collective {

struct TlsOptions {
  GroupPlace place;
  // A connection's sender takes a new key after so many records of 16 KB. AES-GCM may be used for
  // 2^24.5 of them under one key (RFC 8446, 5.5).
  uint64_t records_per_key = uint64_t{1} << 23;
};

// Connects to every peer; returns when all ranks did or the deadline passed. An epoch is used once:
// after a failure the next attempt takes a new one, or it may meet the addresses of this one.
//
// kInvalidArgument: rank, size or host; kFailedPrecondition: a rank expects a group of another
// size, or this build has no OpenSSL; kDeadlineExceeded: the rank named did not come; kUnavailable:
// it came and is gone, or somebody else is at its address.
//
// Ignores SIGPIPE, unless the process handles it.
Status CreateTlsCommunicator(const TlsOptions& options, Rendezvous& rendezvous, Deadline deadline,
                             std::unique_ptr<Communicator>* out);

}  // namespace tributary::collective
