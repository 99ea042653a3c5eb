// Traces, the flight record and log lines of a real coordinator with two real workers.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "tests/fault/load.h"
#include "tests/fault/programs.h"
#include "tributary/v1/diagnostics.grpc.pb.h"

namespace tributary::test {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;

constexpr std::chrono::seconds kPatience{60};
constexpr int kRanks = 2;
constexpr char kTraceId[] = "0af7651916cd43dd8448eb211c80319c";
constexpr char kSampled[] = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
constexpr char kNotSampled[] = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00";

class DiagnosticsTest : public ::testing::Test {
 protected:
  void Start(std::vector<std::string> coordinator_flags = {}) {
    coordinator_ = StartCoordinator(directory_, kRanks, std::move(coordinator_flags));
    for (int rank = 0; rank < kRanks; ++rank) {
      workers_.push_back(StartWorker(directory_, WorkerAddress(directory_), rank,
                                     {"--log_format=json", "--trace_file=" + TraceFile(rank)}));
    }
    // Dialled once it listens: a channel that failed once waits for seconds.
    ASSERT_TRUE(Eventually(kPatience,
                           [&] { return coordinator_->Log().find("ready") != std::string::npos; }));
    stub_ = ConnectTo(PublicAddress(directory_));
    diagnostics_ = v1::DiagnosticsService::NewStub(
        grpc::CreateChannel(PublicAddress(directory_), grpc::InsecureChannelCredentials()));
    ASSERT_TRUE(CreateCache().ok());
  }

  std::string TraceFile(int rank) const {
    return directory_.File("trace" + std::to_string(rank) + ".json");
  }

  grpc::Status CreateCache() {
    v1::CreateCacheRequest request;
    request.set_cache_id(kCacheId);
    *request.mutable_spec() = PublicSpec();
    grpc::ClientContext context;
    v1::CreateCacheReply reply;
    return stub_->CreateCache(&context, request, &reply);
  }

  // A token of sequence 1, with a traceparent in the metadata (empty: none).
  grpc::Status AttendOneToken(int64_t position, const std::string& traceparent) {
    const v1::AttendRequest request = OneToken(position);
    grpc::ClientContext context;
    if (!traceparent.empty()) context.AddMetadata("traceparent", traceparent);
    v1::AttendReply reply;
    return stub_->Attend(&context, request, &reply);
  }

  static v1::AttendRequest OneToken(int64_t position) {
    const v1::CacheSpec spec = PublicSpec();
    v1::AttendRequest request;
    request.set_request_id(100 + position);
    request.set_cache_id(kCacheId);
    request.set_mode(v1::ATTEND_MODE_CAUSAL);
    v1::AttendEntry* entry = request.add_entries();
    entry->set_sequence_id(1);
    entry->set_first_position(position);
    entry->set_query_rows(1);
    entry->set_new_tokens(1);
    const auto fill = [&](int heads, v1::Tensor* tensor) {
      tensor->set_dtype(v1::DTYPE_F32);
      for (const int extent : {1, heads, spec.head_dim()}) tensor->add_shape(extent);
      tensor->set_inline_(std::string(4 * heads * spec.head_dim(), '\0'));
    };
    fill(spec.q_heads(), request.mutable_q());
    fill(spec.kv_heads(), request.mutable_k());
    fill(spec.kv_heads(), request.mutable_v());
    return request;
  }

  grpc::Status Open() {
    v1::OpenSequenceRequest request;
    request.set_cache_id(kCacheId);
    request.set_sequence_id(1);
    grpc::ClientContext context;
    v1::OpenSequenceReply reply;
    return stub_->OpenSequence(&context, request, &reply);
  }

