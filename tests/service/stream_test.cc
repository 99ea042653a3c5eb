// AttendStream: many calls in flight, order, errors inside, backpressure, cancellation.
#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <thread>

#include "service/api/long_answers.h"
#include "tests/service/fake_group.h"
#include "tests/service/model_host.h"
#include "tests/service/raw_call.h"
#include "tests/service/test_service.h"

namespace tributary::service::testing {
namespace {

using ::grpc::StatusCode;

class StreamTest : public ::testing::Test {
 protected:
  void Prepare(TestService& service, int sequences) {
    ASSERT_TRUE(CreateCache(service.stub(), "m", spec_).ok());
    for (int id = 1; id <= sequences; ++id) ASSERT_TRUE(Open(service.stub(), "m", id).ok());
  }
  using Stream = grpc::ClientReaderWriterInterface<v1::AttendRequest, v1::AttendReply>;

  // A token of each of the sequences 1 to `count`, in calls with their numbers.
  void SendTokens(Stream& stream, uint64_t count) {
    for (uint64_t id = 1; id <= count; ++id) {
      v1::AttendRequest request = AttendOf(spec_, "m", id, 0, 1);
      request.set_request_id(id);
      ASSERT_TRUE(stream.Write(request));
    }
  }
  static void Cancel(grpc::ClientContext& context, Stream& stream) {
    context.TryCancel();
    EXPECT_EQ(stream.Finish().error_code(), StatusCode::CANCELLED);
  }

