#include "tests/fault/machine.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace tributary::test {
namespace {

constexpr char kIp[] = "/usr/sbin/ip";
constexpr char kFakeTime[] = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1";

// Whether the command succeeds.
bool Ip(const std::string& arguments) {
  const std::string command = std::string(kIp) + " " + arguments + " >/dev/null 2>&1";
  return std::system(command.c_str()) == 0;
}

// Names of interfaces have fifteen characters at most.
std::string Mine(const std::string& name) { return "tb" + std::to_string(getpid()) + name; }

}  // namespace

PeerNetwork::~PeerNetwork() {
  if (!made_) return;
  for (int rank = 0; rank < workers_; ++rank) Ip("netns del " + NameOf(rank));
  Ip("link del " + Mine("b"));
}

std::string PeerNetwork::NameOf(int rank) const { return Mine("n" + std::to_string(rank)); }

std::string PeerNetwork::AddressOf(int rank) { return "10.77.0." + std::to_string(rank + 1); }

std::string PeerNetwork::host(int rank) const { return made_ ? AddressOf(rank) : ""; }

std::string PeerNetwork::Make() {
  if (made_) return "";
  if (!std::filesystem::exists(kIp)) return "there is no /usr/sbin/ip (Debian: iproute2)";
  made_ = true;  // what there is of it is taken down
  bool ok = Ip("link add " + Mine("b") + " type bridge") && Ip("link set " + Mine("b") + " up");
  for (int rank = 0; rank < workers_ && ok; ++rank) {
    const std::string outside = Mine("o" + std::to_string(rank)), name = NameOf(rank);
    ok = Ip("netns add " + name) &&
         Ip("link add " + outside + " type veth peer name eth0 netns " + name) &&
         Ip("link set " + outside + " master " + Mine("b")) && Ip("link set " + outside + " up") &&
         Ip("-n " + name + " addr add " + AddressOf(rank) + "/24 dev eth0") &&
         Ip("-n " + name + " link set eth0 up") && Ip("-n " + name + " link set lo up");
  }
  if (ok) return "";
  for (int rank = 0; rank < workers_; ++rank) Ip("netns del " + NameOf(rank));
  Ip("link del " + Mine("b"));
  made_ = false;
  return "no network namespaces can be made: that takes root's rights";
}

Launcher PeerNetwork::launcher(int rank) const {
  if (!made_) return {};
  return {kIp, "netns", "exec", NameOf(rank)};
}

void PeerNetwork::Cut(int rank) const {
  Ip("link set " + Mine("o" + std::to_string(rank)) + " nomaster");
}

void PeerNetwork::Mend(int rank) const {
  Ip("link set " + Mine("o" + std::to_string(rank)) + " master " + Mine("b"));
}

std::string MovableClock::Make(const TemporaryDirectory& directory) {
  if (!std::filesystem::exists(kFakeTime)) {
    return std::string("there is no ") + kFakeTime + " (Debian: libfaketime)";
  }
  file_ = directory.File("clock");
  Jump(std::chrono::seconds(0));
  launcher_ = {"/usr/bin/env", std::string("LD_PRELOAD=") + kFakeTime,
               "FAKETIME_DONT_FAKE_MONOTONIC=1", "FAKETIME_CACHE_DURATION=1",
               "FAKETIME_TIMESTAMP_FILE=" + file_};
  return "";
}

void MovableClock::Jump(std::chrono::seconds by) {
  offset_ += by;
  char text[32];
  std::snprintf(text, sizeof text, "%+lld", static_cast<long long>(offset_.count()));
  std::ofstream(file_ + ".new") << text << "\n";
  std::filesystem::rename(file_ + ".new", file_);
}

}  // namespace tributary::test
