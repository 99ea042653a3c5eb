#include "service/schedule/step_request.h"

#include <algorithm>
#include <limits>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "base/status/errors.h"
#include "base/status/rpc_errors.h"
#include "base/status/status_macros.h"
#include "service/data/resolve_spec.h"
#include "worker/choose_path.h"

namespace tributary::service {
namespace {

// Sums of rows and tokens stay int32: they are in commands and kernels.
absl::Status AddTo(int32_t count, absl::string_view field, int32_t* sum) {
  if (__builtin_add_overflow(*sum, count, sum)) {
    return InvalidField(field, "rows of all entries leave 31 bits");
  }
  return absl::OkStatus();
}

// Collects entries and what all of them must satisfy.
class EntryList {
 public:
  explicit EntryList(StepRequest* request) : request_(request) {}

  absl::Status Add(uint64_t sequence, int64_t first_position, int32_t query_rows,
                   int32_t new_tokens) {
    const int index = static_cast<int>(request_->entries.size());
    if (!sequences_.insert(sequence).second) {
      return InvalidField(EntryField(index, "sequence_id"),
                          absl::StrCat("sequence ", sequence, " appears twice"));
    }
    if (first_position < 0) {
      return InvalidField(EntryField(index, "first_position"),
                          absl::StrCat("must be >= 0, is ", first_position));
    }
    TRIBUTARY_RETURN_IF_ERROR(
        AddTo(query_rows, EntryField(index, "query_rows"), &request_->query_rows));
    TRIBUTARY_RETURN_IF_ERROR(
        AddTo(new_tokens, EntryField(index, "new_tokens"), &request_->new_tokens));
    request_->entries.push_back({.sequence = sequence,
                                 .first_position = first_position,
                                 .query_rows = query_rows,
                                 .new_tokens = new_tokens});
    most_rows_ = std::max(most_rows_, query_rows);
    most_tokens_ = std::max(most_tokens_, new_tokens);
    return absl::OkStatus();
  }

  worker::StepKind Kind() const { return worker::ChoosePath(most_rows_, most_tokens_); }

