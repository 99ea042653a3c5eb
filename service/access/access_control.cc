#include "service/access/access_control.h"

#include <grpcpp/security/auth_context.h>
#include <unistd.h>

#include <chrono>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/rpc/watched_file.h"
#include "base/status/errors.h"
#include "base/status/status_macros.h"
#include "base/sync/mutex.h"
#include "service/access/peer.h"

namespace tributary::service {
namespace {

constexpr size_t kShortestToken = 16;
constexpr std::chrono::milliseconds kTokenLook{1'000};
constexpr char kAnonymous[] = "anonymous";

absl::Status BadLine(int line, absl::string_view why) {
  return InvalidField("token_file", absl::StrCat("line ", line, ": ", why));
}

absl::StatusOr<TokenEntry> ParseLine(int number, absl::string_view line) {
  const std::vector<absl::string_view> words =
      absl::StrSplit(line, absl::ByAnyChar(" \t"), absl::SkipEmpty());
  if (words.size() != 3) return BadLine(number, "must be: name role[,role] token");
  TokenEntry entry{.name = std::string(words[0]), .roles = {}, .token = std::string(words[2])};
  for (const absl::string_view name : absl::StrSplit(words[1], ',')) {
    Role role;
    if (!Parse(name, &role)) {
      return BadLine(number, absl::StrCat("no role '", name, "': client, worker or admin"));
    }
    entry.roles.Add(role);
  }
  if (entry.token.size() < kShortestToken) {
    return BadLine(number, absl::StrCat("a token has at least ", kShortestToken, " characters"));
  }
  return entry;
}

class AccessControlImpl final : public AccessControl {
 public:
  explicit AccessControlImpl(AccessOptions options) : options_(std::move(options)) {
    if (!options_.token_file.empty()) {
      file_ = std::make_unique<WatchedFile>(options_.token_file, kTokenLook);
    }
  }

  absl::Status Load() {
    if (file_ == nullptr) return absl::OkStatus();
    const absl::StatusOr<std::string> text = file_->Read();
    if (!text.ok()) return InvalidField("token_file", text.status().message());
    TRIBUTARY_ASSIGN_OR_RETURN(auto tokens, ParseTokens(*text));
    const MutexLock lock(mutex_);
    tokens_ = std::make_shared<const std::vector<TokenEntry>>(std::move(tokens));
    return absl::OkStatus();
  }

  absl::StatusOr<Caller> Authorize(const Presented& presented,
                                   std::initializer_list<Role> roles) override {
    if (open()) return Unnamed(presented);
    std::string name;
    const RoleSet held = Identify(presented, &name);
    if (held.empty()) {
      return absl::UnauthenticatedError(presented.token.empty()
                                            ? "no token and no known certificate was shown"
                                            : "the token is not known here");
    }
    std::vector<std::string> wanted;
    for (const Role role : roles) {
      if (held.Has(role)) return Caller{.name = name, .manages_all = held.Has(Role::kAdmin)};
      wanted.push_back(Name(role));
    }
    return absl::PermissionDeniedError(
        absl::StrCat("'", name, "' does not have the role ", absl::StrJoin(wanted, " or ")));
  }

 private:
  bool open() const {
    return file_ == nullptr && options_.client_names.empty() && options_.worker_names.empty() &&
           options_.admin_names.empty();
  }

  // The caller, where nobody needs to show a token or a name.
  static Caller Unnamed(const Presented& presented) {
    if (!presented.names.empty()) return {.name = presented.names.front(), .manages_all = true};
    if (!presented.user.has_value()) return {.name = kAnonymous, .manages_all = true};
    const uid_t user = *presented.user;
    if (user == kUnknownUser) return {.name = "uid:unknown", .manages_all = false};
    return {.name = absl::StrCat("uid:", user), .manages_all = user == 0 || user == geteuid()};
  }

  // The roles of all that was shown, and by what name the caller goes.
  RoleSet Identify(const Presented& presented, std::string* name) {
    RoleSet roles;
    if (!presented.token.empty() && file_ != nullptr) {
      const auto tokens = Tokens();
      for (const TokenEntry& entry : *tokens) {
        if (!SameSecret(entry.token, presented.token)) continue;
        roles = entry.roles;
        *name = entry.name;
      }
    }
    AddNamed(options_.client_names, Role::kClient, presented, &roles, name);
    AddNamed(options_.worker_names, Role::kWorker, presented, &roles, name);
    AddNamed(options_.admin_names, Role::kAdmin, presented, &roles, name);
    return roles;
  }

  static void AddNamed(const std::vector<std::string>& patterns, Role role,
                       const Presented& presented, RoleSet* roles, std::string* name) {
    for (const std::string& pattern : patterns) {
      for (const std::string& shown : presented.names) {
        if (!MatchesName(pattern, shown)) continue;
        roles->Add(role);
        if (name->empty()) *name = shown;
      }
    }
  }

  // As the file is now; a file that has become unusable leaves the tokens as they were.
  std::shared_ptr<const std::vector<TokenEntry>> Tokens() {
    // Read under the lock, or what was read first might be kept last.
    const MutexLock lock(mutex_);
    bool changed = false;
    const absl::StatusOr<std::string> text = file_->Read(&changed);
    if (text.ok() && changed) {
      absl::StatusOr<std::vector<TokenEntry>> tokens = ParseTokens(*text);
      if (tokens.ok()) {
        tokens_ = std::make_shared<const std::vector<TokenEntry>>(*std::move(tokens));
      }
    }
    return tokens_;
  }

  const AccessOptions options_;
  std::unique_ptr<WatchedFile> file_;
  Mutex mutex_;
  std::shared_ptr<const std::vector<TokenEntry>> tokens_ TRIBUTARY_GUARDED_BY(mutex_);
};

}  // namespace

bool SameSecret(absl::string_view a, absl::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned char difference = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference |= static_cast<unsigned char>(a[i] ^ b[i]);
  }
  return difference == 0;
}

const char* Name(Role role) {
  switch (role) {
    case Role::kClient:
      return "client";
    case Role::kWorker:
      return "worker";
    case Role::kAdmin:
      return "admin";
  }
  return "";
}

bool Parse(absl::string_view name, Role* role) {
  for (const Role r : {Role::kClient, Role::kWorker, Role::kAdmin}) {
    if (name != Name(r)) continue;
    *role = r;
    return true;
  }
  return false;
}

absl::StatusOr<std::vector<TokenEntry>> ParseTokens(absl::string_view text) {
  std::vector<TokenEntry> entries;
  int number = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    line = absl::StripAsciiWhitespace(line);
    if (line.empty() || line[0] == '#') continue;
    TRIBUTARY_ASSIGN_OR_RETURN(TokenEntry entry, ParseLine(number, line));
    for (const TokenEntry& other : entries) {
      if (other.token == entry.token) return BadLine(number, "the token was given before");
    }
    entries.push_back(std::move(entry));
  }
  if (entries.empty()) return InvalidField("token_file", "holds no token");
  return entries;
}

