// The public API over gRPC: every row of the error table, and what each call changes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <thread>

#include "absl/strings/str_cat.h"
#include "tests/service/fake_group.h"
#include "tests/service/model_host.h"
#include "tests/service/test_service.h"
#include "worker/rpc/dtype_conversion.h"

namespace tributary::service::testing {
namespace {

using ::grpc::StatusCode;
using ::testing::HasSubstr;

class ApiTest : public ::testing::Test {
 protected:
  // A cache "m" whose sequence 1 holds 20 tokens in layer 0 and 10 in layer 1; 2 is empty.
  void SetUp() override {
    ASSERT_TRUE(CreateCache(stub(), "m", spec_).ok());
    ASSERT_TRUE(Open(stub(), "m", 1).ok());
    ASSERT_TRUE(Open(stub(), "m", 2).ok());
    v1::AttendReply reply;
    ASSERT_TRUE(Attend(stub(), AttendOf(spec_, "m", 1, 0, 20), &reply).ok());
    ASSERT_TRUE(Attend(stub(), AttendOf(spec_, "m", 1, 0, 10, 1), &reply).ok());
    probe_ = QueryOf(spec_, "m", 1, 0, 10, 1);
    ASSERT_TRUE(Attend(stub(), probe_, &reply).ok());
    probed_ = reply.SerializeAsString();
  }

  v1::AttentionService::Stub& stub() { return service_.stub(); }
  v1::AttendRequest Good() const { return AttendOf(spec_, "m", 1, 20, 2); }

  // The call is refused with this code and field, and nothing is changed by it: neither what the
  // service says it holds, nor what attention over it gives.
  void ExpectRefused(StatusCode code, const std::string& field,
                     const std::function<grpc::Status()>& call) {
    const std::string before = service_.State();
    const grpc::Status status = call();
    EXPECT_EQ(status.error_code(), code) << status.error_message();
    EXPECT_EQ(FieldOf(status), field) << status.error_message();
    EXPECT_EQ(service_.State(), before);
    v1::AttendReply reply;
    EXPECT_TRUE(Attend(stub(), probe_, &reply).ok());
    EXPECT_EQ(reply.SerializeAsString(), probed_);
  }
  void ExpectAttendRefused(StatusCode code, const std::string& field,
                           const std::function<void(v1::AttendRequest*)>& spoil) {
    SCOPED_TRACE(field);
    v1::AttendRequest request = Good();
    spoil(&request);
    v1::AttendReply reply;
    ExpectRefused(code, field, [&] { return Attend(stub(), request, &reply); });
  }
  template <typename Request, typename Reply>
  grpc::Status Call(grpc::Status (v1::AttentionService::Stub::*method)(grpc::ClientContext*,
                                                                       const Request&, Reply*),
                    const Request& request, Reply* reply) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    return (stub().*method)(&context, request, reply);
  }
  grpc::Status Fork(uint64_t parent, uint64_t child, int64_t length, v1::ForkSequenceReply* reply) {
    v1::ForkSequenceRequest request;
    request.set_cache_id("m");
    request.set_parent_id(parent);
    request.set_sequence_id(child);
    if (length != -2) request.set_length(length);
    return Call(&v1::AttentionService::Stub::ForkSequence, request, reply);
  }
  grpc::Status Truncate(uint64_t id, int64_t length, v1::TruncateSequenceReply* reply) {
    v1::TruncateSequenceRequest request;
    request.set_cache_id("m");
    request.set_sequence_id(id);
    request.set_length(length);
    return Call(&v1::AttentionService::Stub::TruncateSequence, request, reply);
  }
  grpc::Status Close(uint64_t id) {
    v1::CloseSequenceRequest request;
    request.set_cache_id("m");
    request.set_sequence_id(id);
    v1::CloseSequenceReply reply;
    return Call(&v1::AttentionService::Stub::CloseSequence, request, &reply);
  }

