// What both ends of a session must agree on before they can talk.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

namespace tributary::worker {

// The version of worker.proto. It is raised by a change that an older end would misread, in that
// file or in what the ranks of a group take for granted of each other: how an exchange is chosen
// and cut, and what goes over its connections.
inline constexpr uint32_t kProtocolVersion = 11;
// The oldest version that this build speaks, too. It is raised only when no build is left that
// speaks no newer one: at least one version before kProtocolVersion is spoken.
inline constexpr uint32_t kMinProtocolVersion = 7;

// The first version in which the number of ranks may change while a group lives.
inline constexpr uint32_t kRankChangeProtocol = 9;
// The first version in which endpoints may share a mailbox on a GPU, and layers are timed there.
inline constexpr uint32_t kSharedMailboxProtocol = 9;
// The first version in which ranks say, before they connect, how they reach each other, and may do
// so under TLS; and in which a rank that is Ready says how partials meet.
inline constexpr uint32_t kPeerTlsProtocol = 10;
// The first version in which pages go in memory that ranks of one machine share
// (worker/parcel_lanes.h).
inline constexpr uint32_t kParcelLaneProtocol = 11;

// The versions that an end speaks: all of minimum .. current.
struct ProtocolRange {
  uint32_t minimum = 0;
  uint32_t current = 0;
};

// What this program speaks.
ProtocolRange SpokenProtocol();

// The highest version that both ends speak; nothing when there is none.
inline std::optional<uint32_t> CommonProtocol(const ProtocolRange& one,
                                              const ProtocolRange& other) {
  const uint32_t common = std::min(one.current, other.current);
  if (common < std::max(one.minimum, other.minimum)) return std::nullopt;
  return common;
}

}  // namespace tributary::worker
