#include "service/access/peer.h"

#include <string>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "base/rpc/tls.h"
#include "base/rpc/unix_address.h"

namespace tributary::service {

namespace {

// The prefix by which gRPC names a connection that it was given; its descriptor's number follows.
constexpr char kGiven[] = "fd:";

}  // namespace

bool CameThroughUnixSocket(absl::string_view peer) {
  return absl::StartsWith(peer, kGiven) || absl::StartsWith(peer, "unix:");
}

std::optional<uid_t> UserOf(absl::string_view peer) {
  if (!absl::ConsumePrefix(&peer, kGiven)) return std::nullopt;
  int connection = -1;
  if (!absl::SimpleAtoi(peer, &connection)) return kUnknownUser;
  return UserAt(connection).value_or(kUnknownUser);
}

bool IsOnThisMachine(absl::string_view peer) {
  if (CameThroughUnixSocket(peer)) return true;
  // gRPC writes the brackets of IPv6 addresses as URIs want it.
  std::string address = absl::StrReplaceAll(peer, {{"%5B", "["}, {"%5D", "]"}});
  // A server that listens on all addresses sees IPv4 in IPv6.
  const std::string mapped = "ipv6:[::ffff:127.";
  if (absl::StartsWith(address, mapped)) return true;
  return IsLocalAddress(address);
}

}  // namespace tributary::service
