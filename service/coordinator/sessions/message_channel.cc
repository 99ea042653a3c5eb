#include "service/coordinator/sessions/message_channel.h"

#include <cstddef>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status/errors.h"
#include "base/status/status_macros.h"
#include "worker/slot_bytes.h"

namespace tributary::service {
namespace {

absl::Status CheckSize(const std::string& bytes, size_t wanted, const char* field) {
  if (bytes.size() == wanted) return absl::OkStatus();
  return InvalidField(field, absl::StrCat("must have ", wanted, " bytes, has ", bytes.size()));
}

worker::TensorView ViewOf(const std::string& bytes, DType dtype) {
  if (bytes.empty()) return {};
  return {.data = reinterpret_cast<const std::byte*>(bytes.data()),
          .dtype = dtype,
          .bytes = bytes.size()};
}

}  // namespace

absl::StatusOr<LayerTensors> MessageChannel::Take(const LayerCall& call,
                                                  std::chrono::steady_clock::time_point until) {
  LayerPtr layer;
  {
    const MutexLock lock(mutex_);
    while (layers_.empty() && ended_.ok()) {
      if (changed_.WaitUntil(mutex_, until)) continue;
      return NotHandedOver(call, terms_);
    }
    if (!ended_.ok()) return ended_;
    layer = std::move(layers_.front());
    layers_.pop_front();
  }
  on_room_();
  TRIBUTARY_RETURN_IF_ERROR(Check(call, *layer));
  LayerTensors tensors{.q = ViewOf(layer->q(), terms_.command.q_dtype),
                       .k = ViewOf(layer->k(), terms_.command.kv_dtype),
                       .v = ViewOf(layer->v(), terms_.command.kv_dtype),
                       .owner = layer};
  if (call.query_rows == 0) return tensors;
  tensors.output = {.in_reply = true};
  tensors.lse = {.in_reply = terms_.command.return_lse};
  return tensors;
}

mailbox::SlotRoom MessageChannel::BytesOf(const LayerCall& call) const {
  return worker::SlotBytes(call.geometry, terms_.command, call.query_rows, call.new_tokens);
}

absl::Status MessageChannel::Check(const LayerCall& call, const v1::LayerInput& layer) const {
  if (layer.step_id() != call.step_id) {
    return InvalidField("layer.step_id", absl::StrCat("the next layer is of step ", call.step_id,
                                                      ", not ", layer.step_id()));
  }
  if (layer.layer() != call.layer) {
    return InvalidField("layer.layer",
                        absl::StrCat("the next is layer ", call.layer, ", not ", layer.layer()));
  }
  if (layer.piece() != call.piece) {
    return InvalidField("layer.piece",
                        absl::StrCat("the next is piece ", call.piece, ", not ", layer.piece()));
  }
  const mailbox::SlotRoom bytes = BytesOf(call);
  TRIBUTARY_RETURN_IF_ERROR(CheckSize(layer.q(), bytes.q, "layer.q"));
  TRIBUTARY_RETURN_IF_ERROR(CheckSize(layer.k(), bytes.k, "layer.k"));
  return CheckSize(layer.v(), bytes.v, "layer.v");
}

void MessageChannel::Deliver(const LayerCall& call, std::span<const std::byte> result) {
  v1::SessionReply reply;
  v1::LayerOutput* const layer = reply.mutable_layer();
  layer->set_step_id(call.step_id);
  layer->set_layer(call.layer);
  layer->set_piece(call.piece);
  if (!result.empty()) {
    const size_t output = BytesOf(call).output;
    layer->set_output(result.data(), output);
    layer->set_lse(result.data() + output, result.size() - output);
  }
  send_(std::move(reply));
}

void MessageChannel::End(const absl::Status& why) {
  const MutexLock lock(mutex_);
  if (!ended_.ok()) return;
  ended_ = why;
  layers_.clear();
  changed_.NotifyAll();
}

void MessageChannel::Put(v1::LayerInput layer) {
  const MutexLock lock(mutex_);
  if (!ended_.ok() || refused_.contains(layer.step_id())) return;
  layers_.push_back(std::make_shared<const v1::LayerInput>(std::move(layer)));
  changed_.NotifyAll();
}

bool MessageChannel::HasRoom() const {
  const MutexLock lock(mutex_);
  return layers_.size() < static_cast<size_t>(terms_.public_terms.slots());
}

void MessageChannel::Refuse(uint64_t step_id) {
  {
    const MutexLock lock(mutex_);
    refused_.insert(step_id);
    if (refused_.size() > kRemembered) refused_.erase(refused_.begin());
    std::erase_if(layers_, [&](const LayerPtr& layer) { return layer->step_id() == step_id; });
  }
  on_room_();
}

}  // namespace tributary::service
