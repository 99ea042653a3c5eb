// Sessions of hosts whose model is split over heads: an endpoint for each process, which are
// threads here. What all of them get together is right, and what one of them does wrong ends the
// session for all.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status/errors.h"
#include "service/client/host_session.h"
#include "service/data/endpoints.h"
#include "tests/service/model_host.h"
#include "tests/service/session_driver.h"
#include "tests/service/session_host.h"
#include "tests/service/test_service.h"
#include "tests/support/process.h"
#include "worker/rpc/dtype_conversion.h"

namespace tributary::service::testing {
namespace {

using client::HostSession;
using Entries = std::vector<std::pair<uint64_t, int32_t>>;
using Requests = std::vector<v1::AttendRequest>;

constexpr std::chrono::seconds kPatience{20};

// ------------------------------------------------------------------------------ who has which
// heads

worker::LayerGeometry LayerOf(int32_t q_heads, int32_t kv_heads) {
  worker::LayerGeometry layer;
  layer.q_heads = q_heads;
  layer.kv.kv_heads = kv_heads;
  return layer;
}

TEST(Endpoints, EveryHeadBelongsToOneOfThem) {
  for (const auto& [q_heads, kv_heads] : {std::pair{32, 8}, {32, 4}, {8, 8}, {16, 1}}) {
    for (const bool replicated : {false, true}) {
      for (const int32_t count : {1, 2, 4, 8}) {
        std::vector<int> q(static_cast<size_t>(q_heads));
        std::vector<int> kv(static_cast<size_t>(kv_heads));
        for (int32_t e = 0; e < count; ++e) {
          const EndpointHeads heads = HeadsOf(LayerOf(q_heads, kv_heads), {count, replicated}, e);
          EXPECT_EQ(heads.q, (Heads{e * (q_heads / count), q_heads / count}));
          for (int32_t h = 0; h < heads.q.count; ++h) ++q[static_cast<size_t>(heads.q.begin + h)];
          for (int32_t h = 0; h < heads.kv.count; ++h) {
            ++kv[static_cast<size_t>(heads.kv.begin + h)];
          }
          if (replicated) {
            EXPECT_EQ(heads.kv.count, e == 0 ? kv_heads : 0);
          }
        }
        EXPECT_THAT(q, ::testing::Each(1));
        EXPECT_THAT(kv, ::testing::Each(1));
      }
    }
  }
}

TEST(Endpoints, MoreEndpointsThanKvHeadsShareThem) {
  const worker::LayerGeometry layer = LayerOf(32, 2);
  EXPECT_EQ(HeadsOf(layer, {.count = 8}, 3), (EndpointHeads{{12, 4}, {0, 0}}));
  EXPECT_EQ(HeadsOf(layer, {.count = 8}, 4), (EndpointHeads{{16, 4}, {1, 1}}));
}

TEST(Endpoints, HeadsThatCannotBeSplitAreRefused) {
  worker::CacheSpec spec;
  spec.layers.resize(1);
  const auto refused = [&](int32_t q_heads, int32_t kv_heads, Endpoints endpoints) {
    spec.q_heads = q_heads;
    spec.kv_heads = kv_heads;
    return tributary::FieldOf(CheckEndpoints(spec, endpoints));
  };
  EXPECT_EQ(refused(32, 8, {.count = 8}), "");
  EXPECT_EQ(refused(32, 8, {.count = 0}), "open.endpoints");
  EXPECT_EQ(refused(32, 8, {.count = 65}), "open.endpoints");
  EXPECT_EQ(refused(28, 4, {.count = 8}), "open.endpoints");
  EXPECT_EQ(refused(24, 4, {.count = 3}), "open.endpoints");
  EXPECT_EQ(refused(24, 4, {.count = 3, .kv_replicated = true}), "");
}

// -------------------------------------------------------------------------------------- the
// session

// The heads of a dense tensor that an endpoint has, where they lie.
client::HeadRows Own(client::HeadRows all, int32_t first_head, int32_t heads,
                     size_t element_bytes) {
  if (heads == 0 || all.data == nullptr) return {};
  all.row_stride = int64_t{all.heads} * all.dim;
  all.data = static_cast<std::byte*>(all.data) +
             static_cast<size_t>(first_head) * static_cast<size_t>(all.dim) * element_bytes;
  all.heads = heads;
  return all;
}

class EndpointSessionTest : public ::testing::Test {
 protected:
  void Start(int32_t endpoints, client::HostSessionOptions options, DType dtype = DType::kF32) {
    sessions_.clear();
    model_.reset();
    service_.emplace(TestService::Options{.workers = 2});
    PrepareCache(*service_, spec_, 3);
    model_.emplace(&service_->stub(), "m", spec_, dtype, 1);
    element_bytes_ = SizeOf(dtype);
    options.dtype = ToProto(dtype);
    options.memory = v1::SESSION_MEMORY_HOST;
    options.endpoints = endpoints;
    sessions_.push_back(OpenSessionAt(service_->address(), options));
    ASSERT_NE(sessions_.front(), nullptr);
    for (int32_t e = 1; e < endpoints; ++e) {
      auto joined = Join(e);
      ASSERT_TRUE(joined.ok()) << joined.status();
      sessions_.push_back(*std::move(joined));
    }
  }
  absl::StatusOr<std::unique_ptr<HostSession>> Join(int32_t endpoint) {
    const v1::SessionOpened& opened = sessions_.front()->opened();
    return HostSession::Join({.target = service_->address()}, {.session_id = opened.session_id(),
                                                               .secret = opened.endpoint_secret(),
                                                               .endpoint = endpoint});
  }
  Requests Make(const Entries& entries) {
    return {model_->MakeStep(0, entries), model_->MakeStep(1, entries)};
  }

