// Why a connection could not be made, in words that say what to do about it.
#pragma once

#include <string>

#include "absl/strings/string_view.h"
#include "base/rpc/security_options.h"

namespace tributary {

// What gRPC's message about a failed connection to `target` means: nobody listens, no such name, or
// which part of TLS failed: the name in the certificate, trust in it, a certificate that is
// missing, or one end that speaks plain text. Flags are named as all programs spell them. A message
// that is not known comes back as it is, after the target.
std::string ExplainConnectionFailure(absl::string_view target, const ChannelSecurity& security,
                                     absl::string_view message);

}  // namespace tributary
