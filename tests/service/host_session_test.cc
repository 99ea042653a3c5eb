// Sessions of hosts on CPUs, by the client library: results over both kinds of memory, what is
// refused, and how a mailbox comes to its host and to nobody else.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <optional>

#include "base/mailbox/layout_message.h"
#include "base/rpc/pass_descriptor.h"
#include "base/rpc/unix_address.h"
#include "base/status/errors.h"
#include "service/client/mailbox_memory.h"
#include "service/client/session_messages.h"
#include "tests/service/model_host.h"
#include "tests/service/remote_like_group.h"
#include "tests/service/session_driver.h"
#include "tests/service/session_host.h"
#include "tests/service/test_service.h"
#include "worker/rpc/dtype_conversion.h"

namespace tributary::service::testing {
namespace {

using client::HostSession;
using client::MailboxMemory;
using Entries = std::vector<std::pair<uint64_t, int32_t>>;
using Requests = std::vector<v1::AttendRequest>;

// Both layers' requests of a step.
Requests MakeLayers(ModelHost& model, const Entries& entries) {
  return {model.MakeStep(0, entries), model.MakeStep(1, entries)};
}

v1::OpenSession MailboxSession(int32_t rows) {
  v1::OpenSession open = MessagesSession(rows);
  open.set_memory(v1::SESSION_MEMORY_HOST);
  return open;
}

class HostSessionTest : public ::testing::TestWithParam<v1::SessionMemory> {
 protected:
  // A service with sequences 1 to `sequences`, a model of them, and a session of so many rows and
  // new tokens. ASSERTs that it opens, and that its memory is the parameter's.
  void Start(int workers, int sequences, int32_t rows, DType dtype = DType::kF32) {
    session_.reset();
    model_.reset();
    service_.emplace(TestService::Options{.workers = workers});
    PrepareCache(*service_, spec_, sequences);
    model_.emplace(&service_->stub(), "m", spec_, dtype, 1);
    session_ = OpenSessionAt(
        service_->address(),
        {.max_rows = rows, .max_new_tokens = rows, .dtype = ToProto(dtype), .memory = GetParam()});
    ASSERT_NE(session_, nullptr);
    EXPECT_EQ(session_->opened().terms().memory(), GetParam());
  }
  Requests Make(const Entries& entries) { return MakeLayers(*model_, entries); }
  absl::Status Attend(const v1::AttendRequest& request) {
    return AttendWith(*session_, request, &*model_);
  }

