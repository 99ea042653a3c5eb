// The flags by which commands reach a service.
#pragma once

#include <string>

#include "base/rpc/channel_security.h"
#include "service/cli/flag_set.h"

namespace tributary::cli {

// --target with `target_help`, and what it takes to be believed and to believe: --tls_ca,
// --tls_cert, --tls_key, --token_file.
void AddConnectFlags(FlagSet& flags, std::string* target, const std::string& target_help,
                     ChannelSecurity* security);

}  // namespace tributary::cli
