#include "base/telemetry/trace.h"

#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>

namespace tributary::telemetry {
namespace {

using std::chrono::microseconds;

constexpr char kParent[] = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

TEST(TraceparentTest, IsReadAndWrittenAlike) {
  const auto context = ParseTraceparent(kParent);
  ASSERT_TRUE(context.has_value());
  EXPECT_TRUE(context->sampled);
  EXPECT_EQ(context->span_id, 0xb7ad6b7169203331u);
  EXPECT_EQ(TraceIdText(*context), "0af7651916cd43dd8448eb211c80319c");
  EXPECT_EQ(FormatTraceparent(*context), kParent);
  EXPECT_FALSE(
      ParseTraceparent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00")->sampled);
  EXPECT_TRUE(ParseTraceparent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-03")->sampled)
      << "other flags are not ours";
}

// The cases of the standard's own test suite.
TEST(TraceparentTest, WhatIsNotOneIsRefused) {
  for (const char* bad : {
           "",
           "00",
           "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
           "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
           "00-00000000000000000000000000000000-b7ad6b7169203331-01",
           "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
           "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
           "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
           "01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01.more",
           "00-0af7651916cd43dd8448eb211c80319c_b7ad6b7169203331-01",
           "00-0af7651916cd43dd8448eb211c8031zz-b7ad6b7169203331-01",
       }) {
    EXPECT_FALSE(ParseTraceparent(bad).has_value()) << bad;
  }
  EXPECT_TRUE(
      ParseTraceparent("01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more").has_value())
      << "of a later version, read as far as this one goes";
}

TEST(TraceBufferTest, SamplesAsAskedFor) {
  const auto sampled_of_1000 = [](double ratio) {
    TraceBuffer buffer(1, ratio, "test");
    int count = 0;
    for (int i = 0; i < 1000; ++i) count += buffer.Begin({}).sampled ? 1 : 0;
    return count;
  };
  EXPECT_EQ(sampled_of_1000(0), 0);
  EXPECT_EQ(sampled_of_1000(1), 1000);
  EXPECT_NEAR(sampled_of_1000(0.5), 500, 150);

  TraceBuffer buffer(1, 1, "test");
  EXPECT_EQ(FormatTraceparent(buffer.Begin(ParseTraceparent(kParent))), kParent)
      << "the caller has decided";
  std::set<std::string> traces;
  for (int i = 0; i < 100; ++i) traces.insert(TraceIdText(buffer.Begin({})));
  EXPECT_EQ(traces.size(), 100);
}

Span SpanAt(Track track, uint64_t id, int64_t begin_us, int64_t end_us) {
  Span span;
  span.name = "work";
  span.track = track;
  span.trace = *ParseTraceparent(kParent);
  span.span_id = id;
  span.begin = std::chrono::steady_clock::time_point() + microseconds(begin_us);
  span.end = std::chrono::steady_clock::time_point() + microseconds(end_us);
  span.arguments[0] = {"rows", 17};
  return span;
}

TEST(TraceBufferTest, WritesWhatViewersRead) {
  TraceBuffer buffer(16, 0, "a \"coordinator\"");
  buffer.Add(SpanAt({Track::kCalls}, 1, 1'000, 5'000));
  buffer.Add(SpanAt({Track::kSteps}, 2, 2'000, 4'000));
  buffer.Add(SpanAt({Track::kRank, 3}, 3, 2'500, 3'500));
  const nlohmann::json json = nlohmann::json::parse(buffer.Json());
  std::map<std::string, int> phases;
  std::map<int, std::string> processes;
  for (const auto& event : json["traceEvents"]) {
    const std::string phase = event["ph"];
    ++phases[phase];
    if (phase == "M") processes[event["pid"]] = event["args"]["name"];
    if (phase == "X") {
      EXPECT_EQ(event["dur"], 1000);
      EXPECT_EQ(event["pid"], 4);
      EXPECT_EQ(event["args"]["rows"], 17);
      EXPECT_EQ(event["args"]["trace_id"], "0af7651916cd43dd8448eb211c80319c");
      EXPECT_EQ(event["args"]["parent_span_id"], "b7ad6b7169203331");
    }
  }
  EXPECT_EQ(phases, (std::map<std::string, int>{{"M", 2}, {"X", 1}, {"b", 2}, {"e", 2}}));
  EXPECT_EQ(processes, (std::map<int, std::string>{{0, "a \"coordinator\""}, {4, "rank 3"}}));
}

TEST(TraceBufferTest, KeepsTheLast) {
  TraceBuffer buffer(3, 0, "test");
  for (int i = 0; i < 10; ++i) buffer.Add(SpanAt({Track::kRank, i}, 1 + i, 0, 1));
  EXPECT_EQ(buffer.dropped(), 7);
  std::set<int> ranks;
  const nlohmann::json json = nlohmann::json::parse(buffer.Json());
  for (const auto& event : json["traceEvents"]) {
    if (event["ph"] == "X") ranks.insert(static_cast<int>(event["pid"]) - 1);
  }
  EXPECT_EQ(ranks, (std::set<int>{7, 8, 9}));
}

}  // namespace
}  // namespace tributary::telemetry
