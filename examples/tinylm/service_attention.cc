#include "examples/tinylm/service_attention.h"

#include <utility>

#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "worker/rpc/dtype_conversion.h"

namespace tributary::tinylm {
namespace {

v1::CacheSpec SpecOf(const ModelConfig& config, const ServiceCacheOptions& options) {
  v1::CacheSpec spec;
  spec.set_layers(config.layers);
  spec.set_q_heads(config.q_heads);
  spec.set_kv_heads(config.kv_heads);
  spec.set_head_dim(config.head_dim);
  spec.set_kv_dtype(ToProto(options.kv_dtype));
  spec.set_capacity_tokens(options.capacity_tokens);
  spec.add_modes(options.mode);
  // One element where all layers are alike, else one per layer.
  std::vector<LayerScales> scales = options.scales;
  if (scales.empty()) scales.resize(1);
  for (const LayerScales& of_layer : scales) {
    v1::LayerSpec* layer = spec.add_layer_specs();
    layer->mutable_k_scale()->Assign(of_layer.k.begin(), of_layer.k.end());
    layer->mutable_v_scale()->Assign(of_layer.v.begin(), of_layer.v.end());
    if (options.window_left >= 0) layer->mutable_window()->set_left(options.window_left);
  }
  return spec;
}

// One sequence, one row per token.
client::AttendCall CallOf(const ServiceCache& cache, uint64_t sequence, int32_t layer,
                          int64_t first_position, const Matrix& q, const Matrix& k, const Matrix& v,
                          Matrix& out) {
  const int32_t rows = static_cast<int32_t>(q.rows());
  client::AttendCall call;
  call.cache_id = cache.id();
  call.layer = layer;
  call.entries = {{.sequence_id = sequence,
                   .first_position = first_position,
                   .query_rows = rows,
                   .new_tokens = rows}};
  call.dtype = v1::DTYPE_F32;
  call.q = q.data();
  call.k = k.data();
  call.v = v.data();
  call.q_heads = cache.config().q_heads;
  call.kv_heads = cache.config().kv_heads;
  call.head_dim = cache.config().head_dim;
  call.output = out.data();
  return call;
}

}  // namespace

ServiceCache::ServiceCache(client::Client* client, const ModelConfig& config, std::string id,
                           int32_t ranks, std::string backend)
    : client_(client),
      config_(config),
      id_(std::move(id)),
      ranks_(ranks),
      backend_(std::move(backend)) {}

absl::StatusOr<std::unique_ptr<ServiceCache>> ServiceCache::Create(
    client::Client* client, const ModelConfig& config, const ServiceCacheOptions& options) {
  absl::BitGen dice;
  std::string id = absl::StrCat("tinylm-", Name(options.kv_dtype), "-",
                                absl::Hex(absl::Uniform<uint64_t>(dice)));
  const absl::StatusOr<v1::CreateCacheReply> reply =
      client->CreateCache(id, SpecOf(config, options));
  if (!reply.ok()) return reply.status();
  return std::unique_ptr<ServiceCache>(
      new ServiceCache(client, config, std::move(id), reply->ranks(), reply->backend()));
}

// Nobody is left to tell of a failure; a service that is gone has freed the cache too.
ServiceCache::~ServiceCache() { client_->DeleteCache(id_).IgnoreError(); }

ServiceAttention::ServiceAttention(const ServiceCache* cache, uint64_t sequence)
    : cache_(cache), sequence_(sequence) {}

absl::StatusOr<std::unique_ptr<ServiceAttention>> ServiceAttention::Open(
    const ServiceCache* cache) {
  const absl::StatusOr<uint64_t> sequence = cache->client()->OpenSequence(cache->id());
  if (!sequence.ok()) return sequence.status();
  return std::unique_ptr<ServiceAttention>(new ServiceAttention(cache, *sequence));
}

ServiceAttention::~ServiceAttention() {
  cache_->client()->CloseSequence(cache_->id(), sequence_).IgnoreError();
}

absl::Status ServiceAttention::Attend(int32_t layer, int64_t first_position, const Matrix& q,
                                      const Matrix& k, const Matrix& v, Matrix& out) {
  return cache_->client()->Attend(CallOf(*cache_, sequence_, layer, first_position, q, k, v, out));
}

absl::Status ServiceAttention::Truncate(int64_t length) {
  return cache_->client()->TruncateSequence(cache_->id(), sequence_, length).status();
}

ServiceDraftAttention::ServiceDraftAttention(const ServiceCache* cache, uint64_t sequence)
    : cache_(cache), sequence_(sequence) {}

absl::StatusOr<std::unique_ptr<ServiceDraftAttention>> ServiceDraftAttention::Open(
    const ServiceCache* cache) {
  const absl::StatusOr<uint64_t> sequence = cache->client()->OpenSequence(cache->id());
  if (!sequence.ok()) return sequence.status();
  return std::unique_ptr<ServiceDraftAttention>(new ServiceDraftAttention(cache, *sequence));
}

ServiceDraftAttention::~ServiceDraftAttention() {
  cache_->client()->CloseSequence(cache_->id(), sequence_).IgnoreError();
}

absl::Status ServiceDraftAttention::Append(int32_t layer, int64_t first_position, const Matrix& k,
                                           const Matrix& v) {
  client::AppendCall call;
  call.cache_id = cache_->id();
  call.layer = layer;
  call.entries = {{.sequence_id = sequence_,
                   .first_position = first_position,
                   .tokens = static_cast<int32_t>(k.rows())}};
  call.dtype = v1::DTYPE_F32;
  call.k = k.data();
  call.v = v.data();
  call.kv_heads = cache_->config().kv_heads;
  call.head_dim = cache_->config().head_dim;
  return cache_->client()->Append(call);
}

absl::Status ServiceDraftAttention::AttendBlock(int32_t layer, int64_t position, const Matrix& q,
                                                const Matrix& k, const Matrix& v, Matrix& out) {
  client::AttendCall call = CallOf(*cache_, sequence_, layer, position, q, k, v, out);
  call.mode = v1::ATTEND_MODE_DFLASH;
  return cache_->client()->Attend(call);
}

absl::Status ServiceDraftAttention::Reset() {
  return cache_->client()->TruncateSequence(cache_->id(), sequence_, 0).status();
}

}  // namespace tributary::tinylm
