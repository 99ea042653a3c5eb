// What an OpenTelemetry collector is sent, and what becomes of it when the collector is away.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/status/errors.h"
#include "base/sync/mutex.h"
#include "base/telemetry/families.h"
#include "base/telemetry/otlp_exporter.h"
#include "base/telemetry/otlp_json.h"
#include "base/telemetry/otlp_options.h"

namespace tributary::telemetry {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using ::testing::HasSubstr;

const OtlpResource kResource = {"tributary-test", "1.2.3", "abcd", "host-7"};

Span SpanOf(const char* name, Track track, uint64_t id, uint64_t lane) {
  Span span;
  span.name = name;
  span.track = track;
  span.trace = *ParseTraceparent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01");
  span.span_id = id;
  span.lane = lane;
  span.begin = std::chrono::steady_clock::time_point(nanoseconds(1001));
  span.end = std::chrono::steady_clock::time_point(nanoseconds(2003));
  return span;
}

// {key: value} of a list of attributes; numbers are texts.
json Attributes(const json& of) {
  json found;
  for (const json& one : of.at("attributes")) {
    for (const auto& [type, value] : one.at("value").items()) found[one.at("key")] = value;
  }
  return found;
}

TEST(OtlpJson, ASpanIsWhatTheProtocolSays) {
  Span call = SpanOf("Attend", {Track::kCalls}, 0x12, 0);
  call.arguments[0] = {"code", static_cast<int64_t>(absl::StatusCode::kUnavailable)};
  call.arguments[1] = {"request_id", 77};
  Span rank = SpanOf("attend", {Track::kRank, 3}, 0x13, 0x12);
  rank.trace.span_id = 0;
  const json whole = json::parse(OtlpTraces(kResource, {call, rank}, nanoseconds(1'000'000)));
  const json& of_resource = whole.at("resourceSpans").at(0);
  EXPECT_EQ(Attributes(of_resource.at("resource")), json({{"service.name", "tributary-test"},
                                                          {"service.version", "1.2.3"},
                                                          {"service.instance.id", "abcd"},
                                                          {"host.name", "host-7"}}));
  const json& spans = of_resource.at("scopeSpans").at(0).at("spans");
  ASSERT_EQ(spans.size(), 2u);
  EXPECT_EQ(spans[0].at("traceId"), "0af7651916cd43dd8448eb211c80319c");
  EXPECT_EQ(spans[0].at("spanId"), "0000000000000012");
  EXPECT_EQ(spans[0].at("parentSpanId"), "b7ad6b7169203331");
  EXPECT_EQ(spans[0].at("startTimeUnixNano"), "1001001");
  EXPECT_EQ(spans[0].at("endTimeUnixNano"), "1002003");
  EXPECT_EQ(spans[0].at("kind"), 2);
  EXPECT_EQ(spans[0].at("status"), json({{"code", 2}}));
  const json attributes = Attributes(spans[0]);
  EXPECT_EQ(attributes.at("rpc.method"), "Attend");
  EXPECT_EQ(attributes.at("rpc.grpc.status_code"), "14");
  EXPECT_EQ(attributes.at("tributary.request_id"), "77");
  EXPECT_EQ(spans[1].at("kind"), 1);
  EXPECT_FALSE(spans[1].contains("parentSpanId"));
  EXPECT_EQ(Attributes(spans[1]).at("tributary.rank"), "3");
  EXPECT_TRUE(spans[1].at("status").empty());
}

TEST(OtlpJson, MetricsAreWhatPrometheusSees) {
  constexpr double kBounds[] = {0.5, 1};
  Histogram histogram(kBounds);
  for (const double value : {0.1, 0.2, 0.7, 5.0}) histogram.Observe(value);
  Families families;
  families.Counter({"requests_total", "Requests."});
  families.Add(3, {{"code", "OK"}});
  families.Gauge({"ready", "Ready."}, std::numeric_limits<double>::infinity());
  families.Histogram({"seconds", "Seconds."});
  families.Add(histogram, {{"phase", "plan"}});
  families.Gauge({"none", "Without values."});
  const json whole =
      json::parse(OtlpMetrics(kResource, families.Take(), nanoseconds(5), nanoseconds(9)));
  const json& metrics = whole.at("resourceMetrics").at(0).at("scopeMetrics").at(0).at("metrics");
  ASSERT_EQ(metrics.size(), 3u);
  const json& sum = metrics[0].at("sum");
  EXPECT_EQ(metrics[0].at("name"), "requests_total");
  EXPECT_EQ(sum.at("aggregationTemporality"), 2);
  EXPECT_EQ(sum.at("isMonotonic"), true);
  EXPECT_EQ(sum.at("dataPoints").at(0).at("asDouble"), 3);
  EXPECT_EQ(sum.at("dataPoints").at(0).at("startTimeUnixNano"), "5");
  EXPECT_EQ(sum.at("dataPoints").at(0).at("timeUnixNano"), "9");
  EXPECT_EQ(Attributes(sum.at("dataPoints").at(0)), json({{"code", "OK"}}));
  EXPECT_EQ(metrics[1].at("gauge").at("dataPoints").at(0).at("asDouble"), "Infinity");
  const json& point = metrics[2].at("histogram").at("dataPoints").at(0);
  EXPECT_EQ(point.at("count"), "4");
  EXPECT_EQ(point.at("bucketCounts"), json({"2", "1", "1"}));
  EXPECT_EQ(point.at("explicitBounds"), json({0.5, 1.0}));
  EXPECT_NEAR(point.at("sum").get<double>(), 6.0, 1e-9);
}

TEST(OtlpOptions, WhatCannotWorkIsRefusedByTheFlagsName) {
  const auto field = [](OtlpOptions options) { return FieldOf(CheckOtlp(options)); };
  EXPECT_TRUE(CheckOtlp({}).ok());
  EXPECT_TRUE(CheckOtlp({.endpoint = "https://collector:4318"}).ok());
  EXPECT_EQ(field({.endpoint = "collector:4317"}), "otlp_endpoint");
  EXPECT_EQ(field({.authorities = "a.pem"}), "otlp_endpoint");
  EXPECT_EQ(field({.endpoint = "http://c:4318", .authorities = "a.pem"}), "otlp_ca");
  EXPECT_EQ(field({.endpoint = "http://c:4318", .interval = milliseconds(1)}), "otlp_interval");
  EXPECT_EQ(field({.endpoint = "https://c", .headers_file = "/nowhere"}), "otlp_headers_file");
  // Secrets do not leave the machine in plain text.
  const std::string headers = testing::TempDir() + "/headers." + std::to_string(getpid());
  std::ofstream(headers) << "Authorization: Bearer abc\n\n";
  EXPECT_EQ(field({.endpoint = "http://127.0.0.1.example.com", .headers_file = headers}),
            "otlp_headers_file");
  EXPECT_EQ(field({.endpoint = "http://127.0.0.1:4318", .headers_file = headers}), "");
  EXPECT_EQ(field({.endpoint = "http://[::1]:4318/", .headers_file = headers}), "");
  EXPECT_EQ(field({.endpoint = "http://localhost", .headers_file = headers}), "");
  std::ofstream(headers) << "no header\n";
  EXPECT_EQ(field({.endpoint = "https://c", .headers_file = headers}), "otlp_headers_file");
}

// A collector that answers every request with the status that is set, one connection at a time.
class Collector {
 public:
  struct Request {
    std::string head;
    json body;
  };

