#include "service/coordinator/limits.h"

#include <chrono>

#include "service/data/resolve_spec.h"
#include "service/schedule/step_cost.h"
#include "worker/backends.h"
#include "worker/rpc/dtype_conversion.h"

namespace tributary::service {
namespace {

double Seconds(std::chrono::milliseconds time) {
  return std::chrono::duration<double>(time).count();
}

void AddMode(const worker::ModeCapabilities& mode, v1::BackendLimits* backend) {
  v1::ModeLimits* out = backend->add_modes();
  out->set_mode(mode.mode == worker::AttentionMode::kCausal ? v1::ATTEND_MODE_CAUSAL
                                                            : v1::ATTEND_MODE_DFLASH);
  out->set_left_window(mode.left_window);
  out->set_right_window(mode.right_window);
  out->set_anchor_window(mode.anchor_window);
  out->set_causal_block(mode.causal_block);
  out->set_soft_cap(mode.soft_cap);
  out->set_sinks(mode.sinks);
}

void AddBackend(const worker::BackendCapabilities& backend, v1::GetLimitsReply* reply) {
  v1::BackendLimits* out = reply->add_backends();
  out->set_name(backend.name);
  for (const worker::ModeCapabilities& mode : backend.modes) AddMode(mode, out);
  for (const HeadDims& dims : backend.head_dims) {
    v1::HeadDimLimits* pair = out->add_head_dims();
    pair->set_head_dim(dims.key_dim);
    pair->set_value_head_dim(dims.value_dim);
  }
  for (const int32_t size : backend.page_sizes) out->add_page_sizes(size);
  for (const DType dtype : backend.kv_dtypes) out->add_kv_dtypes(ToProto(dtype));
  out->set_max_gqa_ratio(backend.max_gqa_ratio);
  out->set_layer_types(backend.layer_types);
  out->set_fp8_queries(backend.fp8_queries);
  out->set_fp8_weights(backend.fp8_weights);
  out->set_deterministic(backend.batch_invariant);
  for (const worker::OutputError& error : backend.f32_output_errors) {
    v1::OutputError* told = out->add_f32_output_errors();
    told->set_q_dtype(ToProto(error.q));
    told->set_kv_dtype(ToProto(error.kv));
    told->set_few_rows(error.few_rows);
    told->set_many_rows(error.many_rows);
  }
}

}  // namespace

v1::GetLimitsReply LimitsOf(const CoordinatorOptions& options, const WorkerGroup& group) {
  v1::GetLimitsReply reply;
  reply.set_group_id(group.id());
  reply.set_max_message_bytes(static_cast<int64_t>(options.max_message_bytes));
  reply.set_max_sequences(options.max_sequences);
  reply.set_batch_max_rows(options.batch.max_rows);
  reply.set_batch_max_entries(options.batch.max_entries);
  reply.set_max_call_seconds(Seconds(options.max_call_timeout));
  reply.set_step_timeout_seconds(Seconds(options.step_timeout));
  const StepLimits step =
      StepLimitsFor(group.device(), group.size(), options.max_step_bytes, options.step_timeout);
  reply.set_max_step_bytes(step.bytes);
  reply.set_max_step_flops(step.flops);
  reply.set_lease_timeout_seconds(Seconds(options.lease_timeout));
  v1::PerClientLimits* client = reply.mutable_per_client();
  client->set_sequences(options.client_limits.sequences);
  client->set_pages(options.client_limits.pages);
  client->set_caches(options.client_limits.caches);
  client->set_cache_bytes(options.client_limits.cache_bytes);
  client->set_sessions(options.client_limits.sessions);
  client->set_mailbox_bytes(options.client_limits.mailbox_bytes);
  reply.set_ranks(group.size());
  reply.set_device(Name(group.device()));
  reply.set_deterministic(options.deterministic);
  for (const DType dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
    reply.add_tensor_dtypes(ToProto(dtype));
  }
  for (const DType dtype :
       {DType::kF32, DType::kBf16, DType::kF16, DType::kFp8E4M3, DType::kNvfp4}) {
    reply.add_output_dtypes(ToProto(dtype));
  }
  reply.set_max_layers(worker::kMaxLayers);
  reply.set_max_kv_heads(worker::kMaxKvHeads);
  for (const worker::BackendCapabilities* backend : options.backends) {
    if (backend->device == group.device()) AddBackend(*backend, &reply);
  }
  return reply;
}

}  // namespace tributary::service