  const v1::CacheSpec spec_ = SmallSpec();
};

TEST_F(StreamTest, CallsOfManySequencesAreInFlightTogetherAndEachSequenceInOrder) {
  TestService service({.workers = 4});
  constexpr int kSequences = 8, kTokens = 20;
  Prepare(service, kSequences);
  ModelHost host(&service.stub(), "m", spec_, DType::kF32, 1);
  grpc::ClientContext context;
  const auto stream = service.stub().AttendStream(&context);
  std::vector<v1::AttendRequest> requests;
  for (int token = 0; token < kTokens; ++token) {
    for (uint64_t id = 1; id <= kSequences; ++id) {
      requests.push_back(host.MakeStep(0, {{id, 1}}));
      requests.back().set_request_id(requests.size());
    }
  }
  // All are sent without waiting for any: a token that took effect before its predecessor would be
  // a gap.
  std::thread writer([&] {
    for (const auto& request : requests) ASSERT_TRUE(stream->Write(request));
    stream->WritesDone();
  });
  std::set<uint64_t> answered;
  v1::AttendReply reply;
  while (stream->Read(&reply)) {
    ASSERT_TRUE(reply.status().code() == 0) << reply.status().message();
    EXPECT_TRUE(answered.insert(reply.request_id()).second);
    host.Check(requests.at(reply.request_id() - 1), reply);
  }
  writer.join();
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(answered.size(), requests.size());
  const auto statistics = service.Topology().statistics();
  EXPECT_LT(statistics.steps(), statistics.requests()) << "sequences share steps";
}

// Long replies are sent by another thread than short ones.
TEST_F(StreamTest, LongRepliesAndShortOnesAllCome) {
  TestService service({.workers = 2});
  constexpr int kSequences = 2;
  Prepare(service, kSequences);
  ModelHost host(&service.stub(), "m", spec_, DType::kF32, 1);
  grpc::ClientContext context;
  const auto stream = service.stub().AttendStream(&context);
  std::vector<v1::AttendRequest> requests;
  for (const int32_t tokens : {1, 400, 1, 1, 400, 400, 1}) {
    for (uint64_t id = 1; id <= kSequences; ++id) {
      requests.push_back(host.MakeStep(0, {{id, tokens}}));
      requests.back().set_request_id(requests.size());
    }
  }
  std::thread writer([&] {
    for (const auto& request : requests) ASSERT_TRUE(stream->Write(request));
    stream->WritesDone();
  });
  std::set<uint64_t> answered;
  size_t longest = 0;
  v1::AttendReply reply;
  while (stream->Read(&reply)) {
    ASSERT_EQ(reply.status().code(), 0) << reply.status().message();
    EXPECT_TRUE(answered.insert(reply.request_id()).second);
    host.Check(requests.at(reply.request_id() - 1), reply);
    longest = std::max(longest, reply.ByteSizeLong());
  }
  writer.join();
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(answered.size(), requests.size());
  EXPECT_GT(longest, LongAnswers::kLongBytes);
}

TEST_F(StreamTest, AnErrorComesInItsReplyAndTheStreamGoesOn) {
  TestService service({.workers = 2});
  Prepare(service, 1);
  grpc::ClientContext context;
  const auto stream = service.stub().AttendStream(&context);
  v1::AttendRequest gap = AttendOf(spec_, "m", 1, 7, 1);
  gap.set_request_id(1);
  v1::AttendRequest bad = AttendOf(spec_, "m", 1, 0, 1);
  bad.set_request_id(2);
  bad.mutable_q()->set_shape(1, 5);
  v1::AttendRequest good = AttendOf(spec_, "m", 1, 0, 1);
  good.set_request_id(3);
  for (const auto* request : {&gap, &bad, &good}) ASSERT_TRUE(stream->Write(*request));
  std::map<uint64_t, v1::AttendReply> replies;
  for (int i = 0; i < 3; ++i) {
    v1::AttendReply reply;
    ASSERT_TRUE(stream->Read(&reply));
    replies[reply.request_id()] = reply;
  }
  EXPECT_EQ(replies[1].status().code(), StatusCode::OUT_OF_RANGE);
  EXPECT_EQ(replies[2].status().code(), StatusCode::INVALID_ARGUMENT);
  google::rpc::BadRequest violation;
  ASSERT_TRUE(DetailOf(replies[2].status(), &violation));
  EXPECT_EQ(violation.field_violations(0).field(), "q.shape[1]");
  EXPECT_FALSE(replies[3].has_status());
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(StreamTest, ARequestIdInFlightIsRefused) {
  auto* group = new FakeGroup(2);
  TestService service({}, std::unique_ptr<WorkerGroup>(group));
  Prepare(service, 2);
  group->Hold();
  grpc::ClientContext context;
  const auto stream = service.stub().AttendStream(&context);
  for (uint64_t id = 1; id <= 2; ++id) {
    v1::AttendRequest request = AttendOf(spec_, "m", id, 0, 1);
    request.set_request_id(5);
    ASSERT_TRUE(stream->Write(request));
  }
  v1::AttendReply reply;
  ASSERT_TRUE(stream->Read(&reply));
  EXPECT_EQ(reply.status().code(), StatusCode::INVALID_ARGUMENT);
  google::rpc::BadRequest violation;
  ASSERT_TRUE(DetailOf(reply.status(), &violation));
  EXPECT_EQ(violation.field_violations(0).field(), "request_id");
  group->Release();
  ASSERT_TRUE(stream->Read(&reply));
  EXPECT_EQ(reply.status().code(), 0);
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(StreamTest, AStreamIsReadNoFurtherThanItsCallsInFlightAllow) {
  auto* group = new FakeGroup(2);
  TestService service({.max_calls_per_stream = 3}, std::unique_ptr<WorkerGroup>(group));
  Prepare(service, 10);
  group->Hold();
  grpc::ClientContext context;
  const auto stream = service.stub().AttendStream(&context);
  std::thread writer([&] {
    for (uint64_t id = 1; id <= 10; ++id) {
      v1::AttendRequest request = AttendOf(spec_, "m", id, 0, 1);
      request.set_request_id(id);
      ASSERT_TRUE(stream->Write(request));
    }
    stream->WritesDone();
  });
  group->WaitForHeld(2);
  EXPECT_LE(service.Topology().statistics().requests(), 3u);
  group->Release();
  v1::AttendReply reply;
  int replies = 0;
  while (stream->Read(&reply)) ++replies;
  writer.join();
  EXPECT_EQ(replies, 10);
  EXPECT_TRUE(stream->Finish().ok());
}

// Streams of a client whose calls have many bytes in flight wait, and its unary calls are refused.
TEST_F(StreamTest, AStreamIsReadNoFurtherThanItsBytesInFlightAllow) {
  auto* group = new FakeGroup(2);
  TestService::Options options;
  options.server.bytes_in_flight = {.per_caller = 40'000};
  TestService service(options, std::unique_ptr<WorkerGroup>(group));
  Prepare(service, 10);
  const auto request_of = [&](uint64_t id) {  // about 16 KB, and 8 KB of its reply
    v1::AttendRequest request = AttendOf(spec_, "m", id, 0, 8);
    request.set_request_id(id);
    return request;
  };
  group->Hold();
  grpc::ClientContext context;
  const auto stream = service.stub().AttendStream(&context);
  std::thread writer([&] {
    for (uint64_t id = 1; id <= 9; ++id) ASSERT_TRUE(stream->Write(request_of(id)));
    stream->WritesDone();
  });
  group->WaitForHeld(2);
  const auto requests = [&] { return service.Topology().statistics().requests(); };
  EXPECT_TRUE(test::Eventually(std::chrono::seconds(60), [&] {
    v1::AttendReply refused;
    const grpc::Status status = Attend(service.stub(), request_of(10), &refused);
    google::rpc::QuotaFailure quota;
    return status.error_code() == StatusCode::RESOURCE_EXHAUSTED && DetailOf(status, &quota) &&
           quota.violations(0).subject() == Me() + " bytes";
  }));
  EXPECT_LE(requests(), 4u);
  group->Release();
  v1::AttendReply reply;
  int replies = 0;
  while (stream->Read(&reply)) replies += reply.has_status() ? 0 : 1;
  writer.join();
  EXPECT_GE(replies, 9);
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(StreamTest, AStreamWhoseRepliesNobodyTakesEnds) {
  TestService::Options options;
  options.server.streams = {.interval = std::chrono::milliseconds(20),
                            .reply_timeout = std::chrono::milliseconds(300)};
  TestService service(options, std::make_unique<FakeGroup>(2));
  Prepare(service, 1);
  grpc::ClientContext context;
  const auto stream = service.stub().AttendStream(&context);
  for (int call = 0; call < 100; ++call) {  // of 1 MB each
    v1::AttendRequest request = AttendOf(spec_, "m", 1, 0, 1'000);
    request.set_request_id(call + 1);
    if (!stream->Write(request)) break;
  }
  EXPECT_TRUE(test::Eventually(std::chrono::seconds(60),
                               [&] { return service.server().open_streams() == 0; }));
  v1::AttendReply reply;
  while (stream->Read(&reply)) continue;  // those that were on their way
  EXPECT_EQ(stream->Finish().error_code(), StatusCode::CANCELLED);
}

TEST_F(StreamTest, ARequestThatIsTooLargeIsRefusedAndTheStreamGoesOn) {
  TestService::Options options;
  options.coordinator.max_message_bytes = 10'000;
  TestService service(options, std::make_unique<FakeGroup>(2));
  Prepare(service, 1);
  grpc::ClientContext context;
  const auto stream = service.stub().AttendStream(&context);
  v1::AttendRequest large = AttendOf(spec_, "m", 1, 0, 8);  // 16 KB
  large.set_request_id(1);
  v1::AttendRequest small = AttendOf(spec_, "m", 1, 0, 2);
  small.set_request_id(2);
  v1::AttendReply reply;
  ASSERT_TRUE(stream->Write(large));
  ASSERT_TRUE(stream->Read(&reply));
  EXPECT_EQ(reply.request_id(), 1u);
  EXPECT_EQ(reply.status().code(), StatusCode::RESOURCE_EXHAUSTED);
  google::rpc::QuotaFailure quota;
  ASSERT_TRUE(DetailOf(reply.status(), &quota));
  EXPECT_EQ(quota.violations(0).subject(), "max_message_bytes");
  ASSERT_TRUE(stream->Write(small));
  ASSERT_TRUE(stream->Read(&reply));
  EXPECT_FALSE(reply.has_status());
  // The same in a call of its own.
  const grpc::Status status = Attend(service.stub(), large, &reply);
  EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED);
  ASSERT_TRUE(DetailOf(status, &quota));
  EXPECT_EQ(quota.violations(0).subject(), "max_message_bytes");
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
}

// A stream whose messages are bytes.
class RawStream {
 public:
  explicit RawStream(const std::shared_ptr<grpc::Channel>& channel,
                     const std::string& method = "AttendStream")
      : stub_(channel) {
    context_.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    call_ = stub_.PrepareCall(&context_, "/tributary.v1.AttentionService/" + method, &queue_);
    call_->StartCall(nullptr);
    Done();
  }
  bool Write(const std::string& bytes) {
    const grpc::Slice slice(bytes);
    call_->Write(grpc::ByteBuffer(&slice, 1), nullptr);
    return Done();
  }
  bool Read(v1::AttendReply* reply) {
    grpc::ByteBuffer bytes;
    call_->Read(&bytes, nullptr);
    grpc::Slice whole;
    return Done() && bytes.DumpToSingleSlice(&whole).ok() &&
           reply->ParseFromArray(whole.begin(), static_cast<int>(whole.size()));
  }
  // Until there are no more. A client learns how its stream ended when it has read all of them.
  void SkipReplies() {
    grpc::ByteBuffer bytes;
    do {
      call_->Read(&bytes, nullptr);
    } while (Done());
  }
  grpc::Status Finish() {
    grpc::Status status;
    call_->Finish(&status, nullptr);
    Done();
    return status;
  }

 private:
  bool Done() {
    void* tag = nullptr;
    bool ok = false;
    return queue_.Next(&tag, &ok) && ok;
  }

  grpc::GenericStub stub_;
  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;
};

TEST_F(StreamTest, WhatCannotBeParsedEndsTheStreamWithAStatusAfterTheCallsBefore) {
  auto* group = new FakeGroup(2);
  TestService service({}, std::unique_ptr<WorkerGroup>(group));
  Prepare(service, 1);
  group->Hold();
  RawStream stream(service.NewChannel());
  v1::AttendRequest good = AttendOf(spec_, "m", 1, 0, 1);
  good.set_request_id(7);
  ASSERT_TRUE(stream.Write(good.SerializeAsString()));
  ASSERT_TRUE(stream.Write("\x0a"));
  group->WaitForHeld(1);
  group->Release();
  v1::AttendReply reply;
  ASSERT_TRUE(stream.Read(&reply));
  EXPECT_EQ(reply.request_id(), 7u);
  EXPECT_FALSE(reply.has_status());
  EXPECT_FALSE(stream.Read(&reply));
  const grpc::Status status = stream.Finish();
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT) << status.error_message();
  // A unary call likewise.
  EXPECT_EQ(RawCall(service.NewChannel(), "/tributary.v1.AttentionService/OpenSequence", "\x0a",
                    std::chrono::seconds(60))
                .status.error_code(),
            StatusCode::INVALID_ARGUMENT);
}

TEST_F(StreamTest, WhatCannotBeParsedEndsASessionWithAStatus) {
  TestService service({}, std::make_unique<FakeGroup>(2));
  Prepare(service, 1);
  v1::SessionRequest open;
  open.mutable_open()->set_cache_id("m");
  open.mutable_open()->set_memory(v1::SESSION_MEMORY_MESSAGES);
  open.mutable_open()->set_max_rows(4);
  open.mutable_open()->set_max_new_tokens(4);
  open.mutable_open()->set_q_dtype(v1::DTYPE_F32);
  for (const bool opened : {false, true}) {
    SCOPED_TRACE(opened);
    RawStream stream(service.NewChannel(), "AttendSession");
    if (opened) {
      ASSERT_TRUE(stream.Write(open.SerializeAsString()));
    }
    ASSERT_TRUE(stream.Write("\x0a"));
    stream.Write("");  // has no body, which is another error: the first one counts
    stream.SkipReplies();
    const grpc::Status status = stream.Finish();
    EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(status.error_message(), "the message cannot be parsed");
  }
}

TEST_F(StreamTest, ACallIsCancelledByItself) {
  auto* group = new FakeGroup(2);
  TestService service({}, std::unique_ptr<WorkerGroup>(group));
  Prepare(service, 1);
  group->Hold();
  grpc::ClientContext context;
  const auto stream = service.stub().AttendStream(&context);
  for (uint64_t id = 1; id <= 3; ++id) {
    v1::AttendRequest request =
        AttendOf(spec_, "m", 1, id == 3 ? 1 : static_cast<int64_t>(id) - 1, 1);
    request.set_request_id(id);
    ASSERT_TRUE(stream->Write(request));
  }
  v1::AttendRequest cancel;
  cancel.set_cancel(true);
  for (const uint64_t id : {2, 99}) {
    cancel.set_request_id(id);
    ASSERT_TRUE(stream->Write(cancel));
  }
  // What is sent next is read after those.
  v1::AttendRequest late = AttendOf(spec_, "m", 1, 2, 1);
  late.set_request_id(4);
  late.set_timeout_ms(1);
  ASSERT_TRUE(stream->Write(late));
  v1::AttendReply reply;
  ASSERT_TRUE(stream->Read(&reply));
  EXPECT_EQ(reply.request_id(), 4u);
  EXPECT_EQ(reply.status().code(), StatusCode::DEADLINE_EXCEEDED);
  group->Release();
  std::map<uint64_t, int> codes;
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(stream->Read(&reply));
    codes[reply.request_id()] = reply.status().code();
  }
  EXPECT_EQ(codes, (std::map<uint64_t, int>{{1, 0}, {2, StatusCode::CANCELLED}, {3, 0}}));
  late.set_timeout_ms(-1);
  ASSERT_TRUE(stream->Write(late));
  ASSERT_TRUE(stream->Read(&reply));
  EXPECT_EQ(reply.status().code(), StatusCode::INVALID_ARGUMENT);
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
  v1::AttendRequest unary = AttendOf(spec_, "m", 1, 2, 1);
  unary.set_cancel(true);
  EXPECT_EQ(FieldOf(Attend(service.stub(), unary, &reply)), "cancel");
}

TEST_F(StreamTest, AClientHasAsManyStreamsAsItMayHave) {
  TestService::Options options;
  options.server.max_streams_per_client = 1;
  TestService service(options, std::make_unique<FakeGroup>(2));
  Prepare(service, 1);
  grpc::ClientContext first, second;
  const auto stream = service.stub().AttendStream(&first);
  SendTokens(*stream, 1);
  v1::AttendReply reply;
  ASSERT_TRUE(stream->Read(&reply));
  const grpc::Status status = service.stub().AttendStream(&second)->Finish();
  EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
  google::rpc::QuotaFailure quota;
  ASSERT_TRUE(DetailOf(status, &quota));
  EXPECT_EQ(quota.violations(0).subject(), Me() + " streams");
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(StreamTest, ACancelledStreamLeavesTheServiceWhole) {
  auto* group = new FakeGroup(2);
  TestService service({}, std::unique_ptr<WorkerGroup>(group));
  Prepare(service, 4);
  for (int round = 0; round < 20; ++round) {
    group->Hold();
    grpc::ClientContext context;
    const auto stream = service.stub().AttendStream(&context);
    SendTokens(*stream, 4);
    group->WaitForHeld(1);
    Cancel(context, *stream);
    group->Release();
  }
  ASSERT_TRUE(service.coordinator().WaitIdle(Coordinator::Clock::now() + std::chrono::seconds(60)));
  for (uint64_t id = 1; id <= 4; ++id) {
    v1::CloseSequenceRequest request;
    request.set_cache_id("m");
    request.set_sequence_id(id);
    v1::CloseSequenceReply reply;
    grpc::ClientContext context;
    EXPECT_TRUE(service.stub().CloseSequence(&context, request, &reply).ok());
  }
  EXPECT_EQ(service.Topology().caches(0).pages_used(), 0);
}

// A full stream is not read, so nothing but a read tells that its client is gone.
TEST_F(StreamTest, ACancelledStreamThatWasFullEndsToo) {
  auto* group = new FakeGroup(2);
  TestService service({.max_calls_per_stream = 2}, std::unique_ptr<WorkerGroup>(group));
  Prepare(service, 2);
  group->Hold();
  grpc::ClientContext context;
  const auto stream = service.stub().AttendStream(&context);
  SendTokens(*stream, 2);
  group->WaitForHeld(2);
  EXPECT_EQ(service.server().open_streams(), 1u);
  Cancel(context, *stream);
  // Not before the service knows of it, or replies would be written still.
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  group->Release();
  EXPECT_TRUE(test::Eventually(std::chrono::seconds(60),
                               [&] { return service.server().open_streams() == 0; }));
}

TEST_F(StreamTest, AnUnaryCallPastItsDeadlineEndsAndChangesNothingWhenItHadNotBegun) {
  auto* group = new FakeGroup(2);
  TestService service({}, std::unique_ptr<WorkerGroup>(group));
  Prepare(service, 1);
  group->Hold();
  std::thread first([&] {
    v1::AttendReply reply;
    EXPECT_TRUE(Attend(service.stub(), AttendOf(spec_, "m", 1, 0, 1), &reply).ok());
  });
  group->WaitForHeld(1);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(30));
  v1::AttendReply reply;
  EXPECT_EQ(service.stub().Attend(&context, AttendOf(spec_, "m", 1, 1, 1), &reply).error_code(),
            StatusCode::DEADLINE_EXCEEDED);
  // The service's clock for the call started later than the caller's.
  EXPECT_TRUE(test::Eventually(std::chrono::seconds(60), [&] {
    return service.Topology().statistics().requests_failed() == 1;
  }));
  group->Release();
  first.join();
  ASSERT_TRUE(service.coordinator().WaitIdle(Coordinator::Clock::now() + std::chrono::seconds(60)));
  EXPECT_EQ(service.Topology().statistics().tokens_appended(), 1u);
}

TEST_F(StreamTest, DrainingAnswersWhatWasAcceptedRefusesTheRestAndEndsStreams) {
  auto* group = new FakeGroup(2);
  TestService service({}, std::unique_ptr<WorkerGroup>(group));
  Prepare(service, 3);
  group->Hold();
  grpc::ClientContext context;
  const auto stream = service.stub().AttendStream(&context);
  v1::AttendRequest on_stream = AttendOf(spec_, "m", 1, 0, 1);
  on_stream.set_request_id(1);
  ASSERT_TRUE(stream->Write(on_stream));
  group->WaitForHeld(1);
  std::thread unary([&] {
    v1::AttendReply reply;
    const grpc::Status status = Attend(service.stub(), AttendOf(spec_, "m", 2, 0, 1), &reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
  });
  group->WaitForHeld(2);

  bool drained = false;
  std::thread drainer([&] {
    drained = service.server().Drain(Coordinator::Clock::now() + std::chrono::minutes(5));
  });
  service.WaitNotReady();
  on_stream.set_request_id(2);
  on_stream.mutable_entries(0)->set_sequence_id(3);
  ASSERT_TRUE(stream->Write(on_stream));
  v1::AttendReply reply;
  ASSERT_TRUE(stream->Read(&reply));
  EXPECT_EQ(reply.request_id(), 2u);
  EXPECT_EQ(reply.status().code(), StatusCode::UNAVAILABLE);
  google::rpc::RetryInfo retry;
  EXPECT_TRUE(DetailOf(reply.status(), &retry));

  group->Release();
  ASSERT_TRUE(stream->Read(&reply));
  EXPECT_EQ(reply.request_id(), 1u);
  EXPECT_EQ(reply.status().code(), 0);
  EXPECT_FALSE(stream->Read(&reply));
  EXPECT_EQ(stream->Finish().error_code(), StatusCode::UNAVAILABLE);
  unary.join();
  drainer.join();
  EXPECT_TRUE(drained);
}

}  // namespace
}  // namespace tributary::service::testing
