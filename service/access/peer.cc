#include "service/access/peer.h"

#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "base/rpc/tls.h"

namespace tributary::service {

bool IsOnThisMachine(absl::string_view peer) {
  // gRPC writes the brackets of IPv6 addresses as URIs want it.
  std::string address = absl::StrReplaceAll(peer, {{"%5B", "["}, {"%5D", "]"}});
  // A server that listens on all addresses sees IPv4 in IPv6.
  const std::string mapped = "ipv6:[::ffff:127.";
  if (absl::StartsWith(address, mapped)) return true;
  return IsLocalAddress(address);
}

}  // namespace tributary::service