  v1::CacheSpec spec_ = SmallSpec();
  std::optional<TestService> service_;
  std::optional<ModelHost> model_;
  std::unique_ptr<HostSession> session_;
};

INSTANTIATE_TEST_SUITE_P(Memory, HostSessionTest,
                         ::testing::Values(v1::SESSION_MEMORY_HOST, v1::SESSION_MEMORY_MESSAGES),
                         [](const auto& param) {
                           return param.param == v1::SESSION_MEMORY_HOST ? "Host" : "Messages";
                         });

TEST_P(HostSessionTest, StepsGiveWhatTheReferenceGives) {
  for (const DType dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
    ASSERT_NO_FATAL_FAILURE(Start(/*workers=*/2, /*sequences=*/3, /*rows=*/128, dtype));
    RunStep(*session_, *model_, Make({{1, 40}, {2, 70}}));  // a prompt
    for (int i = 0; i < 20; ++i) RunStep(*session_, *model_, Make({{1, 1}, {2, 1}, {3, 1}}));
    RunStep(*session_, *model_, Make({{1, 4}, {3, 8}}));  // rows to verify
    RunStep(*session_, *model_, {model_->MakeDraft(0, {{1, 8}}), model_->MakeDraft(1, {{1, 8}})});
    EXPECT_TRUE(session_->Close().ok());
    model_->Step(0, {{1, 1}});  // and calls go on from there
    model_->Step(1, {{1, 1}});
  }
}

TEST_P(HostSessionTest, LayersOfOtherShapesAndStridesAreTakenAsTheyAre) {
  spec_.set_head_dim(192);
  spec_.set_value_head_dim(128);
  ASSERT_NO_FATAL_FAILURE(Start(/*workers=*/1, /*sequences=*/1, /*rows=*/8));
  RunStep(*session_, *model_, Make({{1, 5}}));
  // A fused projection: the heads of q, k and v of a token lie one behind the other; k is, besides,
  // interleaved with what is not k.
  const v1::AttendRequest request = model_->MakeStep(0, {{1, 3}});
  const int32_t row = 4 * 192 + 2 * 2 * 192 + 2 * 128;
  std::vector<float> fused(3 * row);
  std::vector<float> output(3 * 5 * 128);
  std::vector<float> lse(3 * 4);
  const auto place = [&](const v1::Tensor& tensor, int32_t offset, int32_t head_stride) {
    client::HeadRows rows = RowsOf(tensor);
    const auto* from = static_cast<const float*>(rows.data);
    for (int32_t r = 0; r < rows.rows; ++r) {
      for (int32_t h = 0; h < rows.heads; ++h) {
        std::memcpy(&fused[r * row + offset + h * head_stride], from, rows.dim * sizeof(float));
        from += rows.dim;
      }
    }
    rows.data = &fused[offset];
    rows.row_stride = row;
    rows.head_stride = head_stride;
    return rows;
  };
  ASSERT_TRUE(session_->Submit(StepOf({request})).ok());
  ASSERT_TRUE(session_
                  ->Attend({.q = place(request.q(), 0, 192),
                            .k = place(request.k(), 768, 384),
                            .v = place(request.v(), 1536, 128),
                            .output = {output.data(), 3, 4, 128, 5 * 128, 128},
                            .lse = lse.data()})
                  .ok());
  v1::AttendReply reply;
  std::vector<float> dense;
  for (int r = 0; r < 3; ++r) {
    dense.insert(dense.end(), &output[r * 640], &output[r * 640 + 512]);
  }
  *reply.mutable_output() = InlineTensor(DType::kF32, {3, 4, 128}, dense);
  reply.add_lengths(8);
  *reply.mutable_lse() = InlineTensor(DType::kF32, {3, 4}, lse);
  model_->Check(request, reply);
}

TEST_P(HostSessionTest, StepsAreSubmittedAhead) {
  ASSERT_NO_FATAL_FAILURE(Start(/*workers=*/2, /*sequences=*/1, /*rows=*/16));
  Requests before = Make({{1, 3}});
  ASSERT_TRUE(session_->Submit(StepOf(before)).ok());
  for (int i = 0; i < 30; ++i) {
    client::SessionStep next = StepOf(before);
    next.entries[0].first_position += next.entries[0].new_tokens;
    next.entries[0].new_tokens = next.entries[0].query_rows = 1;
    ASSERT_TRUE(session_->Submit(next).ok());
    for (const auto& request : before) ASSERT_TRUE(Attend(request).ok());
    before = Make({{1, 1}});
  }
  for (const auto& request : before) ASSERT_TRUE(Attend(request).ok());
  EXPECT_TRUE(session_->Await(31).ok());
}

TEST_P(HostSessionTest, AppendOnlyStepsWaitForNothing) {
  ASSERT_NO_FATAL_FAILURE(Start(/*workers=*/2, /*sequences=*/1, /*rows=*/64));
  for (int i = 0; i < 5; ++i) {
    const Requests appended = Make({{1, 33}});
    client::SessionStep step = StepOf(appended);
    step.append_only = true;
    step.entries[0].query_rows = 0;
    const auto id = session_->Submit(step);
    ASSERT_TRUE(id.ok()) << id.status();
    for (const v1::AttendRequest& request : appended) {
      const absl::Status done = session_->Append(RowsOf(request.k()), RowsOf(request.v()));
      ASSERT_TRUE(done.ok()) << done;
    }
    EXPECT_TRUE(session_->Await(*id).ok());
    RunStep(*session_, *model_, Make({{1, 1}}));
  }
}

// Prompts longer than a slot, with company; rows to verify and look back; then calls go on.
TEST_P(HostSessionTest, StepsLargerThanASlotGoInPieces) {
  for (const bool sends : {false, true}) {
    std::unique_ptr<WorkerGroup> group;
    if (sends) group = std::make_unique<RemoteLikeGroup>(2);
    if (!sends) group = CreateEmbeddedGroup({.workers = 2, .threads = 2});
    TestService service({}, std::move(group));
    PrepareCache(service, spec_, 3);
    ModelHost model(&service.stub(), "m", spec_, DType::kBf16, 1);
    const auto session = OpenSessionAt(
        service.address(),
        {.max_rows = 16, .max_new_tokens = 16, .dtype = v1::DTYPE_BF16, .memory = GetParam()});
    ASSERT_NE(session, nullptr);
    RunStep(*session, model, MakeLayers(model, {{1, 75}, {2, 3}}));
    RunStep(*session, model, MakeLayers(model, {{2, 1}, {1, 1}, {3, 90}}));
    RunStep(*session, model, MakeLayers(model, {{1, 10}, {2, 10}, {3, 10}}));
    RunStep(*session, model,
            {model.MakeDraft(0, {{1, 9}, {2, 9}, {3, 16}}),
             model.MakeDraft(1, {{1, 9}, {2, 9}, {3, 16}})});
    const absl::StatusOr<uint64_t> large =
        session->Submit(StepOf({model.MakeDraft(0, {{1, 17}}), model.MakeDraft(1, {{1, 17}})}));
    EXPECT_TRUE(absl::IsResourceExhausted(large.status())) << large.status();
    model.Step(0, {{1, 1}});
    model.Step(1, {{1, 1}});
  }
}

TEST_P(HostSessionTest, StepsOfPiecesAreSubmittedAheadRepeatedAndAppended) {
  ASSERT_NO_FATAL_FAILURE(Start(/*workers=*/2, /*sequences=*/2, /*rows=*/16, DType::kBf16));
  Requests prompt = Make({{1, 5}, {2, 40}});
  const auto first = session_->Submit(StepOf(prompt));
  ASSERT_TRUE(first.ok()) << first.status();
  const Requests next = Make({{1, 20}, {2, 1}});
  const auto second = session_->Submit(StepOf(next));
  ASSERT_TRUE(second.ok()) << second.status();
  for (const auto& request : prompt) ASSERT_TRUE(AttendWith(*session_, request, &*model_).ok());
  for (const auto& request : next) ASSERT_TRUE(AttendWith(*session_, request, &*model_).ok());
  EXPECT_TRUE(session_->Await(*first).ok());
  EXPECT_TRUE(session_->Await(*second).ok());

  Requests appended = Make({{2, 50}});
  client::SessionStep step = StepOf(appended);
  step.append_only = true;
  step.entries[0].query_rows = 0;
  const auto append = session_->Submit(step);
  ASSERT_TRUE(append.ok()) << append.status();
  for (const v1::AttendRequest& request : appended) {
    ASSERT_TRUE(session_->Append(RowsOf(request.k()), RowsOf(request.v())).ok());
  }
  EXPECT_TRUE(session_->Await(*append).ok());
  RunStep(*session_, *model_, Make({{1, 1}, {2, 1}}));

  // Other bytes in the last piece of the second entry.
  std::string* k = prompt[1].mutable_k()->mutable_inline_();
  (*k)[k->size() - 1] = static_cast<char>((*k)[k->size() - 1] ^ 0x41);
  const auto repeated = session_->Submit(StepOf(prompt));
  ASSERT_TRUE(repeated.ok()) << repeated.status();
  for (const auto& request : prompt) ASSERT_TRUE(AttendWith(*session_, request, nullptr).ok());
  const absl::Status differs = session_->Await(*repeated);
  EXPECT_TRUE(absl::IsAlreadyExists(differs)) << differs;
  EXPECT_EQ(tributary::FieldOf(differs), "entries[1].first_position");
}

TEST_P(HostSessionTest, WhatDoesNotFitTheStepIsNamedAndNotHandedOver) {
  ASSERT_NO_FATAL_FAILURE(Start(/*workers=*/1, /*sequences=*/1, /*rows=*/8));
  const Requests requests = Make({{1, 2}});
  EXPECT_TRUE(absl::IsFailedPrecondition(AttendWith(*session_, requests[0], nullptr)));
  client::SessionStep far = StepOf(requests);
  far.entries[0].first_position = 9;
  const absl::Status refused = session_->Submit(far).status();
  EXPECT_TRUE(absl::IsOutOfRange(refused)) << refused;
  EXPECT_EQ(tributary::FieldOf(refused), "entries[0].first_position");
  ASSERT_TRUE(session_->Submit(StepOf(requests)).ok());
  std::vector<float> output(2 * 4 * 64);
  const auto named = [&](const std::function<void(client::SessionLayer*)>& edit) {
    client::SessionLayer layer{.q = RowsOf(requests[0].q()),
                               .k = RowsOf(requests[0].k()),
                               .v = RowsOf(requests[0].v()),
                               .output = {output.data(), 2, 4, 64}};
    edit(&layer);
    const absl::Status status = session_->Attend(layer);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    return tributary::FieldOf(status);
  };
  EXPECT_EQ(named([](auto* l) { l->q = {}; }), "q.data");
  EXPECT_EQ(named([](auto* l) { l->q.rows = 3; }), "q.rows");
  EXPECT_EQ(named([](auto* l) { l->q.heads = 2; }), "q.heads");
  EXPECT_EQ(named([](auto* l) { l->k.dim = 32; }), "k.dim");
  EXPECT_EQ(named([](auto* l) { l->v = {}; }), "v.data");
  EXPECT_EQ(named([](auto* l) { l->v.rows = 1; }), "v.rows");
  EXPECT_EQ(named([](auto* l) { l->output.heads = 8; }), "output.heads");
  EXPECT_TRUE(absl::IsFailedPrecondition(
      session_->Append(RowsOf(requests[0].k()), RowsOf(requests[0].v()))));
  for (const auto& request : requests) ASSERT_TRUE(Attend(request).ok());
}

TEST_P(HostSessionTest, ADrainLetsStepsEnd) {
  ASSERT_NO_FATAL_FAILURE(Start(/*workers=*/2, /*sequences=*/1, /*rows=*/8));
  const Requests requests = Make({{1, 4}});
  const auto step = session_->Submit(StepOf(requests));
  ASSERT_TRUE(step.ok());
  service_->coordinator().StartDraining();
  for (const auto& request : requests) ASSERT_TRUE(Attend(request).ok());
  EXPECT_TRUE(session_->Await(*step).ok());
  EXPECT_TRUE(absl::IsUnavailable(session_->Close()));
  EXPECT_TRUE(absl::IsUnavailable(session_->status()));
}

// --------------------------------------------------------------------------------------- mailbox

class MailboxTest : public ::testing::Test {
 protected:
  MailboxTest() : service_({.workers = 2}) { PrepareCache(service_, spec_, 2); }

