#include "collective/direct/announcement.h"

#include <cstdlib>
#include <sstream>

#include "collective/rendezvous/hex.h"

namespace tributary::collective {

std::string Announcement::Encode() const {
  std::ostringstream text;
  text << who.host << '\n'
       << who.pid_namespace << '\n'
       << who.pid << '\n'
       << who.process << '\n'
       << who.gpu << '\n'
       << channel_bytes << '\n'
       << address << '\n'
       << ToHex(&handle, sizeof(handle)) << '\n'
       << why_not << '\n';
  return text.str();
}

bool Announcement::Decode(const std::string& encoded) {
  std::istringstream text(encoded);
  std::string number, hex;
  std::getline(text, who.host);
  std::getline(text, who.pid_namespace);
  std::getline(text, number);
  who.pid = std::strtoll(number.c_str(), nullptr, 10);
  std::getline(text, who.process);
  std::getline(text, who.gpu);
  std::getline(text, number);
  channel_bytes = std::strtoull(number.c_str(), nullptr, 10);
  std::getline(text, number);
  address = std::strtoull(number.c_str(), nullptr, 10);
  std::getline(text, hex);
  std::getline(text, why_not);
  return !text.fail() && FromHex(hex, &handle, sizeof(handle));
}

bool SameProcess(const PeerIdentity& a, const PeerIdentity& b) {
  return a.process == b.process && a.pid == b.pid;
}

}  // namespace tributary::collective