  Collector() {
    listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    socklen_t size = sizeof(address);
    getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size);
    port_ = ntohs(address.sin_port);
    listen(listener_, 4);
    thread_ = std::thread([this] { Run(); });
  }
  ~Collector() {
    shutdown(listener_, SHUT_RDWR);
    if (const int connection = connection_; connection >= 0) shutdown(connection, SHUT_RDWR);
    thread_.join();
    close(listener_);
  }

  std::string endpoint() const { return "http://127.0.0.1:" + std::to_string(port_); }
  void Answer(int status) {
    const MutexLock lock(mutex_);
    status_ = status;
  }
  std::vector<Request> requests() {
    const MutexLock lock(mutex_);
    return requests_;
  }
  // Waits until `count` requests have come, and returns them.
  std::vector<Request> Await(size_t count) {
    for (int i = 0; i < 3000 && requests().size() < count; ++i) {
      std::this_thread::sleep_for(milliseconds(10));
    }
    EXPECT_GE(requests().size(), count);
    return requests();
  }

 private:
  void Run() {
    for (;;) {
      const int connection = accept(listener_, nullptr, nullptr);
      if (connection < 0) return;
      connection_ = connection;
      while (Serve(connection)) {
      }
      connection_ = -1;
      close(connection);
    }
  }