  json Trace() {
    grpc::ClientContext context;
    v1::GetTraceReply reply;
    const grpc::Status status = diagnostics_->GetTrace(&context, {}, &reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return json::parse(reply.chrome_json());
  }

  v1::FlightRecord Flight(uint32_t steps = 0) {
    grpc::ClientContext context;
    v1::GetFlightRecordRequest request;
    request.set_steps(steps);
    v1::FlightRecord record;
    EXPECT_TRUE(diagnostics_->GetFlightRecord(&context, request, &record).ok());
    return record;
  }

  // Names of a trace's spans, "rank 1/attend" for those of a rank.
  static std::multiset<std::string> Spans(const json& trace, const std::string& trace_id) {
    std::map<int, std::string> processes;
    std::multiset<std::string> names;
    for (const json& event : trace["traceEvents"]) {
      if (event["ph"] == "M") processes[event["pid"]] = event["args"]["name"];
    }
    for (const json& event : trace["traceEvents"]) {
      if (event["ph"] != "b" && event["ph"] != "X") continue;
      if (event["args"]["trace_id"] != trace_id) continue;
      const std::string name = event["name"];
      names.insert(event["pid"] == 0 ? name : processes[event["pid"]] + "/" + name);
    }
    return names;
  }

  const TemporaryDirectory directory_;
  std::unique_ptr<ChildProcess> coordinator_;
  std::vector<std::unique_ptr<ChildProcess>> workers_;
  std::shared_ptr<v1::AttentionService::Stub> stub_;
  std::unique_ptr<v1::DiagnosticsService::Stub> diagnostics_;
};

// ------------------------------------------------------------------------------------------ traces

TEST_F(DiagnosticsTest, ASampledCallIsTracedThroughItsStepOnEveryRank) {
  Start();
  ASSERT_TRUE(Open().ok());
  ASSERT_TRUE(AttendOneToken(0, "").ok());
  ASSERT_TRUE(AttendOneToken(1, kNotSampled).ok());
  ASSERT_TRUE(AttendOneToken(2, "nonsense").ok());
  EXPECT_TRUE(Spans(Trace(), kTraceId).empty()) << "nobody asked for these";
  ASSERT_TRUE(AttendOneToken(3, kSampled).ok());

  const std::multiset<std::string> wanted = {
      "Attend",          "queue",       "step",        "build",         "workers",
      "reply",           "rank 0/step", "rank 0/plan", "rank 0/append", "rank 0/attend",
      "rank 0/exchange", "rank 1/step", "rank 1/plan", "rank 1/append", "rank 1/attend",
      "rank 1/exchange"};
  json trace;
  ASSERT_TRUE(Eventually(kPatience, [&] {  // a step is told after its callers have their replies
    trace = Trace();
    return Spans(trace, kTraceId).size() >= wanted.size();
  }));
  EXPECT_EQ(Spans(trace, kTraceId), wanted);

  // Every span but the call's own has its parent in the trace, and lies inside the call.
  std::map<std::string, json> by_id;
  std::map<std::string, int64_t> ends;  // of asynchronous events, by lane and name
  for (const json& event : trace["traceEvents"]) {
    if (event["ph"] == "b" || event["ph"] == "X") by_id[event["args"]["span_id"]] = event;
  }
  EXPECT_EQ(by_id.size(), wanted.size()) << "ids are unique";
  for (const auto& [id, event] : by_id) {
    const std::string parent = event["args"]["parent_span_id"];
    if (event["name"] == "Attend") {
      EXPECT_EQ(parent, "b7ad6b7169203331") << "the caller's";
      EXPECT_EQ(event["args"]["code"], 0);
    } else {
      EXPECT_EQ(by_id.count(parent), 1) << event.dump();
      EXPECT_TRUE(event["args"].contains("step")) << event.dump();
    }
  }
}

TEST_F(DiagnosticsTest, CallsOnAStreamHaveTracesOfTheirOwn) {
  Start();
  ASSERT_TRUE(Open().ok());
  grpc::ClientContext context;
  context.AddMetadata("traceparent", kSampled);
  const auto stream = stub_->AttendStream(&context);
  v1::AttendRequest first = OneToken(0), second = OneToken(1);
  second.set_traceparent("00-11111111111111111111111111111111-2222222222222222-01");
  v1::AttendReply reply;
  for (const v1::AttendRequest& request : {first, second}) {
    ASSERT_TRUE(stream->Write(request));
    ASSERT_TRUE(stream->Read(&reply));
    ASSERT_FALSE(reply.has_status()) << reply.status().message();
  }
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
  for (const std::string& trace_id : {std::string(kTraceId), std::string(32, '1')}) {
    EXPECT_TRUE(Eventually(kPatience, [&] {
      return Spans(Trace(), trace_id).count("rank 1/exchange") == 1;
    })) << trace_id;
    EXPECT_EQ(Spans(Trace(), trace_id).count("AttendStream"), 1);
  }
}

TEST_F(DiagnosticsTest, FilesAreWrittenAtTheEnd) {
  const std::string file = directory_.File("trace.json");
  Start({"--trace_file=" + file, "--trace_sample=1", "--trace_spans=20"});
  ASSERT_TRUE(Open().ok());
  for (int64_t position = 0; position < 4; ++position) {
    ASSERT_TRUE(AttendOneToken(position, "").ok());
  }
  for (auto& process : workers_) {
    process->Signal(SIGTERM);
    EXPECT_EQ(process->Wait(kPatience), 0);
  }
  coordinator_->Signal(SIGTERM);
  EXPECT_EQ(coordinator_->Wait(kPatience), 0);
  int spans = 0;
  const json whole = json::parse(ReadWholeFile(file));
  for (const json& event : whole["traceEvents"]) {
    spans += event["ph"] == "b" || event["ph"] == "X" ? 1 : 0;
  }
  EXPECT_EQ(spans, 20) << "the last ones";
  for (int rank = 0; rank < kRanks; ++rank) {
    int steps = 0;
    const json of_rank = json::parse(ReadWholeFile(TraceFile(rank)));
    for (const json& event : of_rank["traceEvents"]) {
      steps += event["name"] == "step" && event["pid"] == rank + 1 ? 1 : 0;
    }
    EXPECT_EQ(steps, 4) << rank;
  }
}

TEST_F(DiagnosticsTest, TracesComeInPerfettosFormatToo) {
  Start();
  ASSERT_TRUE(Open().ok());
  ASSERT_TRUE(AttendOneToken(0, kSampled).ok());
  ASSERT_TRUE(Eventually(kPatience,
                         [&] { return Spans(Trace(), kTraceId).count("rank 1/exchange") == 1; }));
  grpc::ClientContext context;
  v1::GetTraceRequest request;
  request.set_format(v1::GetTraceRequest::PERFETTO);
  v1::GetTraceReply reply;
  ASSERT_TRUE(diagnostics_->GetTrace(&context, request, &reply).ok());
  EXPECT_EQ(reply.chrome_json(), "");
  for (const char* text : {"coordinator", "rank 0", "rank 1", "calls", "Attend", "exchange"}) {
    EXPECT_NE(reply.perfetto().find(text), std::string::npos) << text;
  }
}

TEST_F(DiagnosticsTest, WithoutSpansThereIsNoTrace) {
  Start({"--trace_spans=0"});
  grpc::ClientContext context;
  v1::GetTraceReply reply;
  EXPECT_EQ(diagnostics_->GetTrace(&context, {}, &reply).error_code(),
            grpc::StatusCode::FAILED_PRECONDITION);
}

// ---------------------------------------------------------------------------------- flight record

TEST_F(DiagnosticsTest, TheFlightRecordShowsAStepThatStalls) {
  Start({"--step_timeout=3s"});
  ASSERT_TRUE(Open().ok());
  ASSERT_TRUE(AttendOneToken(0, "").ok());
  ASSERT_TRUE(Eventually(kPatience, [&] {
    const v1::FlightRecord record = Flight();
    return record.steps_size() == 1 && record.steps(0).state() == v1::StepFlight::DONE;
  }));
  const v1::StepFlight done = Flight().steps(0);
  EXPECT_EQ(done.kind(), v1::StepFlight::DECODE);
  EXPECT_EQ(done.query_rows(), 1);
  EXPECT_EQ(done.new_tokens(), 1);
  EXPECT_EQ(done.calls(), 1);
  ASSERT_EQ(done.ranks_size(), kRanks);
  for (const auto& rank : done.ranks()) EXPECT_TRUE(rank.replied());

  workers_[1]->Pause();
  grpc::Status status;
  std::thread call([&] { status = AttendOneToken(1, ""); });
  EXPECT_TRUE(Eventually(kPatience, [&] {
    const v1::FlightRecord last = Flight(1);
    return last.steps_size() == 1 && last.steps(0).number() > done.number() &&
           last.steps(0).state() == v1::StepFlight::IN_FLIGHT;
  })) << "what runs now is shown";
  call.join();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::ABORTED);
  EXPECT_TRUE(Eventually(kPatience, [&] {
    const v1::FlightRecord last = Flight(1);
    return last.steps(0).state() == v1::StepFlight::FAILED &&
           last.steps(0).code() == static_cast<int>(grpc::StatusCode::ABORTED);
  }));
  EXPECT_TRUE(Eventually(kPatience, [&] {
    return coordinator_->Log().find("flight record: step") != std::string::npos;
  })) << "and the log is told when the group breaks";
  EXPECT_THAT(coordinator_->Log(), AllOf(HasSubstr("DECODE of cache"), HasSubstr("group broken")));
  workers_[1]->Resume();
  EXPECT_TRUE(Eventually(kPatience, [&] { return AttendOneToken(1, "").ok(); }));
}

// ------------------------------------------------------------------------------------------- logs

TEST_F(DiagnosticsTest, LogLinesAreJsonWithRankEpochAndRequest) {
  Start({"--log_format=json", "--log_level=debug"});
  ASSERT_TRUE(Open().ok());
  ASSERT_TRUE(AttendOneToken(0, kSampled).ok());
  EXPECT_EQ(AttendOneToken(7, "").error_code(), grpc::StatusCode::OUT_OF_RANGE);
  {
    v1::DeleteCacheRequest request;
    request.set_cache_id("\xff\xfe");  // Protobuf itself complains
    v1::DeleteCacheReply reply;
    grpc::ClientContext context;
    EXPECT_FALSE(stub_->DeleteCache(&context, request, &reply).ok());
  }
  const auto lines = [](const ChildProcess& process) {
    std::vector<json> parsed;
    std::istringstream text(process.Log());
    for (std::string line; std::getline(text, line);) {
      parsed.push_back(json::parse(line, nullptr, false));
      EXPECT_TRUE(parsed.back().is_object()) << line;
    }
    return parsed;
  };
  const auto find = [](const std::vector<json>& all, const auto& predicate) -> const json* {
    for (const json& line : all) {
      if (predicate(line)) return &line;
    }
    return nullptr;
  };
  const std::vector<json> log = lines(*coordinator_);
  for (const json& line : log) {
    EXPECT_TRUE(line.contains("ts") && line.contains("level") && line.contains("msg")) << line;
  }
  const json* traced = find(log, [](const json& line) {
    return line["msg"] == "call" && line["method"] == "Attend" && line["code"] == "OK";
  });
  ASSERT_NE(traced, nullptr);
  EXPECT_EQ((*traced)["trace_id"], kTraceId);
  EXPECT_EQ((*traced)["request_id"], 100);
  EXPECT_TRUE((*traced)["duration_s"].is_number());
  EXPECT_NE(find(log, [](const json& line) { return line.value("code", "") == "OUT_OF_RANGE"; }),
            nullptr);

  const json* library =
      find(log, [](const json& line) { return line.value("library", "") == "protobuf"; });
  ASSERT_NE(library, nullptr);
  EXPECT_THAT((*library)["msg"].get<std::string>(), HasSubstr("invalid UTF-8"));

  const std::vector<json> worker = lines(*workers_[1]);
  const json* joined = find(worker, [](const json& line) {
    return line["msg"].get<std::string>().rfind("joined epoch", 0) == 0;
  });
  ASSERT_NE(joined, nullptr);
  EXPECT_EQ((*joined)["rank"], 1);
  EXPECT_EQ((*joined)["epoch"], 1);
}

}  // namespace
}  // namespace tributary::test
