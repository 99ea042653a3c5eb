// What the client does when the service misbehaves.
#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <future>
#include <latch>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "service/client/client.h"
#include "tests/service/client/fake_service.h"
#include "tests/support/process.h"

namespace tributary::client {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Verdict = FakeService::Verdict;

constexpr int kHeads = 2;
constexpr int kHeadDim = 4;

Verdict Fails(grpc::StatusCode code, int retry_delay_ms = 1, const std::string& field = "") {
  return {.status = RpcError(code, retry_delay_ms, field)};
}

// One call and the memory it borrows. The fake service answers with q.
struct OwnedCall {
  explicit OwnedCall(uint64_t sequence, int64_t position = 0, float value = 1.0f)
      : q(kHeads * kHeadDim, value), output(kHeads * kHeadDim, -1.0f) {
    call.cache_id = "cache";
    call.entries = {{sequence, position, 1, 0}};
    call.q = q.data();
    call.q_heads = kHeads;
    call.head_dim = kHeadDim;
    call.output = output.data();
  }
  OwnedCall(const OwnedCall&) = delete;
  OwnedCall& operator=(const OwnedCall&) = delete;

  bool answered() const { return output == q; }

  std::vector<float> q, output;
  AttendCall call;
};

class ClientRetryTest : public ::testing::Test {
 protected:
  std::unique_ptr<Client> Connect(ConnectOptions options = {}) {
    options.target = socket_.target();
    auto client = Client::Connect(options);
    EXPECT_TRUE(client.ok()) << client.status();
    return *std::move(client);
  }