  bool Serve(int connection) {
    std::string text;
    size_t body = std::string::npos;
    size_t wanted = 1;
    while (text.size() < wanted) {
      char buffer[4096];
      const ssize_t got = recv(connection, buffer, sizeof(buffer), 0);
      if (got <= 0) return false;
      text.append(buffer, static_cast<size_t>(got));
      if (body == std::string::npos && (body = text.find("\r\n\r\n")) != std::string::npos) {
        body += 4;
        const size_t length = text.find("Content-Length: ");
        EXPECT_NE(length, std::string::npos);
        wanted = body + std::strtoul(text.c_str() + length + 16, nullptr, 10);
      } else if (body == std::string::npos) {
        wanted = text.size() + 1;
      }
    }
    int status = 0;
    {
      const MutexLock lock(mutex_);
      requests_.push_back({text.substr(0, body), json::parse(text.substr(body))});
      status = status_;
    }
    const std::string answer =
        "HTTP/1.1 " + std::to_string(status) + " Status\r\nContent-Length: 2\r\n\r\n{}";
    return send(connection, answer.data(), answer.size(), MSG_NOSIGNAL) > 0;
  }

  int listener_ = -1;
  int port_ = 0;
  std::atomic<int> connection_ = -1;
  Mutex mutex_;
  int status_ TRIBUTARY_GUARDED_BY(mutex_) = 200;
  std::vector<Request> requests_ TRIBUTARY_GUARDED_BY(mutex_);
  std::thread thread_;
};

std::vector<std::string> NamesOf(const json& body) {
  std::vector<std::string> names;
  const json& scope = body.at("resourceSpans").at(0).at("scopeSpans").at(0);
  for (const json& span : scope.at("spans")) names.push_back(span.at("name"));
  return names;
}

class OtlpExporterTest : public ::testing::Test {
 protected:
  void Start(OtlpOptions options, std::vector<std::shared_ptr<prometheus::Collectable>> metrics) {
    options.interval = milliseconds(100);
    auto started = OtlpExporter::Start(options, kResource, spans_, std::move(metrics), log_);
    ASSERT_TRUE(started.ok()) << started.status();
    exporter_ = *std::move(started);
  }
  // Ends it, and returns what it has logged.
  std::string End() {
    exporter_.reset();
    std::fflush(sink_);
    return std::string(text_, size_);
  }
  ~OtlpExporterTest() override {
    exporter_.reset();
    std::fclose(sink_);
    std::free(text_);
  }

  char* text_ = nullptr;
  size_t size_ = 0;
  std::FILE* sink_ = open_memstream(&text_, &size_);
  std::shared_ptr<Logger> log_ = std::make_shared<Logger>(LogLevel::kInfo, LogFormat::kText, sink_);
  std::shared_ptr<TraceBuffer> spans_ = std::make_shared<TraceBuffer>(4, 0, "test");
  std::unique_ptr<OtlpExporter> exporter_;
};

TEST_F(OtlpExporterTest, NothingIsSentWhereNoEndpointIsGiven) {
  Start({}, {});
  EXPECT_EQ(exporter_, nullptr);
}