  // What endpoint `e` does with a step; output and LSE of its heads go into the replies, which have
  // room for all.
  absl::Status Drive(size_t e, const client::SessionStep& step, const Requests& requests,
                     std::vector<std::string>* outputs, std::vector<std::vector<float>>* lses) {
    HostSession& session = *sessions_[e];
    const absl::StatusOr<uint64_t> submitted = session.Submit(step);
    if (!submitted.ok()) return submitted.status();
    const v1::LayerShape& shape = session.opened().shapes(0);
    const int32_t first_q = shape.first_q_head(), q_heads = shape.q_heads();
    const int32_t first_kv = shape.first_kv_head(), kv_heads = shape.kv_heads();
    for (size_t i = 0; i < requests.size(); ++i) {
      const client::HeadRows q = RowsOf(requests[i].q());
      const client::HeadRows k = Own(RowsOf(requests[i].k()), first_kv, kv_heads, element_bytes_);
      const client::HeadRows v = Own(RowsOf(requests[i].v()), first_kv, kv_heads, element_bytes_);
      absl::Status done;
      if (step.append_only) {
        done = session.Append(k, v);
      } else {
        client::HeadRows output = q;
        output.data = (*outputs)[i].data();
        output.dim = shape.value_head_dim();
        std::vector<float> lse(static_cast<size_t>(q.rows) * static_cast<size_t>(q_heads));
        done = session.Attend({.q = Own(q, first_q, q_heads, element_bytes_),
                               .k = k,
                               .v = v,
                               .output = Own(output, first_q, q_heads, element_bytes_),
                               .lse = lse.data()});
        for (int32_t row = 0; row < q.rows; ++row) {
          std::copy_n(&lse[static_cast<size_t>(row * q_heads)], q_heads,
                      &(*lses)[i][static_cast<size_t>(row * q.heads + first_q)]);
        }
      }
      if (!done.ok()) return done;
    }
    return session.Await(*submitted);
  }

  // All endpoints at once; EXPECTs that what they get together is right.
  void RunTogether(const client::SessionStep& step, const Requests& requests) {
    std::vector<std::string> outputs;
    std::vector<std::vector<float>> lses;
    for (const v1::AttendRequest& request : requests) {
      outputs.emplace_back(request.q().inline_().size(), '\0');  // keys and values of one size
      lses.emplace_back(static_cast<size_t>(request.q().shape(0) * request.q().shape(1)));
    }
    std::vector<std::future<absl::Status>> endpoints;
    for (size_t e = 0; e < sessions_.size(); ++e) {
      endpoints.push_back(std::async(std::launch::async,
                                     [&, e] { return Drive(e, step, requests, &outputs, &lses); }));
    }
    for (size_t e = 0; e < endpoints.size(); ++e) {
      const absl::Status done = endpoints[e].get();
      ASSERT_TRUE(done.ok()) << "endpoint " << e << ": " << done;
    }
    if (step.append_only) return;
    for (size_t i = 0; i < requests.size(); ++i) {
      v1::AttendReply reply;
      *reply.mutable_output() = requests[i].q();
      *reply.mutable_output()->mutable_inline_() = outputs[i];
      *reply.mutable_lse() =
          InlineTensor(DType::kF32, {requests[i].q().shape(0), requests[i].q().shape(1)}, lses[i]);
      const bool keeps = requests[i].mode() != v1::ATTEND_MODE_DFLASH;
      for (const v1::AttendEntry& entry : requests[i].entries()) {
        reply.add_lengths(entry.first_position() + (keeps ? entry.new_tokens() : 0));
      }
      model_->Check(requests[i], reply);
    }
  }
  void RunTogether(const Requests& requests) { RunTogether(StepOf(requests), requests); }

