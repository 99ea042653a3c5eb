#include "tests/fault/load.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "base/status/rpc_errors.h"
#include "google/rpc/error_details.pb.h"
#include "kernels/element.h"
#include "tests/support/compare.h"

namespace tributary::test {
namespace {

constexpr int32_t kQHeads = 8;
constexpr int32_t kKvHeads = 2;
constexpr int32_t kHeadDim = 64;
constexpr int32_t kPageSize = 16;
constexpr int64_t kCapacityTokens = 8'192;

constexpr std::chrono::seconds kCallDeadline{20};
// Beyond the deadline: a busy machine.
constexpr std::chrono::seconds kGrace{1};

void FillTensor(const std::vector<float>& values, int64_t rows, int64_t heads, v1::Tensor* out) {
  out->set_dtype(v1::DTYPE_F32);
  for (const int64_t extent : {rows, heads, int64_t{kHeadDim}}) out->add_shape(extent);
  out->mutable_inline_()->assign(reinterpret_cast<const char*>(values.data()),
                                 values.size() * sizeof(float));
}

std::vector<float> FloatsOf(const v1::Tensor& tensor) {
  std::vector<float> values(tensor.inline_().size() / sizeof(float));
  std::memcpy(values.data(), tensor.inline_().data(), values.size() * sizeof(float));
  return values;
}

// Runs a call under a deadline, and fails the test when it does not keep it.
template <typename Call>
grpc::Status WithDeadline(Call call) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kCallDeadline);
  const auto begin = std::chrono::steady_clock::now();
  const grpc::Status status = call(&context);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kCallDeadline + kGrace);
  return status;
}

}  // namespace

v1::CacheSpec PublicSpec() {
  v1::CacheSpec spec;
  spec.set_layers(1);
  spec.set_q_heads(kQHeads);
  spec.set_kv_heads(kKvHeads);
  spec.set_head_dim(kHeadDim);
  spec.set_page_size(kPageSize);
  spec.set_kv_dtype(v1::DTYPE_BF16);
  spec.set_capacity_tokens(kCapacityTokens);
  return spec;
}

worker::CacheSpec ModelSpec() {
  worker::CacheSpec spec;
  spec.q_heads = kQHeads;
  spec.kv_heads = kKvHeads;
  spec.head_dim = kHeadDim;
  spec.page_size = kPageSize;
  spec.interleave = kPageSize;
  spec.kv_dtype = DType::kBf16;
  spec.sm_scale = 1.0f / std::sqrt(static_cast<float>(kHeadDim));
  spec.layers.resize(1);
  return spec;
}

std::shared_ptr<v1::AttentionService::Stub> ConnectTo(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
  // Despite its name: how long an attempt to connect may take.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 5'000);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 200);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return v1::AttentionService::NewStub(
      grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments));
}

std::string FieldOf(const grpc::Status& status) {
  google::rpc::Status details;
  details.ParseFromString(status.error_details());
  for (const google::protobuf::Any& detail : details.details()) {
    google::rpc::BadRequest request;
    if (detail.UnpackTo(&request) && request.field_violations_size() > 0) {
      return request.field_violations(0).field();
    }
  }
  return "";
}

SequenceHost::SequenceHost(std::shared_ptr<v1::AttentionService::Stub> stub, uint64_t sequence_id,
                           const Tolerance& tolerance)
    : stub_(std::move(stub)), id_(sequence_id), tolerance_(tolerance), random_(sequence_id) {}

grpc::Status SequenceHost::Open() {
  v1::OpenSequenceRequest request;
  request.set_cache_id(kCacheId);
  request.set_sequence_id(id_);
  v1::OpenSequenceReply reply;
  return WithDeadline(
      [&](grpc::ClientContext* c) { return stub_->OpenSequence(c, request, &reply); });
}

grpc::Status SequenceHost::Truncate(int64_t length) {
  v1::TruncateSequenceRequest request;
  request.set_cache_id(kCacheId);
  request.set_sequence_id(id_);
  request.set_length(length);
  v1::TruncateSequenceReply reply;
  const grpc::Status status = WithDeadline(
      [&](grpc::ClientContext* c) { return stub_->TruncateSequence(c, request, &reply); });
  if (!status.ok()) return status;
  EXPECT_EQ(reply.length(), std::min(length, length_));
  length_ = std::min(length, length_);
  unsettled_.reset();
  worker::testing::TruncateDense(spec_, spec_.layers[0], length_, &dense_);
  return status;
}

grpc::Status SequenceHost::Fork(SequenceHost* child, int64_t length) {
  v1::ForkSequenceRequest request;
  request.set_cache_id(kCacheId);
  request.set_parent_id(id_);
  request.set_sequence_id(child->id_);
  request.set_length(length);
  v1::ForkSequenceReply reply;
  const grpc::Status status =
      WithDeadline([&](grpc::ClientContext* c) { return stub_->ForkSequence(c, request, &reply); });
  if (!status.ok()) return status;
  EXPECT_EQ(reply.length(), length);
  child->Forget();
  child->dense_ = dense_;
  child->length_ = length;
  worker::testing::TruncateDense(spec_, spec_.layers[0], length, &child->dense_);
  return status;
}

grpc::Status SequenceHost::Close() {
  v1::CloseSequenceRequest request;
  request.set_cache_id(kCacheId);
  request.set_sequence_id(id_);
  v1::CloseSequenceReply reply;
  return WithDeadline(
      [&](grpc::ClientContext* c) { return stub_->CloseSequence(c, request, &reply); });
}