  SocketPath socket_;
  FakeService service_{socket_};
};

// Every unary call, so that none is left out of the rules.
struct UnaryCall {
  std::string method;
  std::function<absl::Status(Client&)> run;
};

std::vector<UnaryCall> UnaryCalls() {
  static const std::vector<float> kv(8, 1.0f);
  return {
      {"CreateCache", [](Client& c) { return c.CreateCache("cache", {}).status(); }},
      {"DeleteCache", [](Client& c) { return c.DeleteCache("cache"); }},
      {"OpenSequence", [](Client& c) { return c.OpenSequence("cache").status(); }},
      {"OpenSequence", [](Client& c) { return c.ReopenSequence("cache", 5); }},
      {"ForkSequence", [](Client& c) { return c.ForkSequence("cache", 5, 1).status(); }},
      {"TruncateSequence", [](Client& c) { return c.TruncateSequence("cache", 5, 1).status(); }},
      {"CloseSequence", [](Client& c) { return c.CloseSequence("cache", 5); }},
      {"UpdateSequences",
       [](Client& c) {
         return c.UpdateSequences("cache", {{.kind = SequenceUpdate::Kind::kOpen}}).status();
       }},
      {"GetTopology", [](Client& c) { return c.GetTopology({}).status(); }},
      {"GetLimits", [](Client& c) { return c.GetLimits().status(); }},
      {"Append",
       [](Client& c) {
         return c.Append({.cache_id = "cache",
                          .entries = {{5, 0, 1}},
                          .k = kv.data(),
                          .v = kv.data(),
                          .kv_heads = 2,
                          .head_dim = 4});
       }},
  };
}

TEST_F(ClientRetryTest, EveryUnaryCallIsRepeatedWhileTheServiceIsUnavailable) {
  const auto client = Connect();
  for (const UnaryCall& call : UnaryCalls()) {
    for (const auto code : {grpc::StatusCode::UNAVAILABLE, grpc::StatusCode::ABORTED}) {
      const int before = service_.attempts(call.method);
      service_.on_unary = [&](const std::string&, int attempt) {
        return attempt - before <= 2 ? GrpcError(code, 1) : grpc::Status::OK;
      };
      EXPECT_EQ(call.run(*client), absl::OkStatus()) << call.method;
      EXPECT_EQ(service_.attempts(call.method) - before, 3) << call.method;
    }
  }
}

TEST_F(ClientRetryTest, FinalCodesAreReturnedAtOnce) {
  const auto client = Connect();
  for (const UnaryCall& call : UnaryCalls()) {
    for (int code = 1; code <= 16; ++code) {
      if (code == grpc::StatusCode::UNAVAILABLE || code == grpc::StatusCode::ABORTED) continue;
      const int before = service_.attempts(call.method);
      service_.on_unary = [&](const std::string&, int) {
        return GrpcError(static_cast<grpc::StatusCode>(code), 1, "the.field");
      };
      const absl::Status status = call.run(*client);
      EXPECT_EQ(static_cast<int>(status.code()), code) << call.method;
      EXPECT_EQ(status.message(), "scripted");
      EXPECT_EQ(FieldOf(status), "the.field");
      EXPECT_EQ(service_.attempts(call.method) - before, 1) << call.method << ' ' << code;
    }
  }
}

TEST_F(ClientRetryTest, AttemptsAreBounded) {
  const auto client = Connect({.max_attempts = 3});
  service_.on_unary = [](const std::string&, int) {
    return GrpcError(grpc::StatusCode::UNAVAILABLE, 1);
  };
  std::atomic<int> attends = 0;
  service_.on_attend = [&](const v1::AttendRequest&) {
    ++attends;
    return Fails(grpc::StatusCode::ABORTED);
  };
  const absl::Status unary = client->GetTopology({}).status();
  EXPECT_TRUE(absl::IsUnavailable(unary)) << unary;
  EXPECT_EQ(RetryDelayOf(unary), milliseconds(1));
  EXPECT_EQ(service_.attempts("GetTopology"), 3);
  OwnedCall call(1);
  EXPECT_TRUE(absl::IsAborted(client->Attend(call.call)));
  EXPECT_EQ(attends, 3);
}

TEST_F(ClientRetryTest, ByDefaultCallsOutlastAGroupThatFormsAnew) {
  const auto client = Connect();
  std::atomic<int> unary = 0;
  service_.on_unary = [&](const std::string&, int) {
    return ++unary <= 50 ? GrpcError(grpc::StatusCode::UNAVAILABLE, 1) : grpc::Status::OK;
  };
  std::atomic<int> attends = 0;
  service_.on_attend = [&](const v1::AttendRequest&) {
    return ++attends <= 50 ? Fails(grpc::StatusCode::ABORTED) : Verdict();
  };
  EXPECT_TRUE(client->GetTopology({}).ok());
  OwnedCall call(1);
  EXPECT_TRUE(client->Attend(call.call).ok());
  EXPECT_EQ(unary, 51);
  EXPECT_EQ(attends, 51);
}

// The second attempt begins 1,200 to 1,440 ms behind the first answer, long enough before the end
// to be answered; a third would begin behind it.
TEST_F(ClientRetryTest, TheDeadlineCoversAllAttempts) {
  const auto client = Connect({.timeout = milliseconds(2'000), .max_attempts = 1'000'000});
  service_.on_unary = [](const std::string&, int) {
    return GrpcError(grpc::StatusCode::UNAVAILABLE, 1'200);
  };
  const absl::Status unary = client->GetTopology({}).status();
  EXPECT_TRUE(absl::IsUnavailable(unary)) << unary;
  EXPECT_GE(service_.attempts("GetTopology"), 1);
  EXPECT_LE(service_.attempts("GetTopology"), 2);

  std::atomic<int> attends = 0;
  service_.on_attend = [&](const v1::AttendRequest&) {
    ++attends;
    return Fails(grpc::StatusCode::UNAVAILABLE, 1'200);
  };
  OwnedCall call(1);
  const absl::Status attend = client->Attend(call.call);
  EXPECT_TRUE(absl::IsUnavailable(attend)) << attend;
  EXPECT_GE(attends, 1);
  EXPECT_LE(attends, 2);
}

TEST_F(ClientRetryTest, AServiceThatNeverAnswersCostsTheDeadlineNoMore) {
  const auto client = Connect({.timeout = milliseconds(100)});
  service_.on_attend = [](const v1::AttendRequest&) { return Verdict{.silent = true}; };
  OwnedCall call(1);
  EXPECT_TRUE(absl::IsDeadlineExceeded(client->Attend(call.call)));
  EXPECT_FALSE(call.answered());
}

TEST_F(ClientRetryTest, ACallMayHaveATimeoutOfItsOwn) {
  auto client = Connect({.timeout = seconds(300)});
  service_.on_attend = [](const v1::AttendRequest& request) {
    return Verdict{.silent = request.entries(0).sequence_id() != 3};
  };
  OwnedCall patient(1), hasty(2), answered(3);
  std::latch patient_is_over(1);
  client->AttendAsync(patient.call, [&](const absl::Status& status) {
    EXPECT_TRUE(absl::IsCancelled(status)) << status;
    patient_is_over.count_down();
  });
  const auto other = client->WithTimeout(milliseconds(100));
  const absl::Status late = other->Attend(hasty.call);
  EXPECT_TRUE(absl::IsDeadlineExceeded(late)) << late;
  EXPECT_NE(late.message().find("100 ms"), std::string::npos) << late;
  EXPECT_EQ(client->WithTimeout(seconds(200))->Attend(answered.call), absl::OkStatus());
  EXPECT_TRUE(answered.answered());
  // The connection ends with the last of them.
  client.reset();
  EXPECT_FALSE(patient_is_over.try_wait());
}

TEST_F(ClientRetryTest, RemovalThatSucceededUnheardIsNoError) {
  const auto client = Connect();
  for (const std::string method : {"DeleteCache", "CloseSequence"}) {
    const auto run = [&] {
      return method == "DeleteCache" ? client->DeleteCache("c") : client->CloseSequence("c", 1);
    };
    service_.on_unary = [&](const std::string&, int) {
      return GrpcError(grpc::StatusCode::NOT_FOUND);
    };
    EXPECT_TRUE(absl::IsNotFound(run())) << "at the first attempt it is the caller's mistake";
    const int before = service_.attempts(method);
    service_.on_unary = [&](const std::string&, int attempt) {
      return attempt == before + 1 ? GrpcError(grpc::StatusCode::UNAVAILABLE, 1)
                                   : GrpcError(grpc::StatusCode::NOT_FOUND);
    };
    EXPECT_EQ(run(), absl::OkStatus()) << method;
  }
}

TEST_F(ClientRetryTest, AForkThatSucceededUnheardReturnsItsChild) {
  const auto client = Connect();
  service_.on_unary = [](const std::string&, int attempt) {
    return attempt == 1 ? GrpcError(grpc::StatusCode::UNAVAILABLE, 1)
                        : GrpcError(grpc::StatusCode::ALREADY_EXISTS);
  };
  const auto child = client->ForkSequence("cache", 1, std::nullopt);
  ASSERT_TRUE(child.ok()) << child.status();
  EXPECT_EQ(service_.ids, (std::vector<uint64_t>{*child, *child}));
  EXPECT_TRUE(absl::IsAlreadyExists(client->ForkSequence("cache", 1, std::nullopt).status()))
      << "not after a failed attempt: somebody else's";
}

// All updates of a call are made or none, so one that can only have been made by it tells of all.
TEST_F(ClientRetryTest, UpdatesThatSucceededUnheardReturnTheirSequences) {
  using Kind = SequenceUpdate::Kind;
  const auto client = Connect();
  service_.on_unary = [](const std::string&, int attempt) {
    return attempt % 2 == 1 ? GrpcError(grpc::StatusCode::UNAVAILABLE, 1)
                            : GrpcError(grpc::StatusCode::ALREADY_EXISTS);
  };
  const auto made =
      client->UpdateSequences("cache", {{.kind = Kind::kTruncate, .sequence_id = 1, .length = 3},
                                        {.kind = Kind::kFork, .parent_id = 1}});
  ASSERT_TRUE(made.ok()) << made.status();
  ASSERT_EQ(made->size(), 2u);
  EXPECT_EQ(made->front(), 1u);
  EXPECT_EQ(service_.ids, (std::vector<uint64_t>{made->back(), made->back()}));
  const auto named =
      client->UpdateSequences("cache", {{.kind = Kind::kFork, .sequence_id = 7, .parent_id = 1}});
  EXPECT_TRUE(absl::IsAlreadyExists(named.status())) << "it may be somebody else's";
}

TEST_F(ClientRetryTest, OpeningRepeatsOneIdAndNeverUsesItTwice) {
  const auto client = Connect();
  service_.on_unary = [](const std::string&, int attempt) {
    return attempt % 2 == 1 ? GrpcError(grpc::StatusCode::UNAVAILABLE, 0) : grpc::Status::OK;
  };
  std::set<uint64_t> ids;
  for (int i = 0; i < 20; ++i) {
    const auto id = client->OpenSequence("cache");
    ASSERT_TRUE(id.ok()) << id.status();
    EXPECT_NE(*id, 0u);
    ids.insert(*id);
  }
  EXPECT_EQ(ids.size(), 20u);
  ASSERT_EQ(service_.ids.size(), 40u);
  for (size_t i = 0; i < 40; i += 2) EXPECT_EQ(service_.ids[i], service_.ids[i + 1]);
}

TEST_F(ClientRetryTest, ALeaseIsPresentedAndRenewed) {
  const auto times = [&](const std::string& what) {
    const std::vector<std::string> leases = service_.leases();
    return std::count(leases.begin(), leases.end(), what);
  };
  service_.on_unary = [](const std::string& method, int attempt) {
    return method == "RenewLease" && attempt == 2 ? GrpcError(grpc::StatusCode::UNAVAILABLE, 1)
                                                  : grpc::Status::OK;
  };
  {
    const auto client = Connect({.lease = "host-1"});
    EXPECT_TRUE(client->OpenSequence("cache").ok());
    EXPECT_EQ(times("call: host-1"), 1);
    OwnedCall call(5);
    EXPECT_TRUE(client->Attend(call.call).ok());
    EXPECT_EQ(times("stream: host-1"), 1);
    // Also after a renewal that failed.
    EXPECT_TRUE(test::Eventually(seconds(45), [&] { return times("renewed: host-1") > 4; }));
  }
  const auto renewals = times("renewed: host-1");
  const auto client = Connect();
  EXPECT_TRUE(client->OpenSequence("cache").ok());
  EXPECT_EQ(service_.leases().size(), renewals + 2) << "nothing is presented without one";
}

TEST_F(ClientRetryTest, AttendIsRepeatedOnTheSameStream) {
  const auto client = Connect();
  for (const auto code : {grpc::StatusCode::UNAVAILABLE, grpc::StatusCode::ABORTED}) {
    std::atomic<int> attempts = 0;
    service_.on_attend = [&](const v1::AttendRequest&) {
      return ++attempts <= 2 ? Fails(code) : Verdict();
    };
    OwnedCall call(1);
    EXPECT_EQ(client->Attend(call.call), absl::OkStatus());
    EXPECT_TRUE(call.answered());
    EXPECT_EQ(attempts, 3);
  }
  EXPECT_EQ(service_.streams(), 1);
}

TEST_F(ClientRetryTest, AttendReturnsFinalCodesAtOnceWithTheirField) {
  const auto client = Connect();
  for (int code = 1; code <= 16; ++code) {
    if (code == grpc::StatusCode::UNAVAILABLE || code == grpc::StatusCode::ABORTED) continue;
    std::atomic<int> attempts = 0;
    service_.on_attend = [&](const v1::AttendRequest&) {
      ++attempts;
      return Fails(static_cast<grpc::StatusCode>(code), 1, "entries[0].first_position");
    };
    OwnedCall call(1);
    const absl::Status status = client->Attend(call.call);
    EXPECT_EQ(static_cast<int>(status.code()), code);
    EXPECT_EQ(FieldOf(status), "entries[0].first_position");
    EXPECT_EQ(attempts, 1);
    EXPECT_FALSE(call.answered());
  }
}

TEST_F(ClientRetryTest, CallsSurviveStreamsThatBreakUnderThem) {
  const auto client = Connect({.max_attempts = 100});
  std::atomic<int> count = 0;
  service_.on_attend = [&](const v1::AttendRequest&) -> Verdict {
    // Ends in every way a stream can end.
    switch (++count % 40) {
      case 7:
        return {.end_stream = true, .end_status = grpc::Status::OK};
      case 17:
        return {.end_stream = true, .end_status = {grpc::StatusCode::UNAVAILABLE, "x"}};
      case 27:
        return {.end_stream = true, .end_status = {grpc::StatusCode::INTERNAL, "x"}};
      case 37:
        return {.end_stream = true, .end_status = {grpc::StatusCode::CANCELLED, "x"}};
      default:
        return {};
    }
  };
  constexpr int kCalls = 100;
  std::vector<std::unique_ptr<OwnedCall>> calls;
  std::vector<absl::Status> results(kCalls, absl::UnknownError("not called"));
  std::latch left(kCalls);
  for (int i = 0; i < kCalls; ++i) {
    calls.push_back(std::make_unique<OwnedCall>(i, 0, static_cast<float>(i)));
    client->AttendAsync(calls.back()->call, [&, i](absl::Status status) {
      results[i] = std::move(status);
      left.count_down();
    });
  }
  left.wait();
  for (int i = 0; i < kCalls; ++i) {
    EXPECT_EQ(results[i], absl::OkStatus()) << i;
    EXPECT_TRUE(calls[i]->answered()) << i;
  }
  EXPECT_GT(service_.streams(), 2);
}

TEST_F(ClientRetryTest, AStreamTheServiceRefusesIsNotTriedAgain) {
  const auto client = Connect();
  service_.on_attend = [](const v1::AttendRequest&) -> Verdict {
    return {.end_stream = true, .end_status = {grpc::StatusCode::PERMISSION_DENIED, "no"}};
  };
  OwnedCall call(1);
  EXPECT_TRUE(absl::IsPermissionDenied(client->Attend(call.call)));
  EXPECT_EQ(service_.streams(), 1);
}

TEST_F(ClientRetryTest, CallsOutliveARestartOfTheService) {
  const auto client = Connect({.max_attempts = 1'000});
  OwnedCall before(1);
  ASSERT_EQ(client->Attend(before.call), absl::OkStatus());
  service_.Stop();
  std::vector<std::unique_ptr<OwnedCall>> calls;
  std::vector<absl::Status> results(10, absl::UnknownError("not called"));
  std::latch left(10);
  for (int i = 0; i < 10; ++i) {
    calls.push_back(std::make_unique<OwnedCall>(i, 0, static_cast<float>(i)));
    client->AttendAsync(calls.back()->call, [&, i](absl::Status status) {
      results[i] = std::move(status);
      left.count_down();
    });
  }
  service_.Start();
  left.wait();
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(results[i], absl::OkStatus()) << i;
    EXPECT_TRUE(calls[i]->answered()) << i;
  }
}

TEST_F(ClientRetryTest, AServiceThatIsGoneIsUnavailable) {
  const auto client = Connect({.max_attempts = 2});
  service_.Stop();
  OwnedCall call(1);
  EXPECT_TRUE(absl::IsUnavailable(client->Attend(call.call)));
  EXPECT_TRUE(absl::IsUnavailable(client->OpenSequence("cache").status()));
}

// The service's own rule: a call must come at the sequence's length.
TEST_F(ClientRetryTest, PipelinedCallsOfASequenceKeepTheirOrderThroughRepeats) {
  constexpr int kSequences = 3;
  constexpr int kCalls = 150;
  const auto client = Connect({.max_attempts = 1'000});
  std::map<uint64_t, int64_t> lengths;
  unsigned dice = 1;
  int refused = 0, early = 0;
  std::mutex mutex;
  service_.on_attend = [&](const v1::AttendRequest& request) {
    std::lock_guard lock(mutex);
    dice = dice * 1664525u + 1013904223u;
    if ((dice >> 16) % 10 == 0) {
      ++refused;
      return Fails(grpc::StatusCode::UNAVAILABLE, 2);
    }
    int64_t& length = lengths[request.entries(0).sequence_id()];
    if (request.entries(0).first_position() > length) {
      ++early;
      return Fails(grpc::StatusCode::OUT_OF_RANGE);
    }
    length = std::max(length, request.entries(0).first_position() + 1);
    return Verdict();
  };
  std::vector<std::unique_ptr<OwnedCall>> calls;
  std::vector<absl::Status> results(kSequences * kCalls, absl::UnknownError("not called"));
  std::latch left(kSequences * kCalls);
  for (int i = 0; i < kSequences * kCalls; ++i) {
    calls.push_back(std::make_unique<OwnedCall>(i % kSequences, i / kSequences));
    client->AttendAsync(calls.back()->call, [&, i](absl::Status status) {
      results[i] = std::move(status);
      left.count_down();
    });
  }
  left.wait();
  for (int i = 0; i < kSequences * kCalls; ++i) EXPECT_EQ(results[i], absl::OkStatus()) << i;
  std::lock_guard lock(mutex);
  for (const auto& [id, length] : lengths) EXPECT_EQ(length, kCalls) << id;
  EXPECT_GT(refused, 0) << "the test never refused a call";
  EXPECT_GT(early, 0) << "no call was ever in flight behind a refused one";
}

TEST_F(ClientRetryTest, ClosingCancelsWhatIsInFlight) {
  auto client = Connect();
  service_.on_attend = [](const v1::AttendRequest&) { return Verdict{.silent = true}; };
  constexpr int kCalls = 200;
  std::vector<std::unique_ptr<OwnedCall>> calls;
  std::atomic<int> cancelled = 0, others = 0;
  for (int i = 0; i < kCalls; ++i) {
    calls.push_back(std::make_unique<OwnedCall>(i));
    client->AttendAsync(calls.back()->call, [&](const absl::Status& status) {
      ++(absl::IsCancelled(status) ? cancelled : others);
    });
  }
  client.reset();
  EXPECT_EQ(cancelled, kCalls);
  EXPECT_EQ(others, 0);
}

TEST_F(ClientRetryTest, TheServiceIsToldHowMuchTimeIsLeftAndWhoMayGoFirst) {
  const auto client = Connect();
  std::mutex mutex;
  std::vector<v1::AttendRequest> seen;
  service_.on_attend = [&](const v1::AttendRequest& request) {
    const std::lock_guard lock(mutex);
    seen.push_back(request);
    return Verdict{.silent = request.yield_ms() == 7};
  };
  OwnedCall call(1);
  ASSERT_EQ(client->Attend(call.call), absl::OkStatus());
  call.call.yield = milliseconds(7);
  EXPECT_TRUE(absl::IsDeadlineExceeded(client->WithTimeout(milliseconds(50))->Attend(call.call)));
  ASSERT_EQ(seen.size(), 2u);
  EXPECT_GT(seen[0].timeout_ms(), 50) << "what is left of the client's";
  EXPECT_GT(seen[1].timeout_ms(), 0);
  EXPECT_LE(seen[1].timeout_ms(), 50);
  call.call.yield = milliseconds(1001);
  EXPECT_EQ(FieldOf(client->Attend(call.call)), "yield_ms");
  call.call.yield = milliseconds(-1);
  EXPECT_EQ(FieldOf(client->Attend(call.call)), "yield_ms");
}

TEST_F(ClientRetryTest, ACallIsCancelledByItself) {
  const auto client = Connect();
  std::latch told(1);
  std::atomic<uint64_t> cancelled = 0;
  service_.on_attend = [&](const v1::AttendRequest& request) {
    if (request.cancel()) {
      cancelled = request.request_id();
      told.count_down();
    }
    return Verdict{.silent = request.cancel() || request.entries(0).sequence_id() == 1};
  };
  OwnedCall held(1), other(2);
  std::promise<absl::Status> outcome;
  const uint64_t id =
      client->AttendAsync(held.call, [&](absl::Status status) { outcome.set_value(status); });
  ASSERT_NE(id, 0u);
  EXPECT_EQ(client->Attend(other.call), absl::OkStatus()) << "the first is in flight by now";
  client->Cancel(id);
  client->Cancel(id + 100);
  EXPECT_TRUE(absl::IsCancelled(outcome.get_future().get()));
  told.wait();
  EXPECT_EQ(cancelled, id);
  EXPECT_EQ(client->Attend(other.call), absl::OkStatus());
  OwnedCall wrong(3);
  wrong.call.q = nullptr;
  EXPECT_EQ(client->AttendAsync(wrong.call, [](const absl::Status&) {}), 0u);
}

TEST_F(ClientRetryTest, ACallbackMayMakeTheNextCall) {
  const auto client = Connect();
  OwnedCall call(1);
  int left = 1'000;
  absl::Status result;
  std::latch over(1);
  std::function<void(absl::Status)> next = [&](absl::Status status) {
    if (!status.ok() || --left == 0) {
      result = std::move(status);
      return over.count_down();
    }
    client->AttendAsync(call.call, next);
  };
  client->AttendAsync(call.call, next);
  over.wait();
  EXPECT_EQ(result, absl::OkStatus());
  EXPECT_EQ(left, 0);
}

TEST_F(ClientRetryTest, MessagesThatAreTooLargeAreNotSent) {
  const auto client = Connect({.max_message_bytes = 1'000});
  std::atomic<int> seen = 0;
  service_.on_attend = [&](const v1::AttendRequest&) {
    ++seen;
    return Verdict();
  };
  std::vector<float> q(64 * 8, 1.0f);
  OwnedCall call(1);
  call.call.entries[0].query_rows = 64;
  call.call.q = q.data();
  call.call.output = q.data();
  const absl::Status status = client->Attend(call.call);
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_NE(status.message().find("max_message_bytes"), std::string::npos) << status;
  const absl::Status append = client->Append({.cache_id = "cache",
                                              .entries = {{5, 0, 64}},
                                              .k = q.data(),
                                              .v = q.data(),
                                              .kv_heads = 2,
                                              .head_dim = 4});
  EXPECT_TRUE(absl::IsResourceExhausted(append)) << append;
  EXPECT_EQ(seen, 0);
  EXPECT_EQ(service_.attempts("Append"), 0);
  OwnedCall small(1);
  EXPECT_EQ(client->Attend(small.call), absl::OkStatus());
}

TEST_F(ClientRetryTest, CallsThatWouldTouchWrongMemoryAreRefusedHere) {
  const auto client = Connect();
  const auto field_of = [&](const std::function<void(AttendCall&)>& spoil) {
    OwnedCall call(1);
    spoil(call.call);
    const absl::Status status = client->Attend(call.call);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    return FieldOf(status);
  };
  EXPECT_EQ(field_of([](AttendCall& c) { c.entries.clear(); }), "entries");
  EXPECT_EQ(field_of([](AttendCall& c) { c.entries[0].query_rows = 0; }), "entries[0].query_rows");
  EXPECT_EQ(field_of([](AttendCall& c) { c.entries[0].query_rows = -1; }), "entries[0].query_rows");
  EXPECT_EQ(field_of([](AttendCall& c) { c.entries[0].new_tokens = 2; }), "entries[0].new_tokens");
  EXPECT_EQ(field_of([](AttendCall& c) { c.q = nullptr; }), "q");
  EXPECT_EQ(field_of([](AttendCall& c) { c.output = nullptr; }), "output");
  EXPECT_EQ(field_of([](AttendCall& c) { c.q_heads = 0; }), "q_heads");
  EXPECT_EQ(field_of([](AttendCall& c) { c.head_dim = -4; }), "head_dim");
  EXPECT_EQ(field_of([](AttendCall& c) { c.dtype = v1::DTYPE_FP8_E4M3; }), "dtype");
  EXPECT_EQ(field_of([](AttendCall& c) {
              c.entries[0].new_tokens = 1;
              c.kv_heads = 1;
            }),
            "k");
  EXPECT_EQ(field_of([](AttendCall& c) {
              c.entries[0].query_rows = INT32_MAX;
              c.q_heads = INT32_MAX;
              c.head_dim = INT32_MAX;
            }),
            "q");
  EXPECT_EQ(service_.streams(), 0);
}

TEST_F(ClientRetryTest, RegionsLeaveNoNameBehind) {
  const auto client = Connect({.shared_memory_bytes = 1 << 20});
  ASSERT_EQ(service_.regions().size(), 1u);
  EXPECT_EQ(shm_open(service_.regions()[0].c_str(), O_RDWR, 0), -1);
  EXPECT_EQ(errno, ENOENT);
  OwnedCall call(1);
  EXPECT_EQ(client->Attend(call.call), absl::OkStatus());
  EXPECT_TRUE(call.answered());
}

TEST_F(ClientRetryTest, AFailedRegistrationFailsTheConnectionAndLeavesNoName) {
  service_.on_unary = [](const std::string&, int) {
    return GrpcError(grpc::StatusCode::PERMISSION_DENIED, -1, "system.key");
  };
  const auto client = Client::Connect({.target = socket_.target(), .shared_memory_bytes = 1 << 20});
  EXPECT_TRUE(absl::IsPermissionDenied(client.status())) << client.status();
  ASSERT_EQ(service_.regions().size(), 1u);
  EXPECT_EQ(shm_open(service_.regions()[0].c_str(), O_RDWR, 0), -1);
}

TEST_F(ClientRetryTest, AForgottenRegionIsReplaced) {
  const auto client = Connect({.shared_memory_bytes = 1 << 20, .max_attempts = 100});
  std::string forgotten;
  std::atomic<int> inline_calls = 0;
  service_.on_attend = [&](const v1::AttendRequest& request) -> Verdict {
    const std::string& region = request.q().shared_memory().region();
    if (region.empty()) ++inline_calls;
    if (forgotten.empty()) forgotten = region;
    if (region == forgotten) {
      return Fails(grpc::StatusCode::NOT_FOUND, -1, "q.shared_memory.region");
    }
    return {};
  };
  for (int i = 0; i < 1'000 && service_.regions().size() < 2; ++i) {
    OwnedCall call(1, 0, static_cast<float>(i));
    ASSERT_EQ(client->Attend(call.call), absl::OkStatus());
    ASSERT_TRUE(call.answered());
  }
  ASSERT_EQ(service_.regions().size(), 2u) << "no new region was registered";
  EXPECT_NE(service_.regions()[0], service_.regions()[1]);
}

// What does not fit a message waits for the region that replaces one whose use is unknown.
TEST_F(ClientRetryTest, LargeCallsWaitForTheNextRegion) {
  const auto client =
      Connect({.shared_memory_bytes = 8 << 20, .max_message_bytes = size_t{64} << 10});
  std::atomic<int> lost = 0;
  service_.on_unary = [&](const std::string& method, int) {
    return method == "Append" && lost++ == 0 ? GrpcError(grpc::StatusCode::UNAVAILABLE, -1)
                                             : grpc::Status::OK;
  };
  constexpr int kTokens = 1 << 16;
  const std::vector<float> k(size_t{kTokens} * kHeadDim);
  EXPECT_EQ(client->Append({.cache_id = "cache",
                            .entries = {{5, 0, kTokens}},
                            .k = k.data(),
                            .v = k.data(),
                            .kv_heads = 1,
                            .head_dim = kHeadDim}),
            absl::OkStatus());
  EXPECT_EQ(service_.regions().size(), 2u);
  EXPECT_GE(service_.attempts("Append"), 2);
}

// The service may still write to the memory of a call that was given up.
TEST_F(ClientRetryTest, MemoryOfACallWithoutAnswerIsNotReused) {
  const auto client = Connect({.timeout = milliseconds(100), .shared_memory_bytes = 1 << 20});
  std::optional<uint64_t> first;
  std::vector<uint64_t> offsets;
  service_.on_attend = [&](const v1::AttendRequest& request) -> Verdict {
    const uint64_t offset = request.output().shared_memory().offset();
    if (!first.has_value()) {
      first = offset;
      return {.silent = true};
    }
    offsets.push_back(offset);
    return {};
  };
  OwnedCall lost(1);
  ASSERT_TRUE(absl::IsDeadlineExceeded(client->Attend(lost.call)));
  for (int i = 0; i < 50; ++i) {
    OwnedCall call(1);
    ASSERT_EQ(client->Attend(call.call), absl::OkStatus());
  }
  ASSERT_EQ(offsets.size(), 50u);
  EXPECT_EQ(std::count(offsets.begin(), offsets.end(), *first), 0);
}

TEST_F(ClientRetryTest, TheRegionOfABrokenStreamIsNotUsedAgain) {
  const auto client = Connect({.shared_memory_bytes = 1 << 20, .max_attempts = 100});
  std::mutex mutex;
  bool broken = false;
  std::string first;
  int reused = 0;
  service_.on_attend = [&](const v1::AttendRequest& request) -> Verdict {
    std::lock_guard lock(mutex);
    const std::string region = request.q().shared_memory().region();
    if (!broken) {
      broken = true;
      first = region;
      return {.end_stream = true, .end_status = {grpc::StatusCode::UNAVAILABLE, "x"}};
    }
    if (region == first) ++reused;
    return {};
  };
  for (int i = 0; i < 20; ++i) {
    OwnedCall call(1, 0, static_cast<float>(i));
    ASSERT_EQ(client->Attend(call.call), absl::OkStatus());
    ASSERT_TRUE(call.answered());
  }
  std::lock_guard lock(mutex);
  EXPECT_FALSE(first.empty());
  EXPECT_EQ(reused, 0);
}

// ---- memory of a GPU, which nobody here looks at ------------------------------------------------

class ClientDeviceTest : public ClientRetryTest {
 protected:
  ClientDeviceTest() {
    service_.on_attend = [this](const v1::AttendRequest& request) -> Verdict {
      if (service_.Knows(request.q().shared_memory().region())) return {};
      return Fails(grpc::StatusCode::NOT_FOUND, -1, "q.shared_memory.region");
    };
  }

  static std::byte* Memory(int64_t offset) {
    return reinterpret_cast<std::byte*>(0x7000'0000 + offset);
  }
  static std::shared_ptr<const DeviceRegion> Share(Client& client) {
    auto region = client.ShareDeviceMemory(
        {.data = Memory(0), .bytes = 65536, .ipc_handle = std::string(64, 'h'), .gpu = "GPU-x"});
    EXPECT_TRUE(region.ok()) << region.status();
    return *region;
  }
  static AttendCall Call(const std::shared_ptr<const DeviceRegion>& region, uint64_t sequence = 1) {
    AttendCall call;
    call.cache_id = "cache";
    call.entries = {{sequence, 0, 1, 0}};
    call.q = Memory(0);
    call.q_heads = kHeads;
    call.head_dim = kHeadDim;
    call.output = Memory(4096);
    call.device = region;
    return call;
  }
};

TEST_F(ClientDeviceTest, AServiceThatRestartedIsGivenItAgain) {
  const auto client = Connect({.max_attempts = 100});
  const auto region = Share(*client);
  const std::string name = region->name();
  EXPECT_EQ(client->Attend(Call(region)), absl::OkStatus());
  service_.Stop();
  service_.Start();
  EXPECT_EQ(client->Attend(Call(region)), absl::OkStatus());
  EXPECT_EQ(region->name(), name);
  const std::vector<std::string> owners = service_.regions();
  ASSERT_EQ(owners.size(), 2u);
  EXPECT_NE(owners[0], owners[1]);
  for (const std::string& owner : owners) {
    EXPECT_EQ(shm_open(owner.c_str(), O_RDWR, 0), -1) << "a name was left behind";
  }
}

TEST_F(ClientDeviceTest, ItIsGivenOnceHoweverManyCallsMissIt) {
  constexpr int kCalls = 200;
  const auto client = Connect();
  const auto region = Share(*client);
  for (int round = 1; round <= 3; ++round) {
    service_.ForgetRegions();
    std::latch done(kCalls);
    std::atomic<int> ok = 0;
    for (uint64_t sequence = 1; sequence <= kCalls; ++sequence) {
      client->AttendAsync(Call(region, sequence), [&](const absl::Status& status) {
        if (status.ok()) ++ok;
        done.count_down();
      });
    }
    done.wait();
    EXPECT_EQ(ok, kCalls);
    EXPECT_EQ(service_.attempts("RegisterSharedMemory"), 1 + round);
  }
}

TEST_F(ClientDeviceTest, AppendsGiveItAgainToo) {
  const auto client = Connect();
  const auto region = Share(*client);
  service_.on_unary = [&](const std::string& method, int) {
    if (method != "Append" || service_.Knows(region->name())) return grpc::Status::OK;
    return GrpcError(grpc::StatusCode::NOT_FOUND, -1, "k.shared_memory.region");
  };
  service_.ForgetRegions();
  AppendCall append{.cache_id = "cache", .entries = {{5, 0, 1}}, .k = Memory(0), .v = Memory(64)};
  append.kv_heads = 2;
  append.head_dim = 4;
  append.device = region;
  EXPECT_EQ(client->Append(append), absl::OkStatus());
  EXPECT_EQ(service_.attempts("Append"), 2);
  EXPECT_EQ(service_.attempts("RegisterSharedMemory"), 2);
}

TEST_F(ClientDeviceTest, WhatTheServiceNoLongerTakesIsNotFound) {
  const auto client = Connect({.max_attempts = 3});
  const auto region = Share(*client);
  service_.on_unary = [](const std::string&, int) {
    return GrpcError(grpc::StatusCode::FAILED_PRECONDITION, -1, "cuda_ipc");
  };
  service_.ForgetRegions();
  const absl::Status status = client->Attend(Call(region));
  EXPECT_TRUE(absl::IsNotFound(status)) << status;
  EXPECT_EQ(FieldOf(status), "q.shared_memory.region");
  EXPECT_EQ(service_.attempts("RegisterSharedMemory"), 3);
}

// It may have been freed.
TEST_F(ClientDeviceTest, WhatIsNotSharedAnyMoreIsNeverGivenAgain) {
  const auto client = Connect();
  const auto region = Share(*client);
  EXPECT_EQ(client->UnshareDeviceMemory(*region), absl::OkStatus());
  EXPECT_TRUE(absl::IsNotFound(client->Attend(Call(region))));
  EXPECT_EQ(service_.attempts("RegisterSharedMemory"), 1);
}

TEST_F(ClientDeviceTest, UnsharingWaitsForARegistrationUnderWay) {
  const auto client = Connect();
  const auto region = Share(*client);
  std::latch begun(1), may_end(1);
  std::atomic<bool> ended = false;
  std::atomic<bool> ended_before_unsharing = false;
  service_.on_unary = [&](const std::string& method, int) {
    if (method == "RegisterSharedMemory") {
      begun.count_down();
      may_end.wait();
      ended = true;
    } else if (method == "UnregisterSharedMemory") {
      ended_before_unsharing = ended.load();
    }
    return grpc::Status::OK;
  };
  service_.ForgetRegions();
  std::latch answered(1);
  client->AttendAsync(Call(region), [&](const absl::Status&) { answered.count_down(); });
  begun.wait();
  std::thread unshares([&] { EXPECT_EQ(client->UnshareDeviceMemory(*region), absl::OkStatus()); });
  may_end.count_down();
  unshares.join();
  EXPECT_TRUE(ended_before_unsharing);
  EXPECT_FALSE(service_.Knows(region->name()));
  answered.wait();
}

TEST(ClientConnect, NobodyThereIsUnavailable) {
  const SocketPath socket;
  const auto client = Client::Connect({.target = socket.target(), .timeout = milliseconds(100)});
  EXPECT_TRUE(absl::IsUnavailable(client.status())) << client.status();
  EXPECT_NE(client.status().message().find(socket.target()), std::string::npos);
}

TEST(ClientConnect, BadOptionsAreNamed) {
  EXPECT_EQ(FieldOf(Client::Connect({}).status()), "target");
  EXPECT_EQ(FieldOf(Client::Connect({.target = "unix:/x", .timeout = milliseconds(0)}).status()),
            "timeout");
  EXPECT_EQ(FieldOf(Client::Connect({.target = "unix:/x", .max_attempts = -1}).status()),
            "max_attempts");
}

}  // namespace
}  // namespace tributary::client