  std::string socket() const { return CompanionSocketOf(UnixPath(service_.address())); }
  absl::StatusOr<std::unique_ptr<MailboxMemory>> Fetch(const v1::SessionOpened& opened) {
    return MailboxMemory::Fetch(socket(), opened.host().token(),
                                mailbox::ReadLayout(opened.layout()),
                                std::chrono::steady_clock::now() + std::chrono::seconds(20));
  }
  // Whether the other side has ended the connection without a byte.
  static bool EndsAtOnce(int connection) {
    pollfd file{connection, POLLIN, 0};
    char byte;
    return poll(&file, 1, 10'000) == 1 && recv(connection, &byte, 1, 0) <= 0;
  }

  const v1::CacheSpec spec_ = SmallSpec();
  TestService service_;
};

TEST_F(MailboxTest, WithoutAWishAHostOverAUnixSocketGetsSharedMemory) {
  const auto session = OpenSessionAt(service_.address(), {.max_rows = 4});
  ASSERT_NE(session, nullptr);
  EXPECT_EQ(session->opened().terms().memory(), v1::SESSION_MEMORY_HOST);
  EXPECT_EQ(session->opened().waiting(), v1::WAITING_FUTEX);
  EXPECT_EQ(session->opened().host().socket(), socket());
}

TEST_F(MailboxTest, ASecretIsGoodOnceAndOnlyWhileItsSessionLives) {
  SessionDriver session(service_.stub(), MailboxSession(4));
  ASSERT_TRUE(session.is_open());
  EXPECT_EQ(session.opened().host().token().size(), 16u);
  EXPECT_EQ(session.opened().shapes_size(), 1);
  ASSERT_TRUE(Fetch(session.opened()).ok());
  EXPECT_TRUE(absl::IsUnavailable(Fetch(session.opened()).status()));
  v1::SessionOpened ended;
  {
    SessionDriver other(service_.stub(), MailboxSession(4));
    ended = other.opened();
    other.SendClose();
    EXPECT_TRUE(other.Finish().ok());
  }
  EXPECT_TRUE(test::Eventually(std::chrono::seconds(20), [&] { return !Fetch(ended).ok(); }));
  v1::SessionOpened guessed = session.opened();
  guessed.mutable_host()->mutable_token()->assign(16, 'x');
  EXPECT_TRUE(absl::IsUnavailable(Fetch(guessed).status()));
}

TEST_F(MailboxTest, ConnectionsThatSayNothingHinderNobody) {
  std::vector<int> silent;
  for (int i = 0; i < 70; ++i) {
    const auto connection = ConnectToUnix(socket(), 0);
    ASSERT_TRUE(connection.ok()) << connection.status();
    silent.push_back(*connection);
  }
  SessionDriver session(service_.stub(), MailboxSession(4));
  EXPECT_TRUE(Fetch(session.opened()).ok());
  EXPECT_TRUE(EndsAtOnce(silent.front()));  // there were too many
  for (const int connection : silent) close(connection);
}

TEST_F(MailboxTest, TheMailboxCannotBeMadeShorter) {
  SessionDriver session(service_.stub(), MailboxSession(4));
  const auto connection = ConnectToUnix(socket(), 0);
  ASSERT_TRUE(connection.ok());
  const std::string& token = session.opened().host().token();
  ASSERT_EQ(send(*connection, token.data(), token.size(), 0), 16);
  const absl::StatusOr<std::optional<int>> received = ReceiveDescriptor(*connection);
  ASSERT_TRUE(received.ok() && received->has_value());
  const int file = **received;
  EXPECT_NE(ftruncate(file, 0), 0);
  EXPECT_NE(ftruncate(file, 1 << 30), 0);
  close(file);
  close(*connection);
}

// Whatever a host writes into its mailbox, its own session suffers, and nobody else.
TEST_F(MailboxTest, AHostThatWritesAnythingHarmsItselfAlone) {
  ModelHost model(&service_.stub(), "m", spec_, DType::kF32, 1);
  const auto good = OpenSessionAt(service_.address(), {.max_rows = 8, .max_new_tokens = 8});
  ASSERT_NE(good, nullptr);
  SessionDriver bad(service_.stub(), MailboxSession(8));
  auto mailbox = Fetch(bad.opened());
  ASSERT_TRUE(mailbox.ok()) << mailbox.status();
  const auto words = [&](uint32_t value) {
    const mailbox::Layout& layout = (*mailbox)->layout();
    std::byte* const begin = reinterpret_cast<std::byte*>((*mailbox)->status()) - layout.status;
    for (size_t at = 0; at + 4 <= layout.bytes; at += 4) {
      std::memcpy(begin + at, &value, sizeof(value));
    }
  };
  const Requests theirs = {AttendOf(spec_, "m", 2, 0, 4, 0), AttendOf(spec_, "m", 2, 0, 4, 1)};
  for (uint64_t step = 1; step <= 3; ++step) {
    words(static_cast<uint32_t>(0x7fc00000 + step));  // far ahead, with NaN for tensors
    v1::SubmitStep submit = SessionDriver::StepOf(step, theirs);
    submit.mutable_entries(0)->set_first_position(4 * static_cast<int64_t>(step - 1));
    bad.Submit(submit);
    ASSERT_FALSE(bad.ReadAccepted().has_status());
    const v1::StepEnded ended = bad.ReadEnded();
    EXPECT_FALSE(ended.has_status()) << ended.status().message();
    RunStep(*good, model, MakeLayers(model, {{1, 2}}));
  }
  words(0x80000000);
  bad.SendClose();
  EXPECT_TRUE(bad.Finish().ok());
  RunStep(*good, model, MakeLayers(model, {{1, 1}}));
}

TEST_F(MailboxTest, LayersDoNotComeInMessages) {
  SessionDriver session(service_.stub(), MailboxSession(8));
  ASSERT_TRUE(session.is_open());
  session.SendLayer(1, AttendOf(spec_, "m", 1, 0, 4, 0));
  const grpc::Status status = session.Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << status.error_message();
  EXPECT_EQ(FieldOf(status), "layer");
}

TEST(SessionLimits, OfTheServiceAndOfEachClientAreKept) {
  const v1::CacheSpec spec = SmallSpec();
  const auto refused = [&](const CoordinatorOptions& options, int32_t rows) {
    TestService service({.workers = 1, .coordinator = options});
    PrepareCache(service, spec, 1);
    SessionDriver first(service.stub(), MailboxSession(8));
    EXPECT_TRUE(first.is_open());
    SessionDriver second(service.stub(), MailboxSession(rows));
    EXPECT_FALSE(second.is_open());
    const grpc::Status status = second.Finish();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
    google::rpc::QuotaFailure failure;
    EXPECT_TRUE(DetailOf(status, &failure));
    // What the first had is free again.
    first.SendClose();
    EXPECT_TRUE(first.Finish().ok());
    SessionDriver third(service.stub(), MailboxSession(8));
    EXPECT_TRUE(third.is_open());
    return failure.violations_size() == 0 ? "" : failure.violations(0).subject();
  };
  CoordinatorOptions options;
  options.session_limits.sessions = 1;
  EXPECT_EQ(refused(options, 8), "sessions");
  options = {};
  options.session_limits.mailbox_bytes = 1 << 20;
  EXPECT_EQ(refused(options, 4096), "mailboxes");
  options = {};
  options.client_limits.sessions = 1;
  EXPECT_EQ(refused(options, 8), Me() + " sessions");
  options = {};
  options.client_limits.mailbox_bytes = 1 << 20;
  EXPECT_EQ(refused(options, 4096), Me() + " mailbox_bytes");
}

// A caller that is not known to be on this machine.
TEST_F(MailboxTest, MailboxesAreForTheUnixSocket) {
  struct Listener final : SessionListener {
    void OnReply(v1::SessionReply) override { ADD_FAILURE() << "it was opened"; }
    void OnEnd(const absl::Status& status) override { why = status; }
    absl::Status why;
  };
  const auto listener = std::make_shared<Listener>();
  EXPECT_EQ(service_.coordinator().sessions().Open(MailboxSession(8), CallContext{},
                                                   /*local=*/false, listener),
            nullptr);
  EXPECT_TRUE(absl::IsFailedPrecondition(listener->why)) << listener->why;
  EXPECT_EQ(tributary::FieldOf(listener->why), "open.memory");
}

}  // namespace
}  // namespace tributary::service::testing
