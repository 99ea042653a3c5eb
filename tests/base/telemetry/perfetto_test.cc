// Traces in Perfetto's format, read back field by field.
#include "base/telemetry/perfetto.h"

#include <google/protobuf/unknown_field_set.h>
#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <string>
#include <vector>

namespace tributary::telemetry {
namespace {

using google::protobuf::UnknownField;
using google::protobuf::UnknownFieldSet;
using std::chrono::nanoseconds;

// A message, parsed without its definition.
class Parsed {
 public:
  explicit Parsed(const std::string& bytes) { EXPECT_TRUE(fields_.ParseFromString(bytes)); }
  const UnknownFieldSet* operator->() const { return &fields_; }

  // The first field of that number; null without one.
  const UnknownField* Find(int number) const {
    for (int i = 0; i < fields_.field_count(); ++i) {
      if (fields_.field(i).number() == number) return &fields_.field(i);
    }
    return nullptr;
  }
  uint64_t Number(int number) const {
    const UnknownField* field = Find(number);
    return field == nullptr ? 0 : field->varint();
  }
  std::string Text(int number) const {
    const UnknownField* field = Find(number);
    return field == nullptr ? "" : field->length_delimited();
  }

 private:
  UnknownFieldSet fields_;
};

// What a viewer shows: slices as "name begin end", the inner ones in parentheses, by thread.
struct Shown {
  std::map<uint64_t, std::string> processes;               // name, by track
  std::map<std::string, std::string> threads;              // "process/thread": slices
  std::map<std::string, std::vector<std::string>> values;  // texts of annotations, by slice's name
};

// The texts of a slice's annotations, as "name=value".
std::vector<std::string> Annotations(const Parsed& event) {
  std::vector<std::string> texts;
  for (int i = 0; i < event->field_count(); ++i) {
    if (event->field(i).number() != 4) continue;
    const Parsed note(event->field(i).length_delimited());
    const std::string value =
        note.Find(6) != nullptr ? note.Text(6) : std::to_string(note.Number(4));
    texts.push_back(note.Text(10) + "=" + value);
  }
  return texts;
}

Shown Show(const std::string& trace) {
  Shown shown;
  std::map<uint64_t, std::string> threads;
  std::map<uint64_t, int> open;
  uint64_t last = 0;
  const Parsed packets(trace);
  for (int i = 0; i < packets->field_count(); ++i) {
    EXPECT_EQ(packets->field(i).number(), 1);
    const Parsed packet(packets->field(i).length_delimited());
    EXPECT_EQ(packet.Number(10), 1u);
    if (packet.Find(60) != nullptr) {
      const Parsed track(packet.Text(60));
      if (track.Find(3) != nullptr) {
        shown.processes[track.Number(1)] = Parsed(track.Text(3)).Text(6);
      } else {
        const std::string name = Parsed(track.Text(4)).Text(5);
        threads[track.Number(1)] = shown.processes.at(track.Number(5)) + "/" + name;
        last = 0;
      }
      continue;
    }
    const Parsed event(packet.Text(11));
    std::string& slices = shown.threads[threads.at(event.Number(11))];
    const uint64_t time = packet.Number(8);
    EXPECT_GE(time, last) << "in order of time within a thread";
    last = time;
    if (event.Number(9) == 1) {
      slices += "(" + event.Text(23) + " " + std::to_string(time);
      ++open[event.Number(11)];
      shown.values[event.Text(23)] = Annotations(event);
    } else {
      EXPECT_EQ(event.Number(9), 2u);
      slices += " " + std::to_string(time) + ")";
      EXPECT_GE(--open[event.Number(11)], 0);
    }
  }
  for (const auto& [track, count] : open) EXPECT_EQ(count, 0) << "every slice ends";
  return shown;
}

Span At(const char* name, Track track, uint64_t id, uint64_t lane, int64_t begin, int64_t end) {
  Span span;
  span.name = name;
  span.track = track;
  span.span_id = id;
  span.lane = lane;
  span.begin = std::chrono::steady_clock::time_point(nanoseconds(begin));
  span.end = std::chrono::steady_clock::time_point(nanoseconds(end));
  return span;
}

constexpr Track kCall{Track::kCalls};
constexpr Track kStep{Track::kSteps};

TEST(Perfetto, SlicesNestAndTimesAreNanoseconds) {
  const Track rank{Track::kRank, 3};
  const Shown shown =
      Show(PerfettoTrace({At("queue", kCall, 2, 1, 101, 207), At("Attend", kCall, 1, 0, 100, 901),
                          At("step", kStep, 3, 3, 207, 899), At("build", kStep, 4, 3, 207, 250),
                          At("workers", kStep, 5, 3, 250, 880), At("plan", rank, 7, 0, 300, 301),
                          At("attend", rank, 8, 0, 301, 870), At("step", rank, 6, 0, 300, 870)},
                         "coordinator", nanoseconds(1'000'000'000'000'000'000)));
  const auto at = [](const std::string& rest) { return "1000000000000000" + rest; };
  EXPECT_EQ(shown.threads.at("coordinator/calls"), "(Attend " + at("100") + "(queue " + at("101") +
                                                       " " + at("207") + ") " + at("901") + ")");
  EXPECT_EQ(shown.threads.at("coordinator/steps"), "(step " + at("207") + "(build " + at("207") +
                                                       " " + at("250") + ")(workers " + at("250") +
                                                       " " + at("880") + ") " + at("899") + ")");
  EXPECT_EQ(shown.threads.at("rank 3/steps of the rank"),
            "(step " + at("300") + "(plan " + at("300") + " " + at("301") + ")(attend " +
                at("301") + " " + at("870") + ") " + at("870") + ")");
}

TEST(Perfetto, WhatOverlapsLiesBesideEachOther) {
  const Shown shown = Show(PerfettoTrace(
      {At("a", kCall, 1, 0, 0, 10), At("b", kCall, 2, 0, 5, 15), At("queue", kCall, 3, 2, 6, 7),
       At("c", kCall, 4, 0, 10, 20), At("d", kCall, 5, 0, 12, 13)},
      "p", nanoseconds(0)));
  EXPECT_EQ(shown.threads.at("p/calls"), "(a 0 10)(c 10 20)");
  EXPECT_EQ(shown.threads.at("p/calls 2"), "(b 5(queue 6 7) 15)");
  EXPECT_EQ(shown.threads.at("p/calls 3"), "(d 12 13)");
}

TEST(Perfetto, APhaseEndsWithWhatItIsAPartOf) {
  const Shown shown = Show(PerfettoTrace(
      {At("step", kStep, 1, 1, 0, 10), At("workers", kStep, 2, 1, 5, 12)}, "p", nanoseconds(0)));
  EXPECT_EQ(shown.threads.at("p/steps"), "(step 0(workers 5 10) 10)");
}

TEST(Perfetto, ArgumentsAndIdsAreShown) {
  Span span = At("Attend", kCall, 0xabc, 0, 0, 1);
  span.arguments[0] = {"rows", -17};
  span.trace.trace_id[15] = 9;
  span.trace.span_id = 5;
  const Shown shown = Show(PerfettoTrace({span}, "p", nanoseconds(0)));
  EXPECT_EQ(
      shown.values.at("Attend"),
      (std::vector<std::string>{"rows=" + std::to_string(static_cast<uint64_t>(-17)),
                                "trace_id=00000000000000000000000000000009",
                                "span_id=0000000000000abc", "parent_span_id=0000000000000005"}));
}

TEST(Perfetto, OfNothingThereIsNothing) { EXPECT_EQ(PerfettoTrace({}, "p", nanoseconds(0)), ""); }

}  // namespace
}  // namespace tributary::telemetry
