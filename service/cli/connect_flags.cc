#include "service/cli/connect_flags.h"

#include "absl/strings/match.h"
#include "base/status/errors.h"

namespace tributary::cli {

void AddConnectFlags(FlagSet& flags, std::string* target, const std::string& target_help,
                     ChannelSecurity* security) {
  flags.Add("target", target, target_help);
  flags.Add("tls_ca", &security->tls.authorities,
            "One of the authorities in this PEM file must have signed the service's certificate; "
            "when empty, the connection is plain text.");
  flags.Add("tls_cert", &security->tls.certificate,
            "This PEM file holds a certificate to show to a service that asks for one.");
  flags.Add("tls_key", &security->tls.key, "This PEM file holds the certificate's key.");
  flags.Add("tls_server_name", &security->server_name,
            "The service's certificate must have this name; when empty, that of the host in "
            "--target. A Unix socket's is localhost.");
  flags.Add("token_file", &security->token_file,
            "The first line of this file is the bearer token to show to the service.");
}

bool NamesConnectFlag(const absl::Status& status) {
  const std::string field = FieldOf(status);
  return absl::StartsWith(field, "tls_") || field == "token_file" || field == "target";
}

}  // namespace tributary::cli
