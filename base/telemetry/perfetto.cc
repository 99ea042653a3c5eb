#include "base/telemetry/perfetto.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"

namespace tributary::telemetry {
namespace {

using Time = std::chrono::steady_clock::time_point;

// A message in the wire format of Protocol Buffers. Perfetto's definitions are hundreds of files;
// these are the few fields that slices need.
class Message {
 public:
  void Number(int field, uint64_t value) {
    Varint(static_cast<uint64_t>(field) << 3);
    Varint(value);
  }
  void Text(int field, absl::string_view value) {
    Varint((static_cast<uint64_t>(field) << 3) | 2);
    Varint(value.size());
    absl::StrAppend(&bytes_, value);
  }
  void Add(int field, const Message& message) { Text(field, message.bytes_); }
  std::string Take() { return std::move(bytes_); }

 private:
  void Varint(uint64_t value) {
    for (; value >= 0x80; value >>= 7) bytes_.push_back(static_cast<char>(value | 0x80));
    bytes_.push_back(static_cast<char>(value));
  }

  std::string bytes_;
};

// Numbers of fields, by message.
namespace trace {
constexpr int kPacket = 1;
}
namespace packet {
constexpr int kTimestamp = 8, kSequence = 10, kTrackEvent = 11, kTrackDescriptor = 60;
}
namespace track {
constexpr int kUuid = 1, kProcess = 3, kThread = 4, kParent = 5;
}
namespace process {
constexpr int kPid = 1, kName = 6;
}
namespace thread {
constexpr int kPid = 1, kTid = 2, kName = 5;
}
namespace event {
constexpr int kAnnotation = 4, kType = 9, kTrack = 11, kCategory = 22, kName = 23;
constexpr uint64_t kSliceBegin = 1, kSliceEnd = 2;
}  // namespace event
namespace annotation {
constexpr int kInt = 4, kString = 6, kName = 10;
}

// Spans that are shown together, one within the other.
struct Nest {
  std::vector<Span> spans;  // by begin; what contains others comes first
  Time begin;
  Time end;
};

bool Before(const Span& a, const Span& b) {
  return a.begin != b.begin ? a.begin < b.begin : a.end > b.end;
}

// A thread of the trace: nests that do not overlap.
struct Thread {
  std::vector<Nest> nests;
};

// Of calls and steps a nest is a lane; of ranks it is a step with its phases, found by time.
std::vector<Nest> NestsOf(std::vector<Span> spans) {
  std::sort(spans.begin(), spans.end(), Before);
  std::vector<Nest> nests;
  std::map<uint64_t, size_t> by_lane;
  for (Span& span : spans) {
    span.end = std::max(span.begin, span.end);
    size_t at = nests.size();
    if (span.track.kind != Track::kRank) {
      at = by_lane.emplace(span.lane == 0 ? span.span_id : span.lane, at).first->second;
    } else if (!nests.empty() && span.end <= nests.back().end) {
      at = nests.size() - 1;
    }
    if (at == nests.size()) nests.push_back({.begin = span.begin, .end = span.end});
    nests[at].end = std::max(nests[at].end, span.end);
    nests[at].spans.push_back(span);
  }
  return nests;
}

// Each nest goes to the first thread on which it overlaps none.
std::vector<Thread> ThreadsOf(std::vector<Nest> nests) {
  std::stable_sort(nests.begin(), nests.end(),
                   [](const Nest& a, const Nest& b) { return a.begin < b.begin; });
  std::vector<Thread> threads;
  for (Nest& nest : nests) {
    auto free = std::find_if(threads.begin(), threads.end(),
                             [&](const Thread& one) { return one.nests.back().end <= nest.begin; });
    if (free == threads.end()) free = threads.emplace(threads.end());
    free->nests.push_back(std::move(nest));
  }
  return threads;
}

class Writer {
 public:
  explicit Writer(std::chrono::nanoseconds to_wall) : to_wall_(to_wall) {}

  // Returns the process's track.
  uint64_t AddProcess(int pid, absl::string_view name) {
    Message description, descriptor;
    description.Number(process::kPid, static_cast<uint64_t>(pid));
    description.Text(process::kName, name);
    descriptor.Number(track::kUuid, ++tracks_);
    descriptor.Add(track::kProcess, description);
    Descriptor(descriptor);
    return tracks_;
  }

