#include "tests/service/model_host.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <span>

#include "kernels/cpu/backend.h"
#include "service/data/resolve_spec.h"
#include "tests/service/test_service.h"
#include "tests/support/compare.h"
#include "worker/choose_path.h"

namespace tributary::service::testing {
namespace {

using worker::testing::DenseLayer;

// Attention with queries of `dtype`, and an output of size o that was rounded to it once, by at
// most half the distance of neighbours at o.
test::Tolerance OutputTolerance(DType dtype) {
  test::Tolerance tolerance = test::AttentionTolerance(dtype);
  if (dtype == DType::kBf16) tolerance.relative += 0x1p-8;
  if (dtype == DType::kF16) tolerance.relative += 0x1p-11;
  return tolerance;
}

template <typename Call>
void ExpectOk(const char* what, Call call) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(120));
  const grpc::Status status = call(&context);
  EXPECT_TRUE(status.ok()) << what << ": " << status.error_code() << " " << status.error_message();
}

}  // namespace

ModelHost::ModelHost(v1::AttentionService::Stub* stub, std::string cache, const v1::CacheSpec& spec,
                     DType dtype, uint64_t seed)
    : stub_(stub),
      cache_(std::move(cache)),
      spec_(ResolveSpec(spec, 1)->spec),
      dtype_(dtype),
      random_(seed) {}

DenseLayer& ModelHost::Layer(uint64_t sequence, int32_t layer) {
  return layers_[{sequence, layer}];
}

int64_t ModelHost::length(uint64_t sequence, int32_t layer) const {
  const auto it = layers_.find({sequence, layer});
  if (it == layers_.end()) return 0;
  return LengthOfDense(spec_, spec_.layers[layer], it->second);
}

std::vector<float> ModelHost::Values(size_t count) {
  const std::vector<float> exact = RandomValues(count, random_());
  return ValuesOf(InlineTensor(dtype_, {static_cast<int64_t>(count)}, exact));
}

void ModelHost::Open(uint64_t sequence) {
  const grpc::Status status = testing::Open(*stub_, cache_, sequence);
  EXPECT_TRUE(status.ok()) << status.error_message();
}

void ModelHost::Fork(uint64_t parent, uint64_t child, int64_t length) {
  v1::ForkSequenceRequest request;
  request.set_cache_id(cache_);
  request.set_parent_id(parent);
  request.set_sequence_id(child);
  request.set_length(length);
  v1::ForkSequenceReply reply;
  ExpectOk("fork", [&](auto* c) { return stub_->ForkSequence(c, request, &reply); });
  EXPECT_EQ(reply.length(), length);
  for (size_t layer = 0; layer < spec_.layers.size(); ++layer) {
    DenseLayer copy = Layer(parent, layer);
    TruncateDense(spec_, spec_.layers[layer], length, &copy);
    Layer(child, layer) = std::move(copy);
  }
}

void ModelHost::Truncate(uint64_t sequence, int64_t length) {
  v1::TruncateSequenceRequest request;
  request.set_cache_id(cache_);
  request.set_sequence_id(sequence);
  request.set_length(length);
  v1::TruncateSequenceReply reply;
  ExpectOk("truncate", [&](auto* c) { return stub_->TruncateSequence(c, request, &reply); });
  for (size_t layer = 0; layer < spec_.layers.size(); ++layer) {
    if (this->length(sequence, layer) > length) {
      TruncateDense(spec_, spec_.layers[layer], length, &Layer(sequence, layer));
    }
  }
}

void ModelHost::Close(uint64_t sequence) {
  v1::CloseSequenceRequest request;
  request.set_cache_id(cache_);
  request.set_sequence_id(sequence);
  v1::CloseSequenceReply reply;
  ExpectOk("close", [&](auto* c) { return stub_->CloseSequence(c, request, &reply); });
  for (size_t layer = 0; layer < spec_.layers.size(); ++layer) {
    layers_.erase({sequence, static_cast<int32_t>(layer)});
  }
}

v1::AttendRequest ModelHost::NewRequest(int32_t layer, v1::AttendMode mode) const {
  v1::AttendRequest request;
  request.set_cache_id(cache_);
  request.set_layer(layer);
  request.set_mode(mode);
  request.set_return_lse(true);
  return request;
}