 private:
  StepRequest* const request_;
  absl::flat_hash_set<uint64_t> sequences_;
  int32_t most_rows_ = 0;
  int32_t most_tokens_ = 0;
};

absl::Status CheckLayer(int32_t layer, const worker::CacheSpec& spec) {
  if (layer < 0 || layer >= static_cast<int32_t>(spec.layers.size())) {
    return InvalidField("layer",
                        absl::StrCat("must be 0 to ", spec.layers.size() - 1, ", is ", layer));
  }
  return absl::OkStatus();
}

// The cache's backends were chosen when it was created; not every mode need have one.
absl::Status CheckMode(worker::AttentionMode mode, const StepContext& context) {
  if (!context.terms->Allow(mode)) {
    return Unsupported(absl::StrCat("mode ", Name(mode)),
                       {"it is not among the modes that the cache was created for"});
  }
  const worker::Selection& selection = context.backends->of(mode);
  if (selection.ok()) return absl::OkStatus();
  return Unsupported(absl::StrCat("mode ", Name(mode)), selection.refusals);
}

// Of the layer that the request names, which was checked.
worker::LayerGeometry GeometryOf(const StepRequest& request, const StepContext& context) {
  const worker::CacheSpec& spec = *context.spec;
  return worker::GeometryOf(spec, spec.layers[static_cast<size_t>(request.key.layer)]);
}

absl::Status ReadKv(const v1::Tensor& k, const v1::Tensor& v, const StepContext& context,
                    StepRequest* request) {
  const KvGeometry geometry = GeometryOf(*request, context).kv;
  const std::vector<int64_t> k_shape = {request->new_tokens, geometry.kv_heads, geometry.key_dim};
  const std::vector<int64_t> v_shape = {request->new_tokens, geometry.kv_heads, geometry.value_dim};
  TRIBUTARY_ASSIGN_OR_RETURN(request->k, ReadTensor(k, "k", k_shape, *context.regions));
  TRIBUTARY_ASSIGN_OR_RETURN(request->v, ReadTensor(v, "v", v_shape, *context.regions));
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

absl::Status AddAttendEntry(const v1::AttendEntry& entry, v1::AttendMode mode, int index,
                            EntryList* entries) {
  if (entry.query_rows() < 1) {
    return InvalidField(EntryField(index, "query_rows"),
                        absl::StrCat("must be >= 1, is ", entry.query_rows()));
  }
  if (mode == v1::ATTEND_MODE_DFLASH && entry.new_tokens() != entry.query_rows()) {
    return InvalidField(EntryField(index, "new_tokens"),
                        absl::StrCat("a draft brings the K/V of its block: must be query_rows (",
                                     entry.query_rows(), "), is ", entry.new_tokens()));
  }
  if (entry.new_tokens() != 0 && entry.new_tokens() != entry.query_rows()) {
    return InvalidField(EntryField(index, "new_tokens"),
                        absl::StrCat("must be 0 or query_rows (", entry.query_rows(), "), is ",
                                     entry.new_tokens()));
  }
  return entries->Add(entry.sequence_id(), entry.first_position(), entry.query_rows(),
                      entry.new_tokens());
}

absl::Status PlaceResults(const v1::AttendRequest& message, const StepContext& context,
                          StepRequest* request) {
  const worker::LayerGeometry geometry = GeometryOf(*request, context);
  TRIBUTARY_ASSIGN_OR_RETURN(
      request->output, PlaceOutput(message.has_output() ? &message.output() : nullptr, "output",
                                   {request->query_rows, geometry.q_heads, geometry.kv.value_dim},
                                   request->q->view.dtype, v1::DTYPE_UNSPECIFIED,
                                   context.max_message_bytes, *context.regions));
  if (!message.return_lse()) {
    if (message.has_lse()) return InvalidField("lse", "is given, but return_lse is false");
    return absl::OkStatus();
  }
  TRIBUTARY_ASSIGN_OR_RETURN(
      request->lse, PlaceOutput(message.has_lse() ? &message.lse() : nullptr, "lse",
                                {request->query_rows, geometry.q_heads}, DType::kF32, v1::DTYPE_F32,
                                context.max_message_bytes, *context.regions));
  return absl::OkStatus();
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

absl::StatusOr<StepRequest> CheckAttend(std::shared_ptr<const v1::AttendRequest> message,
                                        const StepContext& context) {
  const worker::CacheSpec& spec = *context.spec;
  TRIBUTARY_RETURN_IF_ERROR(CheckLayer(message->layer(), spec));
  TRIBUTARY_ASSIGN_OR_RETURN(const worker::AttentionMode mode, ReadMode(message->mode(), "mode"));
  TRIBUTARY_RETURN_IF_ERROR(CheckMode(mode, context));
  if (message->entries().empty()) return InvalidField("entries", "must not be empty");
  StepRequest request;
  request.key.cache = context.cache;
  request.key.layer = message->layer();
  EntryList entries(&request);
  for (int i = 0; i < message->entries_size(); ++i) {
    TRIBUTARY_RETURN_IF_ERROR(AddAttendEntry(message->entries(i), message->mode(), i, &entries));
  }
  request.key.kind =
      message->mode() == v1::ATTEND_MODE_DFLASH ? worker::StepKind::kDflash : entries.Kind();
  const worker::LayerGeometry geometry = GeometryOf(request, context);
  const std::vector<int64_t> q_shape = {request.query_rows, geometry.q_heads, geometry.kv.key_dim};
  TRIBUTARY_ASSIGN_OR_RETURN(request.q, ReadTensor(message->q(), "q", q_shape, *context.regions));
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
  EntryList entries(&request);
  for (int i = 0; i < message->entries_size(); ++i) {
    const v1::AppendEntry& entry = message->entries(i);
    if (entry.tokens() < 1) {
      return InvalidField(EntryField(i, "tokens"),
                          absl::StrCat("must be >= 1, is ", entry.tokens()));
    }
    TRIBUTARY_RETURN_IF_ERROR(
        entries.Add(entry.sequence_id(), entry.first_position(), 0, entry.tokens()));
  }
  request.key.kind = entries.Kind();
  TRIBUTARY_RETURN_IF_ERROR(ReadKv(message->k(), message->v(), context, &request));
  request.key.on_device = OnDevice(request);
  request.message = std::move(message);
  return request;
}

}  // namespace tributary::service
