#include "base/telemetry/metrics_server.h"

#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <prometheus/text_serializer.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace tributary::telemetry {
namespace {

using Clock = std::chrono::steady_clock;

// How long a client may take to send its request, and to take the answer. Others wait meanwhile.
constexpr std::chrono::seconds kReadTimeout{2};
constexpr std::chrono::seconds kWriteTimeout{10};
constexpr size_t kLongestHead = 16 << 10;
constexpr int kBacklog = 16;

// Whether `fd` is ready for `events` before the deadline, and `stop` has not become readable.
bool Ready(int fd, short events, int stop, Clock::time_point deadline) {  // NOLINT: poll's type
  for (;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) return false;
    pollfd watched[] = {{fd, events, 0}, {stop, POLLIN, 0}};
    const int ready = poll(watched, 2, static_cast<int>(std::min<int64_t>(left, 60'000)));
    if (ready < 0 && errno != EINTR) return false;
    if (ready > 0) return watched[1].revents == 0;
  }
}

// A socket that listens at the address, or -1.
int Listen(const addrinfo& address) {
  const int fd = socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return -1;
  const int on = 1;
  const int off = 0;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (address.ai_family == AF_INET6) {
    setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
  }
  if (bind(fd, address.ai_addr, address.ai_addrlen) == 0 && listen(fd, kBacklog) == 0) return fd;
  close(fd);
  return -1;
}

int PortOf(int listener) {
  sockaddr_storage bound{};
  socklen_t size = sizeof(bound);
  if (getsockname(listener, reinterpret_cast<sockaddr*>(&bound), &size) != 0) return 0;
  return ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port
                                           : reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
}

std::string Answer(absl::string_view status, absl::string_view type, absl::string_view body,
                   bool with_body) {
  return absl::StrCat("HTTP/1.1 ", status, "\r\nContent-Type: ", type,
                      "\r\nContent-Length: ", body.size(), "\r\nConnection: close\r\n\r\n",
                      with_body ? body : "");
}

}  // namespace

std::string HttpAnswer(absl::string_view head, const std::function<std::string()>& page) {
  constexpr char kPlain[] = "text/plain; charset=utf-8";
  const std::vector<absl::string_view> words =
      absl::StrSplit(head.substr(0, head.find("\r\n")), ' ');
  if (words.size() != 3 || !absl::StartsWith(words[2], "HTTP/1.")) {
    return Answer("400 Bad Request", kPlain, "not HTTP\n", true);
  }
  const bool with_body = words[0] != "HEAD";
  if (words[0] != "GET" && words[0] != "HEAD") {
    return Answer("405 Method Not Allowed", kPlain, "GET or HEAD\n", true);
  }
  if (words[1].substr(0, words[1].find('?')) != "/metrics") {
    return Answer("404 Not Found", kPlain, "there is /metrics\n", with_body);
  }
  return Answer("200 OK", "text/plain; version=0.0.4; charset=utf-8", page(), with_body);
}

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(
    const std::string& host, int port, std::vector<std::shared_ptr<prometheus::Collectable>> what) {
  std::unique_ptr<MetricsServer> server(new MetricsServer);
  server->collectables_ = std::move(what);
  absl::string_view bare = host;
  if (absl::ConsumePrefix(&bare, "[")) absl::ConsumeSuffix(&bare, "]");
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  if (getaddrinfo(std::string(bare).c_str(), absl::StrCat(port).c_str(), &hints, &found) == 0) {
    for (const addrinfo* a = found; a != nullptr && server->listener_ < 0; a = a->ai_next) {
      server->listener_ = Listen(*a);
    }
    freeaddrinfo(found);
  }
  if (server->listener_ >= 0) server->stop_ = eventfd(0, EFD_CLOEXEC);
  if (server->stop_ < 0) {
    return absl::UnavailableError(
        absl::StrCat("cannot serve metrics at ", host, ":", port,
                     ": the address is in use, unknown or not permitted"));
  }
  server->port_ = PortOf(server->listener_);
  server->thread_ = std::thread([s = server.get()] { s->Run(); });
  return server;
}

MetricsServer::~MetricsServer() {
  if (thread_.joinable()) {
    const uint64_t one = 1;
    (void)!write(stop_, &one, sizeof(one));
    thread_.join();
  }
  if (stop_ >= 0) close(stop_);
  if (listener_ >= 0) close(listener_);
}

void MetricsServer::Run() const {
  for (;;) {
    pollfd watched[] = {{listener_, POLLIN, 0}, {stop_, POLLIN, 0}};
    if (poll(watched, 2, -1) < 0) continue;  // a signal
    if (watched[1].revents != 0) return;
    const int connection = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (connection >= 0) {
      Serve(connection);
      close(connection);
    } else if (errno == EMFILE || errno == ENFILE) {
      // The connection stays where it is until a descriptor is free.
      (void)Ready(-1, 0, stop_, Clock::now() + std::chrono::milliseconds(100));
    }
  }
}

void MetricsServer::Serve(int connection) const {
  std::string head;
  const Clock::time_point read_by = Clock::now() + kReadTimeout;
  while (head.find("\r\n\r\n") == std::string::npos) {
    char buffer[2048];
    if (head.size() > kLongestHead || !Ready(connection, POLLIN, stop_, read_by)) return;
    const ssize_t got = recv(connection, buffer, sizeof(buffer), 0);
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) return;
    if (got > 0) head.append(buffer, static_cast<size_t>(got));
  }
  const std::string answer = HttpAnswer(head, [this] { return Page(); });
  const Clock::time_point write_by = Clock::now() + kWriteTimeout;
  for (size_t sent = 0; sent < answer.size();) {
    const ssize_t n = send(connection, answer.data() + sent, answer.size() - sent, MSG_NOSIGNAL);
    if (n > 0) {
      sent += static_cast<size_t>(n);
    } else if (n == 0 || (errno != EAGAIN && errno != EINTR) ||
               !Ready(connection, POLLOUT, stop_, write_by)) {
      return;
    }
  }
  shutdown(connection, SHUT_WR);
}

std::string MetricsServer::Page() const {
  std::vector<prometheus::MetricFamily> families;
  for (const auto& collectable : collectables_) {
    for (prometheus::MetricFamily& family : collectable->Collect()) {
      families.push_back(std::move(family));
    }
  }
  return prometheus::TextSerializer().Serialize(families);
}

std::string HostOf(absl::string_view address) {
  const size_t colon = address.rfind(':');
  if (colon == absl::string_view::npos || colon == 0 || absl::StartsWith(address, "unix:")) {
    return "127.0.0.1";
  }
  const absl::string_view host = address.substr(0, colon);
  return host == "localhost" ? "127.0.0.1" : std::string(host);
}

}  // namespace tributary::telemetry
