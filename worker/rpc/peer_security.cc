#include "worker/rpc/peer_security.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status/errors.h"
#include "worker/rpc/protocol.h"

namespace tributary::worker {
namespace {

bool SpeaksTls(const ChannelSecurity& security) { return !security.tls.authorities.empty(); }

}  // namespace

bool Parse(absl::string_view text, PeerTls* out) {
  if (text == "auto") {
    *out = PeerTls::kAuto;
  } else if (text == "always") {
    *out = PeerTls::kAlways;
  } else if (text == "never") {
    *out = PeerTls::kNever;
  } else {
    return false;
  }
  return true;
}

absl::Status CheckPeerTls(PeerTls wanted, const std::string& coordinator,
                          const ChannelSecurity& security) {
  const bool safe = SpeaksTls(security) || absl::StartsWith(coordinator, "unix:");
  if (wanted != PeerTls::kAlways || safe) return absl::OkStatus();
  return InvalidField(
      "peer_tls",
      "is always, and the coordinator would say in plain text whom to trust: --tls_ca "
      "must be given");
}

absl::StatusOr<collective::Transport> ChooseTransport(PeerTls wanted,
                                                      const ChannelSecurity& security,
                                                      uint32_t protocol) {
  const bool wants =
      wanted == PeerTls::kAlways || (wanted == PeerTls::kAuto && SpeaksTls(security));
  if (!wants) return collective::Transport::kGloo;
  if (protocol >= kPeerTlsProtocol) return collective::Transport::kTls;
  if (wanted == PeerTls::kAuto) return collective::Transport::kGloo;
  return absl::FailedPreconditionError(
      absl::StrCat("peer_tls is always, and a worker of the group speaks protocol version ",
                   protocol, ", which has no TLS between workers (", kPeerTlsProtocol, " has it)"));
}

std::string DescribeExchange(int ranks, const std::string& of_devices,
                             collective::Transport transport) {
  if (ranks == 1) return "";
  const char* by = collective::Describe(transport);
  return of_devices.empty() ? absl::StrCat("partials meet in host memory, by ", by)
                            : absl::StrCat(of_devices, "; workers reach each other by ", by);
}

}  // namespace tributary::worker
