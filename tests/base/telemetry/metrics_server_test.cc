#include "base/telemetry/metrics_server.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <prometheus/metric_family.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>

namespace tributary::telemetry {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class Seven final : public prometheus::Collectable {
 public:
  std::vector<prometheus::MetricFamily> Collect() const override {
    prometheus::ClientMetric metric;
    metric.gauge.value = 7;
    return {{"sevens", "What there is.", prometheus::MetricType::Gauge, {metric}}};
  }
};

absl::StatusOr<std::unique_ptr<MetricsServer>> Serve(const std::string& host, int port = 0) {
  return MetricsServer::Start(host, port, {std::make_shared<Seven>()});
}

// A connection to the port on loopback, or -1.
int Dial(int family, int port) {
  const int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in v4{};
  v4.sin_family = AF_INET;
  v4.sin_port = htons(static_cast<uint16_t>(port));
  v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  sockaddr_in6 v6{};
  v6.sin6_family = AF_INET6;
  v6.sin6_port = v4.sin_port;
  v6.sin6_addr = in6addr_loopback;
  const bool connected = family == AF_INET6
                             ? connect(fd, reinterpret_cast<sockaddr*>(&v6), sizeof(v6)) == 0
                             : connect(fd, reinterpret_cast<sockaddr*>(&v4), sizeof(v4)) == 0;
  if (connected) return fd;
  close(fd);
  return -1;
}

// What the server says to a request, to its end.
std::string Ask(int fd, const std::string& request) {
  EXPECT_EQ(send(fd, request.data(), request.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(request.size()));
  std::string answer;
  char buffer[4096];
  for (ssize_t got = 0; (got = recv(fd, buffer, sizeof(buffer), 0)) > 0;) {
    answer.append(buffer, static_cast<size_t>(got));
  }
  close(fd);
  return answer;
}

constexpr char kScrape[] = "GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n";

TEST(MetricsServer, ServesThePage) {
  const auto server = Serve("127.0.0.1");
  ASSERT_TRUE(server.ok()) << server.status();
  const std::string answer = Ask(Dial(AF_INET, (*server)->port()), kScrape);
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(answer, EndsWith("# HELP sevens What there is.\n# TYPE sevens gauge\nsevens 7\n"));
  EXPECT_THAT(Ask(Dial(AF_INET, (*server)->port()), kScrape), HasSubstr("sevens 7"));
}

TEST(MetricsServer, ServesBothFamilies) {
  const auto server = Serve("[::]");
  if (!server.ok()) GTEST_SKIP() << "no IPv6 here";
  EXPECT_THAT(Ask(Dial(AF_INET6, (*server)->port()), kScrape), HasSubstr("sevens 7"));
  EXPECT_THAT(Ask(Dial(AF_INET, (*server)->port()), kScrape), HasSubstr("sevens 7"));
}

TEST(MetricsServer, SaysWhenItCannotListen) {
  const auto first = Serve("127.0.0.1");
  ASSERT_TRUE(first.ok());
  const auto second = Serve("127.0.0.1", (*first)->port());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("cannot serve metrics at 127.0.0"));
  EXPECT_FALSE(Serve("no.such.name.invalid").ok());
}

TEST(MetricsServer, AClientThatSaysNothingHoldsUpOthersForABoundedTime) {
  const auto server = Serve("127.0.0.1");
  ASSERT_TRUE(server.ok());
  const int silent = Dial(AF_INET, (*server)->port());
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THAT(Ask(Dial(AF_INET, (*server)->port()), kScrape), HasSubstr("sevens 7"));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
  close(silent);
}

TEST(MetricsServer, EndsAtOnceWhateverClientsDo) {
  auto server = Serve("127.0.0.1");
  ASSERT_TRUE(server.ok());
  const int silent = Dial(AF_INET, (*server)->port());
  const auto begin = std::chrono::steady_clock::now();
  server->reset();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(1));
  close(silent);
}

TEST(HttpAnswer, KnowsOnePage) {
  const auto answer = [](const std::string& head) {
    return HttpAnswer(head, [] { return std::string("page"); });
  };
  EXPECT_EQ(answer("GET /metrics?x=1 HTTP/1.0\r\n\r\n"),
            "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
            "Content-Length: 4\r\nConnection: close\r\n\r\npage");
  EXPECT_THAT(answer("HEAD /metrics HTTP/1.1\r\n\r\n"), EndsWith("Connection: close\r\n\r\n"));
  EXPECT_THAT(answer("GET / HTTP/1.1\r\n\r\n"), StartsWith("HTTP/1.1 404 "));
  EXPECT_THAT(answer("GET /metricsx HTTP/1.1\r\n\r\n"), StartsWith("HTTP/1.1 404 "));
  EXPECT_THAT(answer("POST /metrics HTTP/1.1\r\n\r\n"), StartsWith("HTTP/1.1 405 "));
  for (const char* nonsense : {"", "\r\n\r\n", "GET\r\n\r\n", "GET /metrics\r\n\r\n",
                               "GET /metrics HTTP/2\r\n\r\n", "\x16\x03\x01\r\n\r\n"}) {
    EXPECT_THAT(answer(nonsense), StartsWith("HTTP/1.1 400 ")) << nonsense;
  }
}

TEST(HostOf, IsWhereTheOtherServerListens) {
  EXPECT_EQ(HostOf("0.0.0.0:7401"), "0.0.0.0");
  EXPECT_EQ(HostOf("[::]:7401"), "[::]");
  EXPECT_EQ(HostOf("localhost:7401"), "127.0.0.1");
  EXPECT_EQ(HostOf("unix:/run/admin.sock"), "127.0.0.1");
  EXPECT_EQ(HostOf(""), "127.0.0.1");
}

}  // namespace
}  // namespace tributary::telemetry
