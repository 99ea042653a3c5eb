#include "service/cli/connect_flags.h"

namespace tributary::cli {

void AddConnectFlags(FlagSet& flags, std::string* target, const std::string& target_help,
                     ChannelSecurity* security) {
  flags.Add("target", target, target_help);
  flags.Add("tls_ca", &security->tls.authorities,
            "PEM file with the authorities of the service's certificate; empty: plain text");
  flags.Add("tls_cert", &security->tls.certificate,
            "PEM file with a certificate to show a service that asks for one");
  flags.Add("tls_key", &security->tls.key, "PEM file with the certificate's key");
  flags.Add("token_file", &security->token_file,
            "file whose first line is a bearer token to show the service");
}

}  // namespace tributary::cli
