#include "collective/peers/announcement.h"

#include <cstdint>

namespace tributary::collective {
namespace {

std::string KeyOf(std::string_view transport, uint64_t epoch, int rank) {
  return "tributary/" + std::string(transport) + "/" + std::to_string(epoch) + "/" +
         std::to_string(rank);
}

}  // namespace

Status Announce(std::string_view transport, const GroupPlace& place, const std::string& body,
                Rendezvous& rendezvous) {
  return rendezvous.Set(KeyOf(transport, place.epoch, place.rank),
                        std::to_string(place.size) + "\n" + body);
}

Status AwaitAnnouncement(std::string_view transport, const GroupPlace& place, int peer,
                         Rendezvous& rendezvous, Deadline deadline, std::string* body) {
  const std::string who = "rank " + std::to_string(peer);
  std::string text;
  if (Status s = rendezvous.Get(KeyOf(transport, place.epoch, peer), &text, deadline); !s.ok()) {
    return {s.code(), who + " did not announce itself: " + s.message()};
  }
  const size_t header = text.find('\n');
  if (header == std::string::npos) {
    return {StatusCode::kInternal, who + " published something that is not an address"};
  }
  if (text.substr(0, header) != std::to_string(place.size)) {
    return {StatusCode::kFailedPrecondition, who + " expects a group of " + text.substr(0, header) +
                                                 " ranks, rank " + std::to_string(place.rank) +
                                                 " one of " + std::to_string(place.size)};
  }
  *body = text.substr(header + 1);
  return Status::Ok();
}

}  // namespace tributary::collective
