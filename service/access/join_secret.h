// A secret that workers show when they register, besides or instead of what access control asks of
// them: whoever reaches the address where workers register could otherwise be given a rank, and
// with it what the group computes.
#pragma once

#include <grpcpp/server_context.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/rpc/watched_file.h"

namespace tributary::service {

// Thread safe.
class JoinSecret {
 public:
  // The secret is the first line of the file, 16 characters or more, none of them blank. The file
  // is read again when it changes; INVALID_ARGUMENT ("join_secret_file") when it cannot be used
  // now.
  static absl::StatusOr<std::shared_ptr<JoinSecret>> Create(const std::string& file);

  // UNAUTHENTICATED unless the caller showed the secret.
  absl::Status Check(const grpc::ServerContextBase& context);
  absl::Status CheckShown(const std::string& shown);

 private:
  explicit JoinSecret(const std::string& file);

  WatchedFile file_;
};

}  // namespace tributary::service