  const v1::CacheSpec spec_ = SmallSpec();
  TestService service_{{.workers = 4}};
  v1::AttendRequest probe_;
  std::string probed_;
};

// ------------------------------------------------------------------------------ INVALID_ARGUMENT

TEST_F(ApiTest, BadTensorsAreRefusedAndNamed) {
  const auto refuse = [&](const std::string& field, auto spoil) {
    ExpectAttendRefused(StatusCode::INVALID_ARGUMENT, field, spoil);
  };
  using Request = v1::AttendRequest*;
  refuse("q.dtype", [](Request r) { r->clear_q(); });
  refuse("q.dtype", [](Request r) { r->mutable_q()->set_dtype(v1::DTYPE_FP8_E4M3); });
  refuse("q.dtype", [](Request r) { r->mutable_q()->set_dtype(static_cast<v1::DType>(99)); });
  refuse("q.shape", [](Request r) { r->mutable_q()->add_shape(1); });
  refuse("q.shape[0]", [](Request r) { r->mutable_q()->set_shape(0, 3); });
  refuse("q.shape[0]", [](Request r) { r->mutable_q()->set_shape(0, -2); });
  refuse("q.shape[1]", [](Request r) { r->mutable_q()->set_shape(1, 8); });
  refuse("q.shape[2]", [](Request r) { r->mutable_q()->set_shape(2, int64_t{1} << 62); });
  refuse("q.inline", [](Request r) { r->mutable_q()->mutable_inline_()->pop_back(); });
  refuse("q.inline", [](Request r) { r->mutable_q()->set_dtype(v1::DTYPE_BF16); });
  refuse("q", [](Request r) { r->mutable_q()->clear_source(); });
  refuse("k.dtype", [](Request r) { r->clear_k(); });
  refuse("k.shape[1]", [](Request r) { r->mutable_k()->set_shape(1, 4); });
  refuse("v.inline", [](Request r) {
    r->mutable_v()->clear_inline_();
    r->mutable_v()->set_inline_("");
  });
  refuse("v.dtype", [](Request r) {
    *r->mutable_v() = InlineTensor(DType::kBf16, {2, 2, 64}, RandomValues(256, 1));
  });
  refuse("output.inline", [](Request r) { *r->mutable_output() = r->q(); });
  refuse("output.dtype", [](Request r) { r->mutable_output()->set_dtype(v1::DTYPE_FP8_E5M2); });
  refuse("output.dtype", [](Request r) { r->mutable_output(); });
  refuse("lse.dtype", [](Request r) {
    r->set_return_lse(true);
    r->mutable_lse();
  });
  refuse("lse", [](Request r) { r->mutable_lse()->set_dtype(v1::DTYPE_F32); });
  refuse("lse.dtype", [](Request r) {
    r->set_return_lse(true);
    r->mutable_lse()->set_dtype(v1::DTYPE_BF16);
  });
  refuse("k", [](Request r) { r->mutable_entries(0)->set_new_tokens(0); });
}

TEST_F(ApiTest, BadEntriesAreRefusedAndNamed) {
  const auto refuse = [&](const std::string& field, auto spoil) {
    ExpectAttendRefused(StatusCode::INVALID_ARGUMENT, field, spoil);
  };
  using Request = v1::AttendRequest*;
  refuse("layer", [](Request r) { r->set_layer(2); });
  refuse("layer", [](Request r) { r->set_layer(-1); });
  refuse("mode", [](Request r) { r->set_mode(v1::ATTEND_MODE_UNSPECIFIED); });
  refuse("mode", [](Request r) { r->set_mode(static_cast<v1::AttendMode>(9)); });
  refuse("entries", [](Request r) { r->clear_entries(); });
  refuse("entries[0].query_rows", [](Request r) { r->mutable_entries(0)->set_query_rows(0); });
  refuse("entries[0].query_rows", [](Request r) { r->mutable_entries(0)->set_query_rows(-5); });
  refuse("entries[0].new_tokens", [](Request r) { r->mutable_entries(0)->set_new_tokens(1); });
  refuse("entries[0].first_position",
         [](Request r) { r->mutable_entries(0)->set_first_position(-1); });
  refuse("entries[0].first_position",  // overlaps the end
         [](Request r) { r->mutable_entries(0)->set_first_position(19); });
  refuse("entries[1].sequence_id", [](Request r) { *r->add_entries() = r->entries(0); });
  refuse("entries[1].query_rows", [](Request r) {
    for (int i = 0; i < 2; ++i) {
      v1::AttendEntry* entry = i == 0 ? r->mutable_entries(0) : r->add_entries();
      entry->set_sequence_id(1 + i);
      entry->set_query_rows(INT32_MAX);
      entry->set_new_tokens(0);
    }
  });
  v1::AppendRequest append = AppendOf(spec_, "m", 1, 20, 2);
  append.mutable_entries(0)->set_tokens(0);
  v1::AppendReply reply;
  ExpectRefused(StatusCode::INVALID_ARGUMENT, "entries[0].tokens",
                [&] { return Append(stub(), append, &reply); });
}

TEST_F(ApiTest, BadControlCallsAreRefusedAndNamed) {
  v1::ForkSequenceReply forked;
  ExpectRefused(StatusCode::INVALID_ARGUMENT, "length", [&] { return Fork(1, 3, -1, &forked); });
  v1::TruncateSequenceReply truncated;
  ExpectRefused(StatusCode::INVALID_ARGUMENT, "length",
                [&] { return Truncate(1, -1, &truncated); });
  ExpectRefused(StatusCode::INVALID_ARGUMENT, "cache_id",
                [&] { return CreateCache(stub(), "a/b", spec_); });
  ExpectRefused(StatusCode::INVALID_ARGUMENT, "cache_id",
                [&] { return CreateCache(stub(), std::string(129, 'a'), spec_); });
  v1::CacheSpec bad = spec_;
  bad.set_head_dim(65);
  ExpectRefused(StatusCode::INVALID_ARGUMENT, "spec.head_dim",
                [&] { return CreateCache(stub(), "n", bad); });
}

// ------------------------------------------------------------------------------------- NOT_FOUND

TEST_F(ApiTest, UnknownThingsAreNotFound) {
  ExpectAttendRefused(StatusCode::NOT_FOUND, "cache_id", [](auto* r) { r->set_cache_id("x"); });
  ExpectAttendRefused(StatusCode::NOT_FOUND, "entries[0].sequence_id",
                      [](auto* r) { r->mutable_entries(0)->set_sequence_id(77); });
  ExpectAttendRefused(StatusCode::NOT_FOUND, "q.shared_memory.region",
                      [](auto* r) { r->mutable_q()->mutable_shared_memory()->set_region("none"); });
  ExpectRefused(StatusCode::NOT_FOUND, "sequence_id", [&] { return Close(77); });
  v1::TruncateSequenceReply truncated;
  ExpectRefused(StatusCode::NOT_FOUND, "sequence_id", [&] { return Truncate(77, 0, &truncated); });
  v1::ForkSequenceReply forked;
  ExpectRefused(StatusCode::NOT_FOUND, "parent_id", [&] { return Fork(77, 3, 0, &forked); });
  v1::DeleteCacheRequest gone;
  gone.set_cache_id("x");
  v1::DeleteCacheReply reply;
  ExpectRefused(StatusCode::NOT_FOUND, "cache_id",
                [&] { return Call(&v1::AttentionService::Stub::DeleteCache, gone, &reply); });
  v1::GetTopologyRequest topology;
  topology.set_cache_id("x");
  v1::GetTopologyReply topology_reply;
  ExpectRefused(StatusCode::NOT_FOUND, "cache_id", [&] {
    return Call(&v1::AttentionService::Stub::GetTopology, topology, &topology_reply);
  });
}

// ---------------------------------------------------------------------------------- OUT_OF_RANGE

TEST_F(ApiTest, AGapIsOutOfRangeAndSaysWhatIsHeld) {
  v1::AttendRequest request = AttendOf(spec_, "m", 1, 25, 1);
  v1::AttendReply reply;
  ExpectRefused(StatusCode::OUT_OF_RANGE, "entries[0].first_position", [&] {
    const grpc::Status status = Attend(stub(), request, &reply);
    google::rpc::ErrorInfo info;
    EXPECT_TRUE(DetailOf(status, &info));
    EXPECT_EQ(info.metadata().at("length"), "20");
    return status;
  });
  ExpectRefused(StatusCode::OUT_OF_RANGE, "entries[0].first_position",
                [&] { return Attend(stub(), QueryOf(spec_, "m", 1, 19, 2), &reply); });
  ExpectRefused(StatusCode::OUT_OF_RANGE, "entries[0].first_position",
                [&] { return Attend(stub(), AttendOf(spec_, "m", 1, INT64_MAX, 1), &reply); });
  v1::ForkSequenceReply forked;
  ExpectRefused(StatusCode::OUT_OF_RANGE, "length", [&] { return Fork(1, 3, 11, &forked); });
}

// -------------------------------------------------------------------------------- ALREADY_EXISTS

TEST_F(ApiTest, TheSameCallAgainGivesTheSameReplyAndOtherBytesAreRefused) {
  for (const int32_t tokens : {1, 5, 80}) {  // decode, verify, prefill
    SCOPED_TRACE(tokens);
    const int64_t first = 20 + (tokens == 5 ? 1 : tokens == 80 ? 6 : 0);
    v1::AttendRequest request = AttendOf(spec_, "m", 1, first, tokens, 0, 42);
    request.set_return_lse(true);
    v1::AttendReply once, again;
    ASSERT_TRUE(Attend(stub(), request, &once).ok());
    EXPECT_EQ(once.lengths(0), first + tokens);
    const std::string before = service_.State();
    ASSERT_TRUE(Attend(stub(), request, &again).ok());
    EXPECT_EQ(once.SerializeAsString(), again.SerializeAsString());
    EXPECT_EQ(service_.State(), before);

    v1::AttendRequest other = request;
    *other.mutable_k() = AttendOf(spec_, "m", 1, first, tokens, 0, 43).k();
    ExpectRefused(StatusCode::ALREADY_EXISTS, "entries[0].first_position",
                  [&] { return Attend(stub(), other, &again); });
  }
  v1::AppendRequest append = AppendOf(spec_, "m", 2, 0, 3, 0, 5);
  v1::AppendReply appended;
  ASSERT_TRUE(Append(stub(), append, &appended).ok());
  ASSERT_TRUE(Append(stub(), append, &appended).ok());
  EXPECT_EQ(appended.lengths(0), 3);
  *append.mutable_v() = AppendOf(spec_, "m", 2, 0, 3, 0, 6).v();
  ExpectRefused(StatusCode::ALREADY_EXISTS, "entries[0].first_position",
                [&] { return Append(stub(), append, &appended); });
  EXPECT_EQ(service_.Topology().statistics().replays(), 4u);
}

TEST_F(ApiTest, AConflictInOneEntryUndoesTheWholeCallAndTheNextIsRight) {
  v1::ForkSequenceReply forked;
  ASSERT_TRUE(Fork(1, 3, 10, &forked).ok());
  // Entry 0 appends to the fork (and so copies a shared page), entry 1 repeats with other bytes.
  v1::AttendRequest request = AttendOf(spec_, "m", 3, 10, 2, 1, 9);
  v1::AttendEntry* other = request.add_entries();
  other->set_sequence_id(1);
  other->set_first_position(0);
  other->set_query_rows(2);
  other->set_new_tokens(2);
  *request.mutable_q() = InlineTensor(DType::kF32, {4, 4, 64}, RandomValues(1024, 3));
  *request.mutable_k() = InlineTensor(DType::kF32, {4, 2, 64}, RandomValues(512, 4));
  *request.mutable_v() = InlineTensor(DType::kF32, {4, 2, 64}, RandomValues(512, 5));
  v1::AttendReply reply;
  ExpectRefused(StatusCode::ALREADY_EXISTS, "entries[1].first_position",
                [&] { return Attend(stub(), request, &reply); });
  // The fork still reads what it shares.
  v1::AttendReply parent, child;
  ASSERT_TRUE(Attend(stub(), QueryOf(spec_, "m", 1, 9, 1), &parent).ok());
  ASSERT_TRUE(Attend(stub(), QueryOf(spec_, "m", 3, 9, 1), &child).ok());
  EXPECT_EQ(parent.output().inline_(), child.output().inline_());
}

TEST_F(ApiTest, NamesInUseAreRefusedUnlessTheCallSaysTheSame) {
  v1::CacheSpec other = spec_;
  other.set_layers(3);
  ExpectRefused(StatusCode::ALREADY_EXISTS, "cache_id",
                [&] { return CreateCache(stub(), "m", other); });
  EXPECT_TRUE(CreateCache(stub(), "m", spec_).ok());
  ExpectRefused(StatusCode::ALREADY_EXISTS, "sequence_id", [&] { return Open(stub(), "m", 1); });
  EXPECT_TRUE(Open(stub(), "m", 2).ok());
  v1::ForkSequenceReply forked;
  ExpectRefused(StatusCode::ALREADY_EXISTS, "sequence_id", [&] { return Fork(1, 2, 5, &forked); });
}

// ---------------------------------------------------------------------------- RESOURCE_EXHAUSTED

TEST_F(ApiTest, WithoutFreePagesNothingChangesAndOthersGoOn) {
  const int64_t room = spec_.capacity_tokens();  // of all sequences; 1 page of 64 tokens is taken
  const auto fill = AppendOf(spec_, "m", 2, 0, static_cast<int32_t>(room));
  v1::AppendReply appended;
  ExpectRefused(StatusCode::RESOURCE_EXHAUSTED, "", [&] {
    const grpc::Status status = Append(stub(), fill, &appended);
    google::rpc::QuotaFailure quota;
    EXPECT_TRUE(DetailOf(status, &quota));
    EXPECT_THAT(quota.violations(0).subject(), HasSubstr("pages"));
    return status;
  });
  // To the last page, and one more token.
  ASSERT_TRUE(
      Append(stub(), AppendOf(spec_, "m", 2, 0, static_cast<int32_t>(room - 64)), &appended).ok());
  EXPECT_EQ(service_.Topology().caches(0).pages_used(),
            service_.Topology().caches(0).pages_total());
  ExpectRefused(StatusCode::RESOURCE_EXHAUSTED, "",
                [&] { return Append(stub(), AppendOf(spec_, "m", 2, room - 64, 1), &appended); });
  // The other sequence's page has room.
  v1::AttendReply reply;
  EXPECT_TRUE(Attend(stub(), Good(), &reply).ok());
  ASSERT_TRUE(Close(2).ok());
  EXPECT_TRUE(Attend(stub(), AttendOf(spec_, "m", 1, 22, 100), &reply).ok());
}

TEST_F(ApiTest, AMessageThatIsTooLargeChangesNothing) {
  v1::AttendRequest request = Good();
  request.mutable_q()->set_inline_(std::string((64 << 20) + 1, 'x'));
  v1::AttendReply reply;
  ExpectRefused(StatusCode::RESOURCE_EXHAUSTED, "",
                [&] { return Attend(stub(), request, &reply); });
}

TEST(LimitsTest, AReplyThatIsTooLargeIsRefusedBeforeAnythingIsDone) {
  TestService::Options options{.workers = 2};
  options.coordinator.max_message_bytes = 150'000;  // the request has 103 KB, its output in f32 164
  options.coordinator.max_sequences = 2;
  TestService service(options);
  v1::CacheSpec spec = SmallSpec();
  spec.set_q_heads(32);
  ASSERT_TRUE(CreateCache(service.stub(), "m", spec).ok());
  ASSERT_TRUE(Open(service.stub(), "m", 1).ok());
  ASSERT_TRUE(Open(service.stub(), "m", 2).ok());
  EXPECT_EQ(Open(service.stub(), "m", 3).error_code(), StatusCode::RESOURCE_EXHAUSTED);
  v1::AttendRequest request = AttendOf(spec, "m", 1, 0, 20);
  const std::vector<float> q = ValuesOf(request.q());
  *request.mutable_q() = InlineTensor(DType::kF16, {20, 32, 64}, q);
  request.mutable_output()->set_dtype(v1::DTYPE_F32);
  const std::string before = service.State();
  v1::AttendReply reply;
  const grpc::Status refused = Attend(service.stub(), request, &reply);
  EXPECT_EQ(refused.error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(refused.error_message(), HasSubstr("output"));
  EXPECT_EQ(service.State(), before);
  request.mutable_output()->set_dtype(v1::DTYPE_F16);
  EXPECT_TRUE(Attend(service.stub(), request, &reply).ok());
  EXPECT_EQ(reply.output().dtype(), v1::DTYPE_F16);
}

// --------------------------------------------------------------------------- FAILED_PRECONDITION

// Backends narrower than ours, of a group of GPUs without GPUs.
class SelectionTest : public ::testing::Test {
 protected:
  SelectionTest() {
    causal_only_.modes = {worker::CudaBackend().modes.front()};
    causal_only_.kv_dtypes = {DType::kBf16};
    TestService::Options options;
    options.coordinator.backends = {&causal_only_, &worker::CpuBackend()};
    group_ = new FakeGroup(2, /*record=*/true, worker::Device::kCuda);
    service_.emplace(options, std::unique_ptr<WorkerGroup>(group_));
  }

  worker::BackendCapabilities causal_only_ = worker::CudaBackend();
  FakeGroup* group_ = nullptr;  // the service's
  std::optional<TestService> service_;
};

TEST_F(SelectionTest, TheBackendChosenIsNamed) {
  v1::CreateCacheRequest request;
  request.set_cache_id("m");
  *request.mutable_spec() = SmallSpec();
  request.mutable_spec()->set_kv_dtype(v1::DTYPE_BF16);
  grpc::ClientContext context;
  v1::CreateCacheReply reply;
  const grpc::Status status = service_->stub().CreateCache(&context, request, &reply);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(reply.backend(), "cuda");
  EXPECT_EQ(service_->Topology().workers(1).backend(), "cuda");
}

TEST_F(SelectionTest, ACacheNoBackendCoversIsRefusedWithEveryReasonAndNothingIsCreated) {
  v1::CacheSpec spec = SmallSpec();
  spec.set_kv_dtype(v1::DTYPE_F16);
  const grpc::Status refused = CreateCache(service_->stub(), "m", spec);
  EXPECT_EQ(refused.error_code(), StatusCode::FAILED_PRECONDITION);
  google::rpc::PreconditionFailure failure;
  ASSERT_TRUE(DetailOf(refused, &failure));
  ASSERT_EQ(failure.violations_size(), 4) << "two backends, two modes";
  EXPECT_EQ(failure.violations(0).subject(), "spec");
  EXPECT_EQ(failure.violations(0).description(), "CAUSAL: cuda: kv_dtype f16 is not offered");
  EXPECT_THAT(failure.violations(1).description(), HasSubstr("cpu: the workers' device is cuda"));
  EXPECT_THAT(group_->commands(), ::testing::IsEmpty());
  EXPECT_EQ(service_->Topology().caches_size(), 0);
}

TEST_F(SelectionTest, AModeThatNoBackendOfTheCacheCoversIsRefusedWithReasons) {
  v1::CacheSpec spec = SmallSpec();
  spec.set_kv_dtype(v1::DTYPE_BF16);
  ASSERT_TRUE(CreateCache(service_->stub(), "m", spec).ok());
  ASSERT_TRUE(Open(service_->stub(), "m", 1).ok());
  const std::string before = service_->State();
  v1::AttendRequest request = AttendOf(spec, "m", 1, 0, 2);
  request.set_mode(v1::ATTEND_MODE_DFLASH);
  v1::AttendReply reply;
  const grpc::Status refused = Attend(service_->stub(), request, &reply);
  EXPECT_EQ(refused.error_code(), StatusCode::FAILED_PRECONDITION);
  google::rpc::PreconditionFailure failure;
  ASSERT_TRUE(DetailOf(refused, &failure));
  ASSERT_EQ(failure.violations_size(), 2);
  EXPECT_EQ(failure.violations(0).subject(), "mode DFLASH");
  EXPECT_EQ(failure.violations(0).description(), "cuda: mode DFLASH is not offered");
  EXPECT_THAT(failure.violations(1).description(), HasSubstr("cpu: the workers' device is cuda"));
  EXPECT_EQ(service_->State(), before);
}

TEST(Limits, AreToldWithWhatEachBackendServes) {
  TestService::Options options{.workers = 2, .max_calls_per_stream = 7};
  options.coordinator.max_message_bytes = 150'000;
  options.coordinator.max_sequences = 11;
  options.coordinator.client_limits = {.sequences = 5, .caches = 3};
  options.server.max_calls_per_client = 9;
  options.server.bytes_in_flight = {.per_caller = 1'000'000};
  TestService service(options);
  grpc::ClientContext context;
  v1::GetLimitsReply reply;
  ASSERT_TRUE(service.stub().GetLimits(&context, {}, &reply).ok());
  EXPECT_EQ(reply.max_message_bytes(), 150'000);
  EXPECT_EQ(reply.max_calls_per_stream(), 7);
  EXPECT_EQ(reply.max_sequences(), 11);
  EXPECT_EQ(reply.max_call_seconds(), 300);
  EXPECT_EQ(reply.per_client().sequences(), 5);
  EXPECT_EQ(reply.per_client().caches(), 3);
  EXPECT_EQ(reply.per_client().calls(), 9);
  EXPECT_EQ(reply.per_client().message_bytes(), 1'000'000);
  EXPECT_EQ(reply.per_client().pages(), 0);
  EXPECT_TRUE(reply.shared_memory());
  EXPECT_EQ(reply.ranks(), 2);
  EXPECT_EQ(reply.max_kv_heads(), 1024);
  EXPECT_EQ(reply.max_layers(), 1024);
  EXPECT_NE(reply.group_id(), 0u);
  EXPECT_EQ(reply.device(), "cpu");
  ASSERT_EQ(reply.backends_size(), 1) << "those of other devices serve nothing here";
  const v1::BackendLimits& cpu = reply.backends(0);
  EXPECT_EQ(cpu.name(), "cpu");
  EXPECT_EQ(cpu.modes_size(), 2);
  // A cache of every pair of dimensions and type that is told can be created.
  int caches = 0;
  for (const v1::HeadDimLimits& dims : cpu.head_dims()) {
    v1::CacheSpec spec = SmallSpec();
    spec.set_head_dim(dims.head_dim());
    spec.set_value_head_dim(dims.value_head_dim());
    spec.set_kv_dtype(static_cast<v1::DType>(cpu.kv_dtypes(caches++ % cpu.kv_dtypes_size())));
    spec.set_page_size(cpu.page_sizes(0));
    v1::DeleteCacheRequest request;
    request.set_cache_id("m");
    v1::DeleteCacheReply deleted;
    grpc::ClientContext deleting;
    const grpc::Status created = CreateCache(service.stub(), "m", spec);
    EXPECT_TRUE(created.ok()) << created.error_message();
    EXPECT_TRUE(service.stub().DeleteCache(&deleting, request, &deleted).ok());
  }
  EXPECT_GE(caches, 7);
}

TEST(Limits, F32OutputsAreAsPreciseAsTold) {
  TestService service({.workers = 2});
  v1::GetLimitsReply limits;
  grpc::ClientContext context;
  ASSERT_TRUE(service.stub().GetLimits(&context, {}, &limits).ok());
  const v1::BackendLimits& cpu = limits.backends(0);
  EXPECT_EQ(cpu.f32_output_errors_size(), limits.tensor_dtypes_size() * cpu.kv_dtypes_size());
  int caches = 0;
  for (const v1::OutputError& told : cpu.f32_output_errors()) {
    SCOPED_TRACE(told.ShortDebugString());
    v1::CacheSpec spec = SmallSpec();
    spec.set_kv_dtype(told.kv_dtype());
    const std::string cache = absl::StrCat("c", caches++);
    ASSERT_TRUE(CreateCache(service.stub(), cache, spec).ok());
    ModelHost host(&service.stub(), cache, spec, *FromProto(told.q_dtype()), /*seed=*/caches);
    host.Open(1);
    const auto check = [&](v1::AttendRequest request, double error) {
      request.mutable_output()->set_dtype(v1::DTYPE_F32);
      v1::AttendReply reply;
      const grpc::Status status = Attend(service.stub(), request, &reply);
      ASSERT_TRUE(status.ok()) << status.error_message();
      host.Check(request, reply, {.absolute = error});
    };
    check(host.MakeStep(0, {{1, 64}}), told.few_rows());
    check(host.MakeStep(0, {{1, 1}}), told.few_rows());
    check(host.MakeStep(0, {{1, 80}}), told.many_rows());
    check(host.MakeDraft(0, {{1, 16}}), told.many_rows());
  }
}

// ------------------------------------------------------------ DATA_LOSS, UNAVAILABLE and ABORTED

class BrokenGroupTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(CreateCache(service_.stub(), "m", spec_).ok());
    ASSERT_TRUE(Open(service_.stub(), "m", 1).ok());
    ASSERT_TRUE(Open(service_.stub(), "m", 2).ok());
    v1::AttendReply reply;
    ASSERT_TRUE(Attend(service_.stub(), AttendOf(spec_, "m", 1, 0, 20), &reply).ok());
  }

  const v1::CacheSpec spec_ = SmallSpec();
  FakeGroup* group_ = new FakeGroup(2);
  TestService service_{{}, std::unique_ptr<WorkerGroup>(group_)};
};

TEST_F(BrokenGroupTest, AStepThatBreaksIsAbortedChangesNothingAndMayBeRepeated) {
  const std::string before = service_.State();
  const v1::AttendRequest request = AttendOf(spec_, "m", 1, 20, 40);
  group_->Hold();
  std::thread breaker([&] {
    group_->WaitForHeld(1);
    group_->Break("rank 1 is gone");
  });
  v1::AttendReply reply;
  const grpc::Status aborted = Attend(service_.stub(), request, &reply);
  breaker.join();
  EXPECT_EQ(aborted.error_code(), StatusCode::ABORTED) << aborted.error_message();
  google::rpc::RetryInfo retry;
  EXPECT_TRUE(DetailOf(aborted, &retry));

  const grpc::Status forming = Attend(service_.stub(), request, &reply);
  EXPECT_EQ(forming.error_code(), StatusCode::UNAVAILABLE);
  EXPECT_TRUE(DetailOf(forming, &retry));
  EXPECT_EQ(retry.retry_delay().nanos(), 200'000'000);
  EXPECT_THAT(forming.error_message(), HasSubstr("rank 1 is gone"));
  EXPECT_EQ(Open(service_.stub(), "m", 9).error_code(), StatusCode::UNAVAILABLE);
  EXPECT_EQ(service_.Topology().state(), v1::GROUP_STATE_FORMING);

  group_->Release();
  group_->Form({false, false});
  service_.WaitReady();
  std::string after = service_.State();
  EXPECT_THAT(after, HasSubstr("epoch: 2"));
  after.replace(after.find("epoch: 2"), 8, "epoch: 1");
  EXPECT_EQ(after, before);
  ASSERT_TRUE(Attend(service_.stub(), request, &reply).ok());
  EXPECT_EQ(reply.lengths(0), 60);
  EXPECT_EQ(service_.Topology().statistics().steps_aborted(), 1u);
  EXPECT_EQ(service_.Topology().statistics().group_formations(), 2u);
}

TEST_F(BrokenGroupTest, DataLossNamesAllLostSequencesOfTheCall) {
  v1::AttendReply reply;
  ASSERT_TRUE(Open(service_.stub(), "m", 3).ok());
  ASSERT_TRUE(Attend(service_.stub(), AttendOf(spec_, "m", 3, 0, 20), &reply).ok());
  group_->Break("rank 1 is gone");
  service_.WaitNotReady();
  group_->Form({false, true});
  service_.WaitReady();
  v1::AttendRequest request = AttendOf(spec_, "m", 2, 0, 3);
  request.mutable_entries(0)->set_query_rows(1);
  request.mutable_entries(0)->set_new_tokens(1);
  for (const uint64_t id : {1, 3}) {
    *request.add_entries() = request.entries(0);
    request.mutable_entries()->rbegin()->set_sequence_id(id);
    request.mutable_entries()->rbegin()->set_first_position(20);
  }
  const grpc::Status lost = Attend(service_.stub(), request, &reply);
  EXPECT_EQ(lost.error_code(), StatusCode::DATA_LOSS);
  EXPECT_EQ(FieldOf(lost), "entries[1].sequence_id");
  google::rpc::ErrorInfo info;
  ASSERT_TRUE(DetailOf(lost, &info));
  EXPECT_EQ(info.metadata().at("sequence"), "1");
  EXPECT_EQ(info.metadata().at("sequences"), "1,3");
  EXPECT_EQ(info.metadata().at("count"), "2");
  EXPECT_EQ(info.metadata().at("missing"), "16-19") << "of the first: what rank 1 had";
  // An Append may bring those: it is told where to begin.
  v1::AppendReply appended;
  const grpc::Status beyond = Append(service_.stub(), AppendOf(spec_, "m", 1, 20, 1), &appended);
  EXPECT_EQ(beyond.error_code(), StatusCode::DATA_LOSS);
  EXPECT_EQ(FieldOf(beyond), "entries[0].first_position");
}

TEST_F(BrokenGroupTest, AfterALostRankItsSequencesSayDataLossUntilOpenedAgain) {
  group_->Break("rank 1 is gone");
  service_.WaitNotReady();
  group_->Form({false, true});  // 20 tokens of 16 a turn: rank 1 had four of them
  service_.WaitReady();
  v1::AttendReply reply;
  v1::AppendReply appended;
  const std::string before = service_.State();
  const grpc::Status lost = Attend(service_.stub(), AttendOf(spec_, "m", 1, 20, 1), &reply);
  EXPECT_EQ(lost.error_code(), StatusCode::DATA_LOSS);
  EXPECT_EQ(FieldOf(lost), "entries[0].sequence_id");
  EXPECT_EQ(Append(service_.stub(), AppendOf(spec_, "m", 1, 20, 1), &appended).error_code(),
            StatusCode::DATA_LOSS);
  EXPECT_EQ(service_.State(), before);
  EXPECT_EQ(service_.Topology().caches(0).sequences_lost(), 1);
  EXPECT_EQ(service_.Topology().caches(0).pages_used(), 1) << "what rank 0 has is kept";
  EXPECT_TRUE(Attend(service_.stub(), AttendOf(spec_, "m", 2, 0, 1), &reply).ok());
  ASSERT_TRUE(Open(service_.stub(), "m", 1).ok());
  EXPECT_TRUE(Attend(service_.stub(), AttendOf(spec_, "m", 1, 0, 20), &reply).ok());
}

TEST_F(BrokenGroupTest, ANewGroupIsToldCachesAndTablesBeforeItServes) {
  v1::AttendReply reply;
  ASSERT_TRUE(Attend(service_.stub(), AttendOf(spec_, "m", 2, 0, 5), &reply).ok());
  const size_t before = group_->commands().size();
  group_->Break("x");
  group_->Form({false, true});
  service_.WaitReady();
  const auto commands = group_->commands();
  ASSERT_EQ(commands.size(), before + 2);
  EXPECT_EQ(commands[before]->epoch, 2u);
  EXPECT_TRUE(std::holds_alternative<worker::CreateCacheCommand>(commands[before]->body));
  const auto* tables = std::get_if<worker::SetTablesCommand>(&commands[before + 1]->body);
  ASSERT_NE(tables, nullptr);
  std::map<worker::SequenceId, size_t> pages;
  for (const worker::PageUpdate& table : tables->tables) {
    pages[table.sequence] = table.pages.size();
  }
  const std::map<worker::SequenceId, size_t> all = {{1, 1}, {2, 1}};
  EXPECT_EQ(pages, all) << "of sequence 1 what rank 0 has is left, 2 lies there";
}

// ----------------------------------------------------------------- sequences, pages, the topology

TEST_F(ApiTest, ManyChangesOfSequencesInOneCall) {
  v1::UpdateSequencesRequest request;
  request.set_cache_id("m");
  v1::SequenceFork* fork = request.add_updates()->mutable_fork();
  fork->set_parent_id(1);
  fork->set_sequence_id(7);
  request.add_updates()->mutable_truncate()->set_sequence_id(7);
  request.mutable_updates(1)->mutable_truncate()->set_length(5);
  request.add_updates()->set_open(8);
  request.add_updates()->set_close(1);
  v1::UpdateSequencesReply reply;
  const auto update = [&] {
    return Call(&v1::AttentionService::Stub::UpdateSequences, request, &reply).error_code();
  };
  ASSERT_EQ(update(), grpc::StatusCode::OK);
  ASSERT_EQ(reply.states_size(), 4);
  EXPECT_EQ(reply.states(0).length(), 10);
  EXPECT_EQ(reply.states(1).length(), 5);
  EXPECT_EQ(reply.states(2).sequence_id(), 8u);
  v1::AttendReply attended;
  ASSERT_TRUE(Attend(stub(), AttendOf(spec_, "m", 7, 5, 5), &attended).ok());
  // 1 is gone, so nothing of the call happens again.
  EXPECT_EQ(update(), grpc::StatusCode::NOT_FOUND);
  request.clear_updates();
  EXPECT_EQ(update(), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(ApiTest, PagesAreAccountedForThroughForkWriteTruncateAndClose) {
  const auto cache = [&] { return service_.Topology().caches(0); };
  EXPECT_EQ(cache().pages_used(), 1);
  v1::AttendReply reply;
  ASSERT_TRUE(Attend(stub(), AttendOf(spec_, "m", 1, 20, 100), &reply).ok());
  ASSERT_TRUE(Attend(stub(), AttendOf(spec_, "m", 1, 10, 110, 1), &reply).ok());
  EXPECT_EQ(cache().pages_used(), 2);
  v1::ForkSequenceReply forked;
  ASSERT_TRUE(Fork(1, 3, -2, &forked).ok());
  EXPECT_EQ(forked.length(), 120);
  EXPECT_EQ(cache().pages_used(), 2);
  EXPECT_EQ(cache().pages_shared(), 2);
  EXPECT_EQ(cache().sequences(), 3);
  ASSERT_TRUE(Attend(stub(), AttendOf(spec_, "m", 3, 120, 1), &reply).ok());
  EXPECT_EQ(cache().pages_used(), 3);
  EXPECT_EQ(cache().pages_shared(), 1);
  v1::TruncateSequenceReply truncated;
  ASSERT_TRUE(Truncate(3, 30, &truncated).ok());
  EXPECT_EQ(truncated.length(), 30);
  EXPECT_EQ(cache().pages_used(), 2);
  ASSERT_TRUE(Close(1).ok());
  EXPECT_EQ(cache().pages_used(), 1);
  EXPECT_EQ(cache().pages_shared(), 0);
  ASSERT_TRUE(Close(3).ok());
  EXPECT_EQ(cache().pages_used(), 0);
  EXPECT_EQ(cache().sequences(), 1);
}

TEST_F(ApiTest, TheTopologySaysWhoHoldsWhat) {
  const v1::GetTopologyReply topology = service_.Topology();
  EXPECT_EQ(topology.epoch(), 1u);
  EXPECT_EQ(topology.state(), v1::GROUP_STATE_READY);
  EXPECT_FALSE(topology.version().empty());
  ASSERT_EQ(topology.workers_size(), 4);
  int64_t tokens = 0;
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(topology.workers(rank).rank(), rank);
    EXPECT_EQ(topology.workers(rank).address(), "embedded");
    EXPECT_EQ(topology.workers(rank).backend(), "cpu");
    EXPECT_TRUE(topology.workers(rank).connected());
    EXPECT_GT(topology.workers(rank).memory_bytes(), 0u);
    tokens += topology.workers(rank).tokens();
  }
  EXPECT_EQ(tokens, 10) << "the least over layers";
  ASSERT_EQ(topology.caches_size(), 1);
  const v1::CacheInfo& cache = topology.caches(0);
  EXPECT_EQ(cache.cache_id(), "m");
  EXPECT_EQ(cache.pages_total(), 64);
  ASSERT_EQ(cache.sequence_size(), 2);
  EXPECT_EQ(cache.sequence(0).sequence_id(), 1u);
  EXPECT_EQ(cache.sequence(0).length(), 10);
  EXPECT_EQ(cache.sequence(0).pages(), 1);
  EXPECT_EQ(cache.sequence(0).local_lengths(0), 10);
  EXPECT_EQ(cache.sequence(0).local_lengths(1), 0);
  EXPECT_EQ(topology.statistics().requests(), 3u);
  EXPECT_EQ(topology.statistics().steps(), 3u);
  EXPECT_EQ(topology.statistics().query_rows(), 40u);
  EXPECT_EQ(topology.statistics().tokens_appended(), 30u);
  EXPECT_EQ(topology.statistics().group_formations(), 1u);
}

TEST_F(ApiTest, ADeletedCacheIsGoneAndItsNameFree) {
  v1::DeleteCacheRequest request;
  request.set_cache_id("m");
  v1::DeleteCacheReply reply;
  ASSERT_TRUE(Call(&v1::AttentionService::Stub::DeleteCache, request, &reply).ok());
  v1::AttendReply attended;
  EXPECT_EQ(Attend(stub(), Good(), &attended).error_code(), StatusCode::NOT_FOUND);
  EXPECT_EQ(service_.Topology().caches_size(), 0);
  EXPECT_EQ(service_.Topology().workers(0).memory_bytes(), 0u);
  v1::CacheSpec other = spec_;
  other.set_layers(1);
  EXPECT_TRUE(CreateCache(stub(), "m", other).ok());
}

TEST_F(ApiTest, ServiceChosenIdsAreNew) {
  v1::OpenSequenceRequest request;
  request.set_cache_id("m");
  v1::OpenSequenceReply a, b;
  ASSERT_TRUE(Call(&v1::AttentionService::Stub::OpenSequence, request, &a).ok());
  ASSERT_TRUE(Call(&v1::AttentionService::Stub::OpenSequence, request, &b).ok());
  EXPECT_NE(a.sequence_id(), 0u);
  EXPECT_NE(a.sequence_id(), b.sequence_id());
  v1::ForkSequenceReply forked;
  ASSERT_TRUE(Fork(1, 0, 4, &forked).ok());
  EXPECT_NE(forked.sequence_id(), 0u);
  EXPECT_EQ(forked.length(), 4);
}

}  // namespace
}  // namespace tributary::service::testing
