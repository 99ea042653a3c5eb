#include "tests/fault/link.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <utility>

namespace tributary::test {
namespace {

constexpr int kPollMs = 20;

sockaddr_un AddressOf(const std::string& path) {
  sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  return address;
}

bool Readable(int file) {
  pollfd waiting{.fd = file, .events = POLLIN, .revents = 0};
  return poll(&waiting, 1, kPollMs) > 0;
}

bool WriteAll(int file, const char* data, ssize_t size) {
  while (size > 0) {
    const ssize_t written = send(file, data, static_cast<size_t>(size), MSG_NOSIGNAL);
    if (written <= 0) return false;
    data += written;
    size -= written;
  }
  return true;
}

}  // namespace

Link::Link(std::string path, std::string target)
    : path_(std::move(path)), target_(std::move(target)) {
  listening_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const sockaddr_un address = AddressOf(path_);
  if (listening_ < 0 ||
      bind(listening_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      listen(listening_, 8) != 0) {
    throw std::runtime_error("cannot listen at " + path_);
  }
  accepting_ = std::thread([this] { Accept(); });
}

Link::~Link() {
  stopping_ = true;
  accepting_.join();
  close(listening_);
}

void Link::Accept() {
  std::vector<std::thread> connections;
  while (!stopping_) {
    if (!Readable(listening_)) continue;
    const int from = accept4(listening_, nullptr, nullptr, SOCK_CLOEXEC);
    if (from < 0) continue;
    const int to = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const sockaddr_un address = AddressOf(target_);
    if (connect(to, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
      close(from);
      close(to);
      continue;
    }
    // Whoever is the last to let go of the two closes them.
    const auto both = std::shared_ptr<void>(nullptr, [from, to](void*) {
      close(from);
      close(to);
    });
    connections.emplace_back([this, both, from, to] { Carry(from, to); });
    connections.emplace_back([this, both, from, to] { Carry(to, from); });
  }
  for (std::thread& connection : connections) connection.join();
}

void Link::Carry(int from, int to) {
  std::array<char, 64 * 1024> bytes;
  while (!stopping_) {
    if (cut_) {
      std::this_thread::sleep_for(std::chrono::milliseconds(kPollMs));
      continue;
    }
    if (!Readable(from)) continue;
    const ssize_t read = recv(from, bytes.data(), bytes.size(), 0);
    if (read <= 0) break;
    std::this_thread::sleep_for(delay_.load());
    while (cut_ && !stopping_) std::this_thread::sleep_for(std::chrono::milliseconds(kPollMs));
    if (!WriteAll(to, bytes.data(), read)) break;
  }
  shutdown(from, SHUT_RDWR);
  shutdown(to, SHUT_RDWR);
}

}  // namespace tributary::test