grpc::Status SequenceHost::Step(int tokens) {
  if (!unsettled_.has_value()) {
    const auto count = static_cast<size_t>(tokens);
    Rows rows{.first = length_, .count = tokens};
    rows.q = RandomValues(count * kQHeads * kHeadDim);
    rows.k = RandomValues(count * kKvHeads * kHeadDim);
    rows.v = RandomValues(count * kKvHeads * kHeadDim);
    worker::testing::AppendDense(spec_, spec_.layers[0], rows.k, rows.v, &dense_);
    unsettled_ = std::move(rows);
  }
  const grpc::Status status = Attend(*unsettled_);
  if (status.ok()) {
    length_ += unsettled_->count;
    unsettled_.reset();
  }
  return status;
}

grpc::Status SequenceHost::Look(int rows) {
  Rows look{.first = length_ - rows, .count = rows};
  look.q = RandomValues(static_cast<size_t>(rows) * kQHeads * kHeadDim);
  return Attend(look);
}

grpc::Status SequenceHost::BringBack(const grpc::Status& lost, int64_t* brought) {
  google::rpc::Status details;
  details.ParseFromString(lost.error_details());
  const auto missing = MissingTokensOf(FromRpcStatus(details));
  if (!missing.has_value()) return lost;
  v1::AppendRequest request;
  request.set_cache_id(kCacheId);
  request.set_layer(missing->layer);
  std::vector<float> k, v;
  int64_t tokens = 0;
  for (const PositionRange& range : missing->ranges) {
    v1::AppendEntry* entry = request.add_entries();
    entry->set_sequence_id(id_);
    entry->set_first_position(range.begin);
    entry->set_tokens(static_cast<int32_t>(range.end - range.begin));
    tokens += range.end - range.begin;
    constexpr int64_t kToken = kKvHeads * kHeadDim;
    k.insert(k.end(), dense_.k.begin() + range.begin * kToken,
             dense_.k.begin() + range.end * kToken);
    v.insert(v.end(), dense_.v.begin() + range.begin * kToken,
             dense_.v.begin() + range.end * kToken);
  }
  FillTensor(k, tokens, kKvHeads, request.mutable_k());
  FillTensor(v, tokens, kKvHeads, request.mutable_v());
  v1::AppendReply reply;
  const grpc::Status status =
      WithDeadline([&](grpc::ClientContext* c) { return stub_->Append(c, request, &reply); });
  if (status.ok()) *brought += tokens;
  return status;
}

void SequenceHost::Forget() {
  length_ = 0;
  dense_ = {};
  unsettled_.reset();
}

grpc::Status SequenceHost::Attend(const Rows& rows) {
  v1::AttendRequest request;
  request.set_cache_id(kCacheId);
  request.set_mode(v1::ATTEND_MODE_CAUSAL);
  request.set_return_lse(true);
  v1::AttendEntry* entry = request.add_entries();
  entry->set_sequence_id(id_);
  entry->set_first_position(rows.first);
  entry->set_query_rows(rows.count);
  FillTensor(rows.q, rows.count, kQHeads, request.mutable_q());
  if (!rows.k.empty()) {
    entry->set_new_tokens(rows.count);
    FillTensor(rows.k, rows.count, kKvHeads, request.mutable_k());
    FillTensor(rows.v, rows.count, kKvHeads, request.mutable_v());
  }
  v1::AttendReply reply;
  const auto begin = std::chrono::steady_clock::now();
  const grpc::Status status =
      WithDeadline([&](grpc::ClientContext* c) { return stub_->Attend(c, request, &reply); });
  last_call_ = std::chrono::steady_clock::now() - begin;
  if (status.ok()) Check(rows, reply);
  return status;
}

void SequenceHost::Check(const Rows& rows, const v1::AttendReply& reply) const {
  const std::vector<float> output = FloatsOf(reply.output());
  const std::vector<float> lse = FloatsOf(reply.lse());
  constexpr size_t kRow = size_t{kQHeads} * kHeadDim;
  ASSERT_EQ(output.size(), static_cast<size_t>(rows.count) * kRow);
  ASSERT_EQ(lse.size(), static_cast<size_t>(rows.count) * kQHeads);
  std::vector<double> want_o(kRow), want_lse(kQHeads);
  for (int32_t i = 0; i < rows.count; ++i) {
    const worker::testing::DenseRow row = {.q = rows.q.data() + static_cast<size_t>(i) * kRow,
                                           .position = rows.first + i,
                                           .given_from = rows.first};
    worker::testing::DenseAttention(spec_, spec_.layers[0], dense_, row, want_o.data(),
                                    want_lse.data());
    const auto at = static_cast<size_t>(i);
    EXPECT_TRUE(AllClose(std::span(output).subspan(at * kRow, kRow), want_o, tolerance_,
                         {kQHeads, kHeadDim}))
        << "output of sequence " << id_ << " at position " << row.position;
    EXPECT_TRUE(
        AllClose(std::span(lse).subspan(at * kQHeads, kQHeads), want_lse, tolerance_, {kQHeads}))
        << "lse of sequence " << id_ << " at position " << row.position;
  }
}

// Values that bf16 holds exactly.
std::vector<float> SequenceHost::RandomValues(size_t count) {
  std::normal_distribution<float> normal(0.0f, 1.0f);
  std::vector<float> values(count);
  for (float& value : values) {
    unsigned char stored[4] = {};
    StoreElement(DType::kBf16, stored, 0, normal(random_));
    value = LoadElement(DType::kBf16, stored, 0);
  }
  return values;
}

}  // namespace tributary::test
