#include "service/client/hand_over.h"

#include <sys/random.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/rpc/descriptor.h"
#include "base/rpc/pass_descriptor.h"
#include "base/rpc/unix_address.h"
#include "base/status/status_macros.h"

namespace tributary::client {
namespace {

constexpr size_t kSecretBytes = 16;

}  // namespace

absl::StatusOr<std::string> HandOver(absl::string_view service_path, int memory,
                                     std::chrono::steady_clock::time_point deadline) {
  std::string secret(kSecretBytes, '\0');
  // So few bytes arrive all at once or not at all.
  if (getrandom(secret.data(), secret.size(), 0) != static_cast<ssize_t>(secret.size())) {
    return absl::InternalError("the system has no random bytes");
  }
  TRIBUTARY_ASSIGN_OR_RETURN(const int connected,
                             ConnectToUnixBy(CompanionSocketOf(service_path), deadline));
  const Descriptor connection(connected);
  if (!SendWithDescriptor(connection.get(), secret, memory)) {
    return absl::UnavailableError(
        absl::StrCat("handing over shared memory: ", std::strerror(errno)));
  }
  TRIBUTARY_RETURN_IF_ERROR(AwaitReadable(connection.get(), deadline));
  char taken = 0;
  if (recv(connection.get(), &taken, sizeof(taken), 0) != sizeof(taken)) {
    return absl::UnavailableError("the service takes no shared memory now");
  }
  return secret;
}

}  // namespace tributary::client
