// Who may call what.
//
// A caller is known by a bearer token, which a file lists, or by the names in the certificate that
// it showed (mTLS). It has roles, and every method asks for one. When neither tokens nor names are
// configured, every caller may call everything; then only the choice of the listening address
// protects the service. Callers at the service's Unix socket are then known by the user that they
// run as ("uid:1000"): limits per client hold for that user, and only root and the service's own
// user see and delete what others made.
#pragma once

#include <grpcpp/server_context.h>
#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tributary::service {

enum class Role : uint8_t {
  kClient,  // a model host: caches, sequences, attention
  kWorker,  // registers as a worker
  kAdmin,   // looks at the service's state
};

const char* Name(Role role);
bool Parse(absl::string_view name, Role* role);

class RoleSet {
 public:
  void Add(Role role) { bits_ |= Bit(role); }
  bool Has(Role role) const { return (bits_ & Bit(role)) != 0; }
  bool empty() const { return bits_ == 0; }

 private:
  static uint32_t Bit(Role role) { return 1u << static_cast<uint32_t>(role); }
  uint32_t bits_ = 0;
};

// Whether the two are the same, in a time that depends on their lengths only, so that a secret
// cannot be found out letter by letter.
bool SameSecret(absl::string_view a, absl::string_view b);

// One line of the token file.
struct TokenEntry {
  std::string name;  // the caller's, for limits and logs
  RoleSet roles;
  std::string token;
};

// Reads lines `name role[,role] token`; '#' begins a comment. INVALID_ARGUMENT names the line, and
// never shows a token.
absl::StatusOr<std::vector<TokenEntry>> ParseTokens(absl::string_view text);

// Whether a name in a certificate matches a pattern: an exact name, or "*.suffix", where the star
// stands for one label, as it does in certificates.
bool MatchesName(absl::string_view pattern, absl::string_view name);

struct AccessOptions {
  std::string token_file;  // empty: none
  // The subject alternative names that have each role.
  std::vector<std::string> client_names;
  std::vector<std::string> worker_names;
  std::vector<std::string> admin_names;
};

// What a caller showed.
struct Presented {
  std::string token;               // empty: none
  std::vector<std::string> names;  // the names in its verified certificate
  std::optional<uid_t> user;       // the user that it runs as (UserOf in peer.h)
};

// Who calls, once the caller was let in.
struct Caller {
  std::string name;  // "uid:N" or "anonymous" when it showed nothing and needs nothing
  // Whether it sees and deletes what others made: it is an admin, or everybody may do everything.
  bool manages_all = false;
};

// Thread safe.
class AccessControl {
 public:
  // INVALID_ARGUMENT ("token_file") when the file cannot be used.
  static absl::StatusOr<std::shared_ptr<AccessControl>> Create(const AccessOptions& options);
  virtual ~AccessControl() = default;

  // UNAUTHENTICATED when the caller showed nothing that is known here, PERMISSION_DENIED when what
  // it showed has other roles than any of `roles`.
  virtual absl::StatusOr<Caller> Authorize(const Presented& presented,
                                           std::initializer_list<Role> roles) = 0;

  // What a caller shows with a call. A stream asks again with it, as long as it is open.
  static Presented ShownBy(const grpc::ServerContextBase& context);
  absl::StatusOr<Caller> Authorize(const grpc::ServerContextBase& context,
                                   std::initializer_list<Role> roles);
};

}  // namespace tributary::service
