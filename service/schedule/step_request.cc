#include "service/schedule/step_request.h"

#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status/errors.h"
#include "base/status/rpc_errors.h"
#include "base/status/status_macros.h"
#include "service/data/resolve_spec.h"
#include "service/schedule/entry_list.h"

namespace tributary::service {
namespace {

constexpr int32_t kMostYieldMs = 1000;

absl::Status CheckLayer(int32_t layer, const worker::CacheSpec& spec) {
  if (layer < 0 || layer >= static_cast<int32_t>(spec.layers.size())) {
    return InvalidField("layer",
                        absl::StrCat("must be 0 to ", spec.layers.size() - 1, ", is ", layer));
  }
  return absl::OkStatus();
}

// Of the layer that the request names, which was checked.
worker::LayerGeometry GeometryOf(const StepRequest& request, const StepContext& context) {
  const worker::CacheSpec& spec = *context.spec;
  return worker::GeometryOf(spec, spec.layers[static_cast<size_t>(request.key.layer)]);
}

absl::Status ReadKv(const v1::Tensor& k, const v1::Tensor& v, const StepContext& context,
                    StepRequest* request) {
  const KvGeometry geometry = GeometryOf(*request, context).kv;
  const TensorShape k_shape = {request->new_tokens, geometry.kv_heads, geometry.key_dim};
  const TensorShape v_shape = {request->new_tokens, geometry.kv_heads, geometry.value_dim};
  TRIBUTARY_ASSIGN_OR_RETURN(request->k, ReadTensor(k, "k", k_shape, context.regions));
  TRIBUTARY_ASSIGN_OR_RETURN(request->v, ReadTensor(v, "v", v_shape, context.regions));
  if (request->k->view.dtype != request->v->view.dtype) {
    return InvalidField("v.dtype", absl::StrCat("must be that of k, ", Name(request->k->view.dtype),
                                                ", is ", Name(request->v->view.dtype)));
  }
  request->key.kv_dtype = request->k->view.dtype;
  return absl::OkStatus();
}

absl::Status CheckNoKv(const v1::AttendRequest& message) {
  if (message.has_k()) return InvalidField("k", "is given, but no entry has new tokens");
  if (message.has_v()) return InvalidField("v", "is given, but no entry has new tokens");
  return absl::OkStatus();
}

void Take(EntryList entries, StepRequest* request) {
  request->query_rows = entries.query_rows();
  request->new_tokens = entries.new_tokens();
  request->key.kind = entries.Kind();
  request->entries = entries.TakeEntries();
}

// Of an output that is stored with a scale: the call's, or else the layer's.
absl::Status SetScale(const v1::AttendRequest& message, const worker::LayerSpec& layer,
                      OutputTensor* output) {
  output->scale = message.has_o_scale() ? message.o_scale() : layer.o_scale;
  if (!message.has_o_scale()) return absl::OkStatus();
  if (IsUnscaled(output->dtype)) {
    return InvalidField("o_scale", absl::StrCat("is for outputs of fp8_e4m3 and nvfp4, not of ",
                                                Name(output->dtype)));
  }
  if (std::isfinite(output->scale) && output->scale > 0) return absl::OkStatus();
  return InvalidField("o_scale", absl::StrCat("must be finite and > 0, is ", output->scale));
}

absl::Status PlaceResults(const v1::AttendRequest& message, const StepContext& context,
                          StepRequest* request) {
  const worker::LayerGeometry geometry = GeometryOf(*request, context);
  TRIBUTARY_ASSIGN_OR_RETURN(
      request->output, PlaceOutput(message.has_output() ? &message.output() : nullptr, "output",
                                   {request->query_rows, geometry.q_heads, geometry.kv.value_dim},
                                   request->q->view.dtype, v1::DTYPE_UNSPECIFIED,
                                   context.max_message_bytes, context.regions));
  TRIBUTARY_RETURN_IF_ERROR(SetScale(
      message, context.spec->layers[static_cast<size_t>(request->key.layer)], &*request->output));
  if (!message.return_lse()) {
    if (message.has_lse()) return InvalidField("lse", "is given, but return_lse is false");
    return absl::OkStatus();
  }
  TRIBUTARY_ASSIGN_OR_RETURN(
      request->lse, PlaceOutput(message.has_lse() ? &message.lse() : nullptr, "lse",
                                {request->query_rows, geometry.q_heads}, DType::kF32, v1::DTYPE_F32,
                                context.max_message_bytes, context.regions));
  return absl::OkStatus();
}

template <typename Tensor>
absl::Status CheckTensorWhole(const std::optional<Tensor>& tensor, absl::string_view field) {
  return tensor.has_value() ? CheckWhole(tensor->owner.get(), field) : absl::OkStatus();
}

// BatchKey::on_device.
uint8_t OnDevice(const StepRequest& request) {
  const auto bit = [](const auto& tensor, int place) {
    return tensor.has_value() && tensor->device != nullptr ? 1 << place : 0;
  };
  return static_cast<uint8_t>(bit(request.q, 0) | bit(request.k, 1) | bit(request.v, 2) |
                              bit(request.output, 3) | bit(request.lse, 4));
}

}  // namespace

absl::InlinedVector<RegionTensor, 5> StepRequest::RegionTensors() const {
  absl::InlinedVector<RegionTensor, 5> tensors;
  const auto add = [&tensors](const auto& tensor, const char* field) {
    if (tensor.has_value() && tensor->device != nullptr) tensors.push_back({tensor->device, field});
  };
  add(q, "q");
  add(k, "k");
  add(v, "v");
  add(output, "output");
  add(lse, "lse");
  return tensors;
}

absl::Status StepRequest::CheckInputsWhole() const {
  TRIBUTARY_RETURN_IF_ERROR(CheckTensorWhole(q, "q"));
  TRIBUTARY_RETURN_IF_ERROR(CheckTensorWhole(k, "k"));
  return CheckTensorWhole(v, "v");
}

absl::Status StepRequest::CheckResultsWhole() const {
  TRIBUTARY_RETURN_IF_ERROR(CheckTensorWhole(output, "output"));
  return CheckTensorWhole(lse, "lse");
}

absl::StatusOr<StepRequest> CheckAttend(std::shared_ptr<const v1::AttendRequest> message,
                                        const StepContext& context) {
  const worker::CacheSpec& spec = *context.spec;
  TRIBUTARY_RETURN_IF_ERROR(CheckLayer(message->layer(), spec));
  TRIBUTARY_ASSIGN_OR_RETURN(const worker::AttentionMode mode, ReadMode(message->mode(), "mode"));
  TRIBUTARY_RETURN_IF_ERROR(CheckMode(mode, *context.terms, *context.backends));
  if (message->entries().empty()) return InvalidField("entries", "must not be empty");
  if (message->cancel()) return InvalidField("cancel", "is for calls on a stream");
  if (message->yield_ms() < 0 || message->yield_ms() > kMostYieldMs) {
    return InvalidField("yield_ms",
                        absl::StrCat("must be 0 to ", kMostYieldMs, ", is ", message->yield_ms()));
  }
  StepRequest request;
  request.request_id = message->request_id();
  request.yield = std::chrono::milliseconds(message->yield_ms());
  request.key.cache = context.cache;
  request.key.layer = message->layer();
  const bool draft = message->mode() == v1::ATTEND_MODE_DFLASH;
  EntryList entries;
  for (const v1::AttendEntry& entry : message->entries()) {
    TRIBUTARY_RETURN_IF_ERROR(entries.AddRows(entry.sequence_id(), entry.first_position(),
                                              entry.query_rows(), entry.new_tokens(), draft));
  }
  Take(std::move(entries), &request);
  if (draft) request.key.kind = worker::StepKind::kDflash;
  const worker::LayerGeometry geometry = GeometryOf(request, context);
  const TensorShape q_shape = {request.query_rows, geometry.q_heads, geometry.kv.key_dim};
  TRIBUTARY_ASSIGN_OR_RETURN(request.q, ReadTensor(message->q(), "q", q_shape, context.regions));
  request.key.q_dtype = request.q->view.dtype;
  if (request.new_tokens > 0) {
    TRIBUTARY_RETURN_IF_ERROR(ReadKv(message->k(), message->v(), context, &request));
  } else {
    TRIBUTARY_RETURN_IF_ERROR(CheckNoKv(*message));
  }
  TRIBUTARY_RETURN_IF_ERROR(PlaceResults(*message, context, &request));
  request.key.on_device = OnDevice(request);
  request.message = std::move(message);
  return request;
}

absl::StatusOr<StepRequest> CheckAppend(std::shared_ptr<const v1::AppendRequest> message,
                                        const StepContext& context) {
  TRIBUTARY_RETURN_IF_ERROR(CheckLayer(message->layer(), *context.spec));
  if (message->entries().empty()) return InvalidField("entries", "must not be empty");
  StepRequest request;
  request.key.cache = context.cache;
  request.key.layer = message->layer();
  EntryList entries;
  for (const v1::AppendEntry& entry : message->entries()) {
    TRIBUTARY_RETURN_IF_ERROR(
        entries.AddTokens(entry.sequence_id(), entry.first_position(), entry.tokens(), "tokens"));
  }
  Take(std::move(entries), &request);
  TRIBUTARY_RETURN_IF_ERROR(ReadKv(message->k(), message->v(), context, &request));
  request.key.on_device = OnDevice(request);
  request.message = std::move(message);
  return request;
}

}  // namespace tributary::service