TEST_F(OtlpExporterTest, EverySpanIsSentOnceAndMetricsAgainAndAgain) {
  Collector collector;
  const std::string headers = testing::TempDir() + "/sent." + std::to_string(getpid());
  std::ofstream(headers) << "X-Tenant: seven\n";
  spans_->Add(SpanOf("first", {Track::kCalls}, 1, 0));
  Start({.endpoint = collector.endpoint() + "/", .headers_file = headers},
        {ProcessMetrics("1.2.3", "test")});
  collector.Await(3);
  spans_->Add(SpanOf("second", {Track::kCalls}, 2, 0));
  const std::string logged = End();
  std::vector<std::string> names;
  int metrics = 0;
  for (const Collector::Request& request : collector.requests()) {
    EXPECT_THAT(request.head, HasSubstr("Content-Type: application/json\r\n"));
    EXPECT_THAT(request.head, HasSubstr("X-Tenant: seven\r\n"));
    if (request.head.rfind("POST /v1/metrics HTTP/1.1", 0) == 0) {
      ++metrics;
      EXPECT_THAT(request.body.dump(), HasSubstr("tributary_build_info"));
      continue;
    }
    EXPECT_EQ(request.head.rfind("POST /v1/traces HTTP/1.1", 0), 0u) << request.head;
    for (const std::string& name : NamesOf(request.body)) names.push_back(name);
  }
  EXPECT_GE(metrics, 2);
  EXPECT_EQ(names, (std::vector<std::string>{"first", "second"}))
      << "the second one when the exporter ended";
  EXPECT_EQ(logged, "");
}

TEST_F(OtlpExporterTest, WhatTheCollectorCannotTakeNowIsSentAgain) {
  Collector collector;
  collector.Answer(503);
  spans_->Add(SpanOf("a", {Track::kCalls}, 1, 0));
  Start({.endpoint = collector.endpoint()}, {});
  collector.Await(2);
  // The buffer holds four: two of these are overwritten while the collector takes none.
  for (int i = 0; i < 5; ++i) spans_->Add(SpanOf("b", {Track::kCalls}, 2, 0));
  collector.Answer(200);
  const size_t before = collector.requests().size();
  collector.Await(before + 1);
  const std::string logged = End();
  EXPECT_EQ(NamesOf(collector.requests().back().body),
            (std::vector<std::string>{"b", "b", "b", "b"}));
  EXPECT_THAT(logged, HasSubstr("cannot be sent"));
  EXPECT_THAT(logged, HasSubstr("HTTP 503"));
  int overwritten = 0;
  const std::string words = "overwritten before they could be sent spans=";
  for (size_t at = logged.find(words); at != std::string::npos; at = logged.find(words, at + 1)) {
    overwritten += std::stoi(logged.substr(at + words.size()));
  }
  EXPECT_EQ(overwritten, 2) << logged;
  EXPECT_THAT(logged, HasSubstr("are sent again"));
}

TEST_F(OtlpExporterTest, WhatTheCollectorWillNeverTakeIsNotSentAgain) {
  Collector collector;
  collector.Answer(400);
  spans_->Add(SpanOf("bad", {Track::kCalls}, 1, 0));
  Start({.endpoint = collector.endpoint()}, {});
  collector.Await(1);
  collector.Answer(200);
  spans_->Add(SpanOf("good", {Track::kCalls}, 2, 0));
  EXPECT_EQ(NamesOf(collector.Await(2).back().body), (std::vector<std::string>{"good"}));
  EXPECT_THAT(End(), HasSubstr("HTTP 400"));
}

TEST_F(OtlpExporterTest, ACollectorThatIsAwayHoldsNobodyUp) {
  int port = 0;
  {
    const Collector gone;
    port = std::stoi(gone.endpoint().substr(gone.endpoint().rfind(':') + 1));
  }
  spans_->Add(SpanOf("a", {Track::kCalls}, 1, 0));
  Start({.endpoint = "http://127.0.0.1:" + std::to_string(port)}, {});
  const std::string logged = End();
  EXPECT_THAT(logged, HasSubstr("cannot be sent"));
  EXPECT_EQ(logged.find(" warning "), std::string::npos) << "an end in order warns of nothing:\n"
                                                         << logged;
}

}  // namespace
}  // namespace tributary::telemetry