void ModelHost::Fill(int64_t rows, const std::vector<float>& k, const std::vector<float>& v,
                     v1::AttendRequest* request) {
  const worker::LayerGeometry g = Geometry(request->layer());
  *request->mutable_q() = InlineTensor(dtype_, {rows, g.q_heads, g.kv.key_dim},
                                       Values(rows * g.q_heads * g.kv.key_dim));
  *request->mutable_k() = InlineTensor(dtype_, {rows, g.kv.kv_heads, g.kv.key_dim}, k);
  *request->mutable_v() = InlineTensor(dtype_, {rows, g.kv.kv_heads, g.kv.value_dim}, v);
}

v1::AttendRequest ModelHost::MakeDraft(int32_t layer,
                                       const std::vector<std::pair<uint64_t, int32_t>>& entries,
                                       int64_t context) {
  v1::AttendRequest request = NewRequest(layer, v1::ATTEND_MODE_DFLASH);
  int64_t rows = 0;
  for (const auto& [sequence, block] : entries) {
    v1::AttendEntry* entry = request.add_entries();
    entry->set_sequence_id(sequence);
    entry->set_first_position(context < 0 ? length(sequence, layer) : context);
    entry->set_query_rows(block);
    entry->set_new_tokens(block);
    rows += block;
  }
  const KvGeometry g = Geometry(layer).kv;
  const std::vector<float> k = Values(rows * g.kv_heads * g.key_dim);
  Fill(rows, k, Values(rows * g.kv_heads * g.value_dim), &request);
  return request;
}

DenseLayer ModelHost::WithBlock(const v1::AttendRequest& request, int entry, int64_t token) {
  const v1::AttendEntry& of = request.entries(entry);
  DenseLayer dense = Layer(of.sequence_id(), request.layer());
  const worker::LayerSpec& layer = spec_.layers[request.layer()];
  TruncateDense(spec_, layer, of.first_position(), &dense);
  const KvGeometry g = Geometry(request.layer()).kv;
  const int64_t k_token = g.kv_heads * g.key_dim;
  const int64_t v_token = g.kv_heads * g.value_dim;
  const std::vector<float> k = ValuesOf(request.k()), v = ValuesOf(request.v());
  AppendDense(spec_, layer, std::span(k).subspan(token * k_token, of.new_tokens() * k_token),
              std::span(v).subspan(token * v_token, of.new_tokens() * v_token), &dense);
  return dense;
}

v1::AttendRequest ModelHost::MakeStep(int32_t layer,
                                      const std::vector<std::pair<uint64_t, int32_t>>& entries) {
  v1::AttendRequest request = NewRequest(layer, v1::ATTEND_MODE_CAUSAL);
  std::vector<float> k, v;
  int64_t rows = 0;
  for (const auto& [sequence, tokens] : entries) {
    v1::AttendEntry* entry = request.add_entries();
    entry->set_sequence_id(sequence);
    entry->set_first_position(length(sequence, layer));
    entry->set_query_rows(tokens);
    entry->set_new_tokens(tokens);
    const KvGeometry g = Geometry(layer).kv;
    const size_t heads = static_cast<size_t>(tokens) * g.kv_heads;
    const std::vector<float> new_k = Values(heads * g.key_dim);
    const std::vector<float> new_v = Values(heads * g.value_dim);
    AppendDense(spec_, spec_.layers[layer], new_k, new_v, &Layer(sequence, layer));
    k.insert(k.end(), new_k.begin(), new_k.end());
    v.insert(v.end(), new_v.begin(), new_v.end());
    rows += tokens;
  }
  Fill(rows, k, v, &request);
  return request;
}

void ModelHost::Check(const v1::AttendRequest& request, const v1::AttendReply& reply) {
  Check(request, reply, OutputTolerance(dtype_));
}

