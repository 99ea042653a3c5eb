// Whether what workers say to each other is encrypted: pure functions.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/rpc/security_options.h"
#include "collective/transport/transport.h"

namespace tributary::worker {

// The worker's --peer_tls.
enum class PeerTls : uint8_t {
  kAuto,    // TLS where the coordinator is spoken to by TLS, unless a build of the group has none
  kAlways,  // TLS, or no group
  kNever,
};

// False when it is none of "auto", "always" and "never".
bool Parse(absl::string_view text, PeerTls* out);

// kInvalidArgument, naming peer_tls: the worker would learn in plain text, from a coordinator
// beyond this machine, whom it is to trust.
absl::Status CheckPeerTls(PeerTls wanted, const std::string& coordinator,
                          const ChannelSecurity& security);

// How a worker reaches its peers in an epoch of this protocol version, which all ranks share.
// kFailedPrecondition: TLS is wanted, and another worker's build does not have it.
absl::StatusOr<collective::Transport> ChooseTransport(PeerTls wanted,
                                                      const ChannelSecurity& security,
                                                      uint32_t protocol);

// What `topology` says of a group in which ranks reach each other like this. `of_devices` is what
// the backend says of where partials meet; empty: in host memory.
std::string DescribeExchange(int ranks, const std::string& of_devices,
                             collective::Transport transport);

}  // namespace tributary::worker
