#include "service/client/groups/targets.h"

#include <netdb.h>
#include <sys/socket.h>

#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/status/errors.h"

namespace tributary::client {
namespace {

constexpr char kScheme[] = "groups:";

absl::Status BadTarget(absl::string_view target, absl::string_view why) {
  return InvalidField("target", absl::StrCat("'", target, "' ", why));
}

}  // namespace

bool NamesGroups(absl::string_view target) {
  return absl::StartsWith(target, kScheme) || absl::StrContains(target, ',');
}

absl::StatusOr<GroupTargets> ParseGroupTargets(absl::string_view target) {
  GroupTargets targets;
  absl::string_view rest = target;
  if (absl::ConsumePrefix(&rest, kScheme)) {
    const size_t colon = rest.rfind(':');
    if (colon == absl::string_view::npos || colon == 0 || colon + 1 == rest.size() ||
        absl::StrContains(rest, ',')) {
      return BadTarget(target, "must be groups:NAME:PORT");
    }
    targets.name = std::string(rest.substr(0, colon));
    targets.port = std::string(rest.substr(colon + 1));
    return targets;
  }
  for (const absl::string_view one : absl::StrSplit(target, ',')) {
    if (one.empty()) return BadTarget(target, "has an address without a character");
    targets.fixed.emplace_back(one);
  }
  if (std::set<std::string>(targets.fixed.begin(), targets.fixed.end()).size() <
      targets.fixed.size()) {
    return BadTarget(target, "has an address twice");
  }
  return targets;
}

absl::StatusOr<std::vector<std::string>> ResolveGroups(const std::string& name,
                                                       const std::string& port) {
  addrinfo wanted{};
  wanted.ai_family = AF_UNSPEC;
  wanted.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(name.c_str(), port.c_str(), &wanted, &found);
  if (error != 0) {
    return absl::UnavailableError(
        absl::StrCat("cannot resolve '", name, "', port ", port, ": ", gai_strerror(error)));
  }
  std::set<std::string> targets;
  for (const addrinfo* a = found; a != nullptr; a = a->ai_next) {
    char host[NI_MAXHOST], service[NI_MAXSERV];
    if (getnameinfo(a->ai_addr, a->ai_addrlen, host, sizeof host, service, sizeof service,
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
      continue;
    }
    targets.insert(a->ai_family == AF_INET6 ? absl::StrCat("ipv6:[", host, "]:", service)
                                            : absl::StrCat("ipv4:", host, ":", service));
  }
  freeaddrinfo(found);
  if (targets.empty()) return absl::UnavailableError(absl::StrCat("'", name, "' has no address"));
  return std::vector<std::string>(targets.begin(), targets.end());
}

std::string NameOfGroups(absl::string_view target) {
  if (!NamesGroups(target)) return "";
  const absl::StatusOr<GroupTargets> targets = ParseGroupTargets(target);
  return targets.ok() ? targets->name : "";
}

void NameServer(const std::string& name, ChannelSecurity* security) {
  if (security->tls.authorities.empty() || !security->server_name.empty()) return;
  security->server_name = name;
}

absl::StatusOr<std::vector<std::string>> GroupsOf(absl::string_view target) {
  if (!NamesGroups(target)) return std::vector<std::string>{std::string(target)};
  const absl::StatusOr<GroupTargets> targets = ParseGroupTargets(target);
  if (!targets.ok()) return targets.status();
  if (targets->name.empty()) return targets->fixed;
  return ResolveGroups(targets->name, targets->port);
}

}  // namespace tributary::client
