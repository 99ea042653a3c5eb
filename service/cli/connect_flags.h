// The flags by which commands reach a service.
#pragma once

#include <string>

#include "service/cli/flag_set.h"
#include "worker/rpc/channel_security.h"

namespace tributary::cli {

// --target with `target_help`, and what it takes to be believed and to believe: --tls_ca,
// --tls_cert, --tls_key, --token_file.
void AddConnectFlags(FlagSet& flags, std::string* target, const std::string& target_help,
                     worker::ChannelSecurity* security);

}  // namespace tributary::cli