void ModelHost::Check(const v1::AttendRequest& request, const v1::AttendReply& reply,
                      const test::Tolerance& output) {
  ASSERT_EQ(reply.lengths_size(), request.entries_size());
  const worker::LayerSpec& layer = spec_.layers[request.layer()];
  const worker::LayerGeometry g = Geometry(request.layer());
  const std::vector<float> q = ValuesOf(request.q());
  const bool draft = request.mode() == v1::ATTEND_MODE_DFLASH;
  std::vector<double> o, lse;
  int64_t token = 0;
  for (int i = 0; i < request.entries_size(); ++i) {
    const auto& entry = request.entries(i);
    const bool given =
        draft || worker::SeesTokensAsTheyCame(entry.query_rows(), entry.new_tokens());
    const DenseLayer dense =
        draft ? WithBlock(request, i, token) : Layer(entry.sequence_id(), request.layer());
    token += entry.new_tokens();
    if (draft) {
      EXPECT_EQ(reply.lengths(i), length(entry.sequence_id(), request.layer()));
    } else if (entry.new_tokens() > 0) {
      EXPECT_EQ(reply.lengths(i), entry.first_position() + entry.new_tokens());
    }
    for (int32_t row = 0; row < entry.query_rows(); ++row) {
      const size_t at = lse.size() / g.q_heads;
      o.resize(o.size() + g.q_heads * g.kv.value_dim);
      lse.resize(lse.size() + g.q_heads);
      DenseAttention(
          spec_, layer, dense,
          {.q = q.data() + at * g.q_heads * g.kv.key_dim,
           .position = entry.first_position() + row,
           .given_from = given && entry.new_tokens() > 0 ? entry.first_position() : INT64_MAX,
           .anchor = draft ? entry.first_position() : -1},
          o.data() + at * g.q_heads * g.kv.value_dim, lse.data() + at * g.q_heads);
    }
  }
  const int64_t rows = static_cast<int64_t>(lse.size()) / g.q_heads;
  EXPECT_TRUE(
      test::AllClose(ValuesOf(reply.output()), o, output, {rows, g.q_heads, g.kv.value_dim}))
      << "output of layer " << request.layer();
  EXPECT_TRUE(
      test::AllClose(ValuesOf(reply.lse()), lse, test::kAttentionTolerance, {rows, g.q_heads}))
      << "lse of layer " << request.layer();
}

void ModelHost::Send(const v1::AttendRequest& request) {
  v1::AttendReply reply;
  const grpc::Status status = testing::Attend(*stub_, request, &reply);
  ASSERT_TRUE(status.ok()) << status.error_code() << " " << status.error_message();
  Check(request, reply);
  last_request_ = request;
  last_reply_ = reply;
}

void ModelHost::Step(int32_t layer, const std::vector<std::pair<uint64_t, int32_t>>& entries) {
  Send(MakeStep(layer, entries));
}

void ModelHost::Draft(int32_t layer, const std::vector<std::pair<uint64_t, int32_t>>& entries,
                      int64_t context) {
  Send(MakeDraft(layer, entries, context));
}

void ModelHost::Append(int32_t layer, uint64_t sequence, int32_t tokens) {
  const v1::AttendRequest step = MakeStep(layer, {{sequence, tokens}});
  v1::AppendRequest request;
  request.set_cache_id(cache_);
  request.set_layer(layer);
  v1::AppendEntry* entry = request.add_entries();
  entry->set_sequence_id(sequence);
  entry->set_first_position(step.entries(0).first_position());
  entry->set_tokens(tokens);
  *request.mutable_k() = step.k();
  *request.mutable_v() = step.v();
  v1::AppendReply reply;
  const grpc::Status status = testing::Append(*stub_, request, &reply);
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_EQ(reply.lengths_size(), 1);
  EXPECT_EQ(reply.lengths(0), length(sequence, layer));
}

void ModelHost::LookBack(int32_t layer, uint64_t sequence, int32_t rows) {
  v1::AttendRequest request = NewRequest(layer, v1::ATTEND_MODE_CAUSAL);
  v1::AttendEntry* entry = request.add_entries();
  entry->set_sequence_id(sequence);
  entry->set_first_position(length(sequence, layer) - rows);
  entry->set_query_rows(rows);
  const worker::LayerGeometry g = Geometry(layer);
  *request.mutable_q() = InlineTensor(dtype_, {rows, g.q_heads, g.kv.key_dim},
                                      Values(rows * g.q_heads * g.kv.key_dim));
  Send(request);
}

void ModelHost::RepeatLastStep() {
  v1::AttendReply reply;
  const grpc::Status status = testing::Attend(*stub_, last_request_, &reply);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(reply.SerializeAsString(), last_reply_.SerializeAsString());
}

}  // namespace tributary::service::testing
