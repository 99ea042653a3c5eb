// Connections that carry no calls: those that live stay, whose peer is gone end.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <optional>
#include <string>

#include "tests/service/test_service.h"

namespace tributary::service::testing {
namespace {

// A client's end of an HTTP/2 connection, down to its frames.
class RawConnection {
 public:
  enum Type : uint8_t { kSettings = 4, kPing = 6, kGoAway = 7 };
  struct Frame {
    uint8_t type = 0;
    uint8_t flags = 0;
    std::string payload;
    bool IsPing() const { return type == kPing && flags == 0; }
    bool IsAnswer() const { return type == kPing && flags == kAck; }
  };

  // At "unix:PATH".
  explicit RawConnection(const std::string& address)
      : fd_(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const timeval patience{.tv_sec = 60, .tv_usec = 0};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    sockaddr_un to{};
    to.sun_family = AF_UNIX;
    const std::string path = address.substr(std::strlen("unix:"));
    path.copy(to.sun_path, sizeof(to.sun_path) - 1);
    EXPECT_EQ(connect(fd_, reinterpret_cast<const sockaddr*>(&to), sizeof(to)), 0);
    Write("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
    Send(kSettings, 0, "");
  }
  ~RawConnection() { close(fd_); }

  void Ping() { Send(kPing, 0, "12345678"); }
  void Answer(const Frame& ping) { Send(kPing, kAck, ping.payload); }

  // Nothing when the server has closed the connection.
  std::optional<Frame> Read() {
    std::string head;
    if (!Fill(9, &head)) return std::nullopt;
    const auto byte = [&](int i) { return static_cast<uint8_t>(head[i]); };
    Frame frame{.type = byte(3), .flags = byte(4)};
    if (!Fill(size_t{byte(0)} << 16 | size_t{byte(1)} << 8 | byte(2), &frame.payload)) {
      return std::nullopt;
    }
    return frame;
  }

 private:
  static constexpr uint8_t kAck = 1;

  void Send(Type type, uint8_t flags, const std::string& payload) {
    std::string frame(9, '\0');  // on stream 0
    frame[2] = static_cast<char>(payload.size());
    frame[3] = static_cast<char>(type);
    frame[4] = static_cast<char>(flags);
    Write(frame + payload);
  }
  void Write(const std::string& bytes) {
    EXPECT_EQ(send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  bool Fill(size_t count, std::string* bytes) {
    bytes->resize(count);
    for (size_t have = 0; have < count;) {
      const ssize_t got = recv(fd_, bytes->data() + have, count - have, 0);
      EXPECT_GE(got, 0) << "waited too long";
      if (got <= 0) return false;
      have += static_cast<size_t>(got);
    }
    return true;
  }

  const int fd_;
};

TestService::Options With(const ServerKeepalive& keepalive) {
  TestService::Options options{.workers = 1};
  options.server.keepalive = keepalive;
  return options;
}

// By gRPC's own rules the fourth ping without a pause of minutes is one too many.
TEST(Keepalive, AClientThatPingsAsOftenAsItMayIsNotSentAway) {
  TestService service(With({.least_interval_ms = 0}));
  RawConnection connection(service.address());
  for (int i = 0; i < 10; ++i) {
    connection.Ping();
    std::optional<RawConnection::Frame> frame;
    do {
      frame = connection.Read();
      ASSERT_TRUE(frame.has_value()) << "closed after " << i << " pings";
      ASSERT_NE(frame->type, RawConnection::kGoAway) << frame->payload;
    } while (!frame->IsAnswer());
  }
}

TEST(Keepalive, TheServersIntervalAllowsTheClients) {
  const ServerKeepalive server;
  EXPECT_LT(server.least_interval_ms, kKeepaliveIntervalMs);
}

TEST(Keepalive, AClientThatAnswersStaysAndOneThatCeasesToIsLetGo) {
  TestService service(With({.interval_ms = 20, .timeout_ms = 3'000}));
  RawConnection connection(service.address());
  constexpr int kAnswers = 5;  // more than gRPC sends without traffic if left alone
  int pings = 0;
  while (const auto frame = connection.Read()) {
    if (frame->IsPing() && ++pings <= kAnswers) connection.Answer(*frame);
  }
  EXPECT_EQ(pings, kAnswers + 1) << "closed by the server, after a ping that was not answered";
}

}  // namespace
}  // namespace tributary::service::testing