  v1::CacheSpec spec_ = SmallSpec();
  std::optional<TestService> service_;
  std::optional<ModelHost> model_;
  size_t element_bytes_ = 4;
  std::vector<std::unique_ptr<HostSession>> sessions_;  // by endpoint
};

TEST_F(EndpointSessionTest, TogetherTheyGetWhatTheReferenceGives) {
  struct Case {
    int32_t endpoints;
    bool kv_replicated;
    DType dtype;
  };
  for (const Case& c :
       {Case{2, false, DType::kF32}, {4, false, DType::kBf16}, {4, true, DType::kF16}}) {
    SCOPED_TRACE(c.endpoints);
    ASSERT_NO_FATAL_FAILURE(
        Start(c.endpoints, {.max_rows = 16, .max_new_tokens = 16, .kv_replicated = c.kv_replicated},
              c.dtype));
    RunTogether(Make({{1, 40}, {2, 7}}));  // a prompt, in pieces
    for (int i = 0; i < 5; ++i) RunTogether(Make({{1, 1}, {2, 1}, {3, 1}}));
    RunTogether(Make({{1, 4}, {3, 8}}));
    RunTogether({model_->MakeDraft(0, {{1, 8}}), model_->MakeDraft(1, {{1, 8}})});
    const Requests appended = Make({{2, 33}});
    client::SessionStep step = StepOf(appended);
    step.append_only = true;
    step.entries[0].query_rows = 0;
    RunTogether(step, appended);
    RunTogether(Make({{2, 1}}));
    auto closed = std::async(std::launch::async, [&] { return sessions_[1]->Close(); });
    EXPECT_TRUE(sessions_.front()->Close().ok());
    EXPECT_TRUE(closed.get().ok());
    model_->Step(0, {{2, 1}});  // and calls go on from there
    model_->Step(1, {{2, 1}});
  }
}

TEST_F(EndpointSessionTest, EachIsToldWhichHeadsItHas) {
  ASSERT_NO_FATAL_FAILURE(Start(4, {.max_rows = 4, .max_new_tokens = 4}));
  for (int32_t e = 0; e < 4; ++e) {
    const v1::SessionOpened& opened = sessions_[static_cast<size_t>(e)]->opened();
    EXPECT_EQ(opened.endpoint(), e);
    EXPECT_EQ(opened.terms().endpoints(), 4);
    EXPECT_EQ(opened.shapes(0).first_q_head(), e);
    EXPECT_EQ(opened.shapes(0).q_heads(), 1);
    EXPECT_EQ(opened.shapes(0).kv_heads(), e % 2 == 0 ? 1 : 0);
    EXPECT_EQ(opened.endpoint_secret().empty(), e > 0);
  }
  v1::GetTopologyReply topology;
  grpc::ClientContext context;
  ASSERT_TRUE(service_->stub().GetTopology(&context, {}, &topology).ok());
  ASSERT_EQ(topology.sessions_size(), 1);
  EXPECT_EQ(topology.sessions(0).endpoints(), 4);
  EXPECT_EQ(topology.sessions(0).endpoints_joined(), 4);
}

TEST_F(EndpointSessionTest, WhoMayNotJoinIsToldWhy) {
  ASSERT_NO_FATAL_FAILURE(Start(2, {.max_rows = 4, .max_new_tokens = 4}));
  const v1::SessionOpened& opened = sessions_.front()->opened();
  const auto refused = [&](uint64_t session, std::string secret, int32_t endpoint) {
    return HostSession::Join(
               {.target = service_->address()},
               {.session_id = session, .secret = std::move(secret), .endpoint = endpoint})
        .status();
  };
  const std::string secret = opened.endpoint_secret();
  const absl::Status unknown = refused(opened.session_id() + 1, secret, 1);
  EXPECT_TRUE(absl::IsNotFound(unknown)) << unknown;
  EXPECT_EQ(tributary::FieldOf(unknown), "join.session_id");
  EXPECT_TRUE(absl::IsNotFound(refused(opened.session_id(), std::string(16, 'x'), 1)));
  EXPECT_TRUE(absl::IsNotFound(refused(opened.session_id(), "", 1)));
  for (const int32_t endpoint : {-1, 0, 2}) {
    const absl::Status outside = refused(opened.session_id(), secret, endpoint);
    EXPECT_TRUE(absl::IsInvalidArgument(outside)) << outside;
    EXPECT_EQ(tributary::FieldOf(outside), "join.endpoint");
  }
  const absl::Status twice = refused(opened.session_id(), secret, 1);
  EXPECT_TRUE(absl::IsAlreadyExists(twice)) << twice;
  RunTogether(Make({{1, 3}}));  // none of it has done the session any harm
  // A session with one endpoint has nothing to join.
  const auto alone = OpenSessionAt(service_->address(), {.max_rows = 4});
  EXPECT_TRUE(absl::IsNotFound(refused(alone->opened().session_id(), "", 1)));
}

TEST_F(EndpointSessionTest, SessionsThatCannotHaveEndpointsAreRefused) {
  service_.emplace(TestService::Options{.workers = 1});
  PrepareCache(*service_, spec_, 1);
  const auto refused = [&](const std::function<void(v1::OpenSession*)>& edit) {
    v1::OpenSession open = MessagesSession(4);
    open.set_memory(v1::SESSION_MEMORY_HOST);
    open.set_endpoints(2);
    edit(&open);
    SessionDriver session(service_->stub(), open);
    EXPECT_FALSE(session.is_open());
    return FieldOf(session.Finish());
  };
  EXPECT_EQ(refused([](auto* open) { open->set_endpoints(3); }), "open.endpoints");
  EXPECT_EQ(refused([](auto* open) { open->set_endpoints(-1); }), "open.endpoints");
  EXPECT_EQ(refused([](auto* open) { open->set_memory(v1::SESSION_MEMORY_MESSAGES); }),
            "open.endpoints");
  EXPECT_EQ(refused([](auto* open) { open->set_output_dtype(v1::DTYPE_NVFP4); }),
            "open.output_dtype");
}

TEST_F(EndpointSessionTest, AllHearOfAStepThatIsRefused) {
  ASSERT_NO_FATAL_FAILURE(Start(2, {.max_rows = 4, .max_new_tokens = 4}));
  const Requests requests = Make({{1, 2}});
  client::SessionStep far = StepOf(requests);
  far.entries[0].first_position = 9;
  auto joined = std::async(std::launch::async, [&] { return sessions_[1]->Submit(far).status(); });
  EXPECT_TRUE(absl::IsOutOfRange(sessions_[0]->Submit(far).status()));
  const absl::Status heard = joined.get();
  EXPECT_TRUE(absl::IsOutOfRange(heard)) << heard;
  EXPECT_EQ(tributary::FieldOf(heard), "entries[0].first_position");
  RunTogether(requests);
}

// What it hands over is waited for in vain, and everybody is told whose it was.
TEST_F(EndpointSessionTest, ASilentEndpointEndsTheSessionForAll) {
  ASSERT_NO_FATAL_FAILURE(Start(
      2, {.max_rows = 4, .max_new_tokens = 4, .wait_timeout = std::chrono::milliseconds(300)}));
  const Requests requests = Make({{1, 2}});
  ASSERT_TRUE(sessions_[0]->Submit(StepOf(requests)).ok());
  EXPECT_TRUE(sessions_[1]->Submit(StepOf(requests)).ok());
  for (const size_t e : {0, 1}) {
    EXPECT_TRUE(test::Eventually(kPatience, [&] { return !sessions_[e]->status().ok(); }));
    const absl::Status why = sessions_[e]->status();
    EXPECT_TRUE(absl::IsDeadlineExceeded(why)) << why;
    EXPECT_THAT(why.message(), ::testing::HasSubstr("endpoint 0"));
  }
  model_.emplace(&service_->stub(), "m", spec_, DType::kF32, 1);
  model_->Step(0, {{1, 2}});  // nothing of the step has been kept
}

TEST_F(EndpointSessionTest, AnEndpointThatLeavesEndsTheSessionForAll) {
  for (const size_t leaving : {1, 0}) {
    ASSERT_NO_FATAL_FAILURE(Start(2, {.max_rows = 4, .max_new_tokens = 4}));
    const size_t other = 1 - leaving;
    const Requests requests = Make({{1, 2}});
    ASSERT_TRUE(sessions_[0]->Submit(StepOf(requests)).ok());
    ASSERT_TRUE(sessions_[1]->Submit(StepOf(requests)).ok());
    std::vector<std::string> outputs(2, std::string(requests[0].q().inline_().size(), '\0'));
    auto waits = std::async(std::launch::async, [&] {
      const v1::LayerShape& shape = sessions_[other]->opened().shapes(0);
      return sessions_[other]->Attend(
          {.q = Own(RowsOf(requests[0].q()), shape.first_q_head(), shape.q_heads(), 4),
           .k = Own(RowsOf(requests[0].k()), shape.first_kv_head(), shape.kv_heads(), 4),
           .v = Own(RowsOf(requests[0].v()), shape.first_kv_head(), shape.kv_heads(), 4)});
    });
    sessions_[leaving].reset();
    const absl::Status why = waits.get();
    EXPECT_TRUE(absl::IsAborted(why)) << why;
    EXPECT_THAT(why.message(), ::testing::HasSubstr("endpoint " + std::to_string(leaving)));
  }
}

}  // namespace
}  // namespace tributary::service::testing