bool MatchesName(absl::string_view pattern, absl::string_view name) {
  if (!absl::ConsumePrefix(&pattern, "*.")) return pattern == name;
  const size_t dot = name.find('.');
  return dot != absl::string_view::npos && dot > 0 && name.substr(dot + 1) == pattern;
}

absl::StatusOr<std::shared_ptr<AccessControl>> AccessControl::Create(const AccessOptions& options) {
  auto access = std::make_shared<AccessControlImpl>(options);
  TRIBUTARY_RETURN_IF_ERROR(access->Load());
  return std::shared_ptr<AccessControl>(std::move(access));
}

Presented AccessControl::ShownBy(const grpc::ServerContextBase& context) {
  Presented presented;
  const auto header = context.client_metadata().find("authorization");
  if (header != context.client_metadata().end()) {
    absl::string_view value(header->second.data(), header->second.size());
    if (absl::StartsWithIgnoreCase(value, "bearer ")) {
      presented.token = std::string(absl::StripAsciiWhitespace(value.substr(7)));
    }
  }
  const std::shared_ptr<const grpc::AuthContext> peer = context.auth_context();
  if (peer != nullptr && peer->IsPeerAuthenticated()) {
    for (const grpc::string_ref& name : peer->FindPropertyValues("x509_subject_alternative_name")) {
      presented.names.emplace_back(name.data(), name.size());
    }
  }
  presented.user = UserOf(context.peer());
  return presented;
}

absl::StatusOr<Caller> AccessControl::Authorize(const grpc::ServerContextBase& context,
                                                std::initializer_list<Role> roles) {
  return Authorize(ShownBy(context), roles);
}

}  // namespace tributary::service
