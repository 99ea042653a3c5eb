#include "service/coordinator/sessions/endpoint_channel.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status/status_macros.h"
#include "kernels/output_format.h"
#include "worker/slot_bytes.h"

namespace tributary::service {
namespace {

// Some heads of every row of a dense tensor [rows, heads, dims], and the same heads by themselves.
struct HeadsOfRows {
  size_t rows = 0;
  size_t row_bytes = 0;    // of all heads
  size_t begin = 0;        // bytes of a row ahead of the heads
  size_t heads_bytes = 0;  // of the heads in a row
};

HeadsOfRows Part(int32_t rows, int32_t all_heads, const Heads& heads, size_t head_bytes) {
  return {.rows = static_cast<size_t>(rows),
          .row_bytes = static_cast<size_t>(all_heads) * head_bytes,
          .begin = static_cast<size_t>(heads.begin) * head_bytes,
          .heads_bytes = static_cast<size_t>(heads.count) * head_bytes};
}

void CopyIn(const HeadsOfRows& part, const std::byte* from, std::byte* all) {
  if (part.heads_bytes == 0) return;
  for (size_t row = 0; row < part.rows; ++row) {
    std::memcpy(all + row * part.row_bytes + part.begin, from + row * part.heads_bytes,
                part.heads_bytes);
  }
}

void CopyOut(const HeadsOfRows& part, const std::byte* all, std::byte* to) {
  for (size_t row = 0; row < part.rows; ++row) {
    std::memcpy(to + row * part.heads_bytes, all + row * part.row_bytes + part.begin,
                part.heads_bytes);
  }
}

worker::TensorView ViewOf(const std::vector<std::byte>& data, DType dtype) {
  if (data.empty()) return {};
  return {.data = data.data(), .dtype = dtype, .bytes = data.size()};
}

}  // namespace

EndpointChannel::EndpointChannel(const SessionTerms& terms,
                                 const std::vector<std::shared_ptr<HostMailbox>>& mailboxes,
                                 std::chrono::nanoseconds spin)
    : terms_(terms), parts_(mailboxes.size()) {
  for (const std::shared_ptr<HostMailbox>& mailbox : mailboxes) {
    channels_.push_back(std::make_unique<MailboxChannel>(terms, mailbox, spin));
  }
}

EndpointHeads EndpointChannel::HeadsOf(const LayerCall& call, size_t endpoint) const {
  return service::HeadsOf(call.geometry, terms_.endpoints, static_cast<int32_t>(endpoint));
}

LayerCall EndpointChannel::PartOf(const LayerCall& call, size_t endpoint) const {
  LayerCall part = call;
  part.geometry = OwnGeometry(call.geometry, terms_.endpoints, static_cast<int32_t>(endpoint));
  return part;
}

absl::StatusOr<LayerTensors> EndpointChannel::Take(const LayerCall& call,
                                                   std::chrono::steady_clock::time_point until) {
  const worker::OpenSessionCommand& session = terms_.command;
  const mailbox::SlotRoom bytes =
      worker::SlotBytes(call.geometry, session, call.query_rows, call.new_tokens);
  // The ranks may still be at work on the layer before where that failed.
  if (layer_ == nullptr || layer_.use_count() > 1) layer_ = std::make_shared<Layer>();
  layer_->q.resize(bytes.q);
  layer_->k.resize(bytes.k);
  layer_->v.resize(bytes.v);
  layer_->output.resize(bytes.output);
  layer_->lse.resize(session.return_lse ? bytes.lse : 0);
  for (size_t e = 0; e < channels_.size(); ++e) {
    absl::StatusOr<LayerTensors> part = channels_[e]->Take(PartOf(call, e), until);
    if (absl::IsDeadlineExceeded(part.status())) {
      return absl::DeadlineExceededError(
          absl::StrCat("endpoint ", e, ": ", part.status().message()));
    }
    TRIBUTARY_RETURN_IF_ERROR(part.status());
    parts_[e] = *std::move(part);
    Gather(call, e, parts_[e]);
  }
  LayerTensors all{.q = ViewOf(layer_->q, session.q_dtype),
                   .k = ViewOf(layer_->k, session.kv_dtype),
                   .v = ViewOf(layer_->v, session.kv_dtype),
                   .owner = layer_};
  if (!layer_->output.empty()) all.output.data = layer_->output.data();
  if (!layer_->lse.empty()) all.lse.data = layer_->lse.data();
  return all;
}

void EndpointChannel::Gather(const LayerCall& call, size_t endpoint, const LayerTensors& part) {
  const worker::LayerGeometry& layer = call.geometry;
  const worker::OpenSessionCommand& session = terms_.command;
  const EndpointHeads heads = HeadsOf(call, endpoint);
  CopyIn(Part(call.query_rows, layer.q_heads, heads.q, BytesOf(session.q_dtype, layer.kv.key_dim)),
         part.q.data, layer_->q.data());
  CopyIn(Part(call.new_tokens, layer.kv.kv_heads, heads.kv,
              BytesOf(session.kv_dtype, layer.kv.key_dim)),
         part.k.data, layer_->k.data());
  CopyIn(Part(call.new_tokens, layer.kv.kv_heads, heads.kv,
              BytesOf(session.kv_dtype, layer.kv.value_dim)),
         part.v.data, layer_->v.data());
}

void EndpointChannel::Scatter(const LayerCall& call, size_t endpoint, const std::byte* output,
                              const std::byte* lse) const {
  const worker::LayerGeometry& layer = call.geometry;
  const Heads heads = HeadsOf(call, endpoint).q;
  const LayerTensors& part = parts_[endpoint];
  CopyOut(Part(call.query_rows, layer.q_heads, heads,
               OutputBytes(terms_.command.output_dtype, layer.kv.value_dim)),
          output, part.output.data);
  if (part.lse.data == nullptr) return;
  CopyOut(Part(call.query_rows, layer.q_heads, heads, sizeof(float)), lse, part.lse.data);
}

void EndpointChannel::Deliver(const LayerCall& call, std::span<const std::byte> result) {
  const std::byte* output = result.empty() ? layer_->output.data() : result.data();
  const std::byte* lse =
      result.empty() ? layer_->lse.data() : result.data() + layer_->output.size();
  for (size_t e = 0; e < channels_.size(); ++e) {
    if (call.query_rows > 0) Scatter(call, e, output, lse);
    channels_[e]->Deliver(PartOf(call, e), {});
  }
}

void EndpointChannel::End(const absl::Status& why) {
  for (const auto& channel : channels_) channel->End(why);
}

}  // namespace tributary::service