  void AddThread(int pid, uint64_t parent, int tid, absl::string_view name, const Thread& one) {
    Message description, descriptor;
    description.Number(thread::kPid, static_cast<uint64_t>(pid));
    description.Number(thread::kTid, static_cast<uint64_t>(tid));
    description.Text(thread::kName, name);
    descriptor.Number(track::kUuid, ++tracks_);
    descriptor.Number(track::kParent, parent);
    descriptor.Add(track::kThread, description);
    Descriptor(descriptor);
    for (const Nest& nest : one.nests) AddNest(nest);
  }

  std::string Take() { return trace_.Take(); }

 private:
  // Begins and ends in order of time; of two at the same time, the inner end comes first.
  void AddNest(const Nest& nest) {
    std::vector<Time> open;  // ends of the slices around, the innermost last
    for (const Span& span : nest.spans) {
      for (; !open.empty() && open.back() <= span.begin; open.pop_back()) End(open.back());
      Begin(span);
      // A phase that was reported to last longer than what it is a part of ends with that.
      open.push_back(open.empty() ? span.end : std::min(open.back(), span.end));
    }
    for (; !open.empty(); open.pop_back()) End(open.back());
  }

  void Begin(const Span& span) {
    Message slice;
    slice.Number(event::kType, event::kSliceBegin);
    slice.Number(event::kTrack, tracks_);
    slice.Text(event::kName, span.name);
    slice.Text(event::kCategory, Category(span.track.kind));
    for (const Span::Argument& argument : span.arguments) {
      if (argument.key == nullptr) continue;
      Message note;
      note.Text(annotation::kName, argument.key);
      note.Number(annotation::kInt, static_cast<uint64_t>(argument.value));
      slice.Add(event::kAnnotation, note);
    }
    Annotate("trace_id", TraceIdText(span.trace), &slice);
    Annotate("span_id", absl::StrCat(absl::Hex(span.span_id, absl::kZeroPad16)), &slice);
    Annotate("parent_span_id", absl::StrCat(absl::Hex(span.trace.span_id, absl::kZeroPad16)),
             &slice);
    Event(span.begin, slice);
  }

  void End(Time time) {
    Message slice;
    slice.Number(event::kType, event::kSliceEnd);
    slice.Number(event::kTrack, tracks_);
    Event(time, slice);
  }

  static const char* Category(Track::Kind kind) {
    return kind == Track::kCalls ? "call" : kind == Track::kSteps ? "step" : "rank";
  }

  static void Annotate(absl::string_view name, absl::string_view value, Message* slice) {
    Message note;
    note.Text(annotation::kName, name);
    note.Text(annotation::kString, value);
    slice->Add(event::kAnnotation, note);
  }

  void Event(Time time, const Message& slice) {
    const auto wall = std::chrono::nanoseconds(time.time_since_epoch() + to_wall_).count();
    Message one;
    one.Number(packet::kTimestamp, static_cast<uint64_t>(wall));
    one.Number(packet::kSequence, 1);
    one.Add(packet::kTrackEvent, slice);
    trace_.Add(trace::kPacket, one);
  }

  void Descriptor(const Message& descriptor) {
    Message one;
    one.Number(packet::kSequence, 1);
    one.Add(packet::kTrackDescriptor, descriptor);
    trace_.Add(trace::kPacket, one);
  }

  const std::chrono::nanoseconds to_wall_;
  uint64_t tracks_ = 0;  // the last one's uuid
  Message trace_;
};

}  // namespace

std::string PerfettoTrace(std::vector<Span> spans, absl::string_view process,
                          std::chrono::nanoseconds to_wall) {
  // Processes of the trace: 1 is the program, 2 rank 0 and so on. Within, calls come before steps.
  std::map<int, std::map<Track::Kind, std::vector<Span>>> by_process;
  for (Span& span : spans) {
    const int pid = span.track.kind == Track::kRank ? span.track.rank + 2 : 1;
    by_process[pid][span.track.kind].push_back(span);
  }
  Writer writer(to_wall);
  for (auto& [pid, by_kind] : by_process) {
    const uint64_t parent =
        writer.AddProcess(pid, pid == 1 ? std::string(process) : absl::StrCat("rank ", pid - 2));
    int tid = pid * 1000;  // no two threads of a trace have the same
    for (auto& [kind, of_kind] : by_kind) {
      const char* what = kind == Track::kCalls   ? "calls"
                         : kind == Track::kSteps ? "steps"
                                                 : "steps of the rank";
      int beside = 0;
      for (const Thread& one : ThreadsOf(NestsOf(std::move(of_kind)))) {
        ++beside;
        writer.AddThread(pid, parent, ++tid,
                         beside == 1 ? std::string(what) : absl::StrCat(what, " ", beside), one);
      }
    }
  }
  return writer.Take();
}

}  // namespace tributary::telemetry
