// The flags by which commands reach a service.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "base/rpc/channel_security.h"
#include "service/cli/flag_set.h"

namespace tributary::cli {

// --target with `target_help`, and what it takes to be believed and to believe: --tls_ca,
// --tls_cert, --tls_key, --tls_server_name, --token_file.
void AddConnectFlags(FlagSet& flags, std::string* target, const std::string& target_help,
                     ChannelSecurity* security);

// Whether an error names one of those flags: then the command was called wrongly.
bool NamesConnectFlag(const absl::Status& status);

}  // namespace tributary::cli
