#include "service/client/layer_path.h"

#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/mailbox/cpu_doorbell.h"
#include "base/status/status_macros.h"
#include "service/client/session_messages.h"

namespace tributary::client {
namespace {

size_t DenseBytes(const HeadRows& rows, int32_t element_bytes) {
  if (rows.data == nullptr) return 0;
  return static_cast<size_t>(rows.rows) * rows.heads * rows.dim * element_bytes;
}

// Calls copy(strided, dense, bytes) for each piece that is dense in both.
template <typename Copy>
void ForEachPiece(const HeadRows& rows, int32_t element_bytes, Copy copy) {
  if (rows.data == nullptr) return;
  auto* const data = static_cast<std::byte*>(rows.data);
  const size_t head = static_cast<size_t>(rows.dim) * element_bytes;
  const size_t row = head * rows.heads;
  const bool whole_rows = HeadStride(rows) == rows.dim;
  if (whole_rows && RowStride(rows) == int64_t{rows.heads} * rows.dim) {
    return copy(data, size_t{0}, row * rows.rows);
  }
  for (int32_t r = 0; r < rows.rows; ++r) {
    std::byte* const begin = data + r * RowStride(rows) * element_bytes;
    if (whole_rows) {
      copy(begin, r * row, row);
      continue;
    }
    for (int32_t h = 0; h < rows.heads; ++h) {
      copy(begin + h * HeadStride(rows) * element_bytes, r * row + h * head, head);
    }
  }
}

void CopyIn(const HeadRows& from, int32_t element_bytes, std::byte* to) {
  ForEachPiece(from, element_bytes, [to](const std::byte* strided, size_t dense, size_t bytes) {
    std::memcpy(to + dense, strided, bytes);
  });
}

void CopyOut(const std::byte* from, const HeadRows& to, int32_t element_bytes) {
  ForEachPiece(to, element_bytes, [from](std::byte* strided, size_t dense, size_t bytes) {
    std::memcpy(strided, from + dense, bytes);
  });
}

size_t LseBytes(const SessionLayer& layer) {
  return layer.lse == nullptr ? 0
                              : sizeof(float) * static_cast<size_t>(layer.q.rows) * layer.q.heads;
}

class MailboxPath final : public LayerPath {
 public:
  MailboxPath(std::unique_ptr<MailboxMemory> memory, ElementBytes bytes,
              std::chrono::nanoseconds spin)
      : memory_(std::move(memory)), bytes_(bytes), spin_(spin) {}

  absl::Status HandOver(const LayerPlace& place, const SessionLayer& layer,
                        Deadline until) override {
    const mailbox::Layout& layout = memory_->layout();
    const uint32_t in_slots = static_cast<uint32_t>(layout.slots);
    TRIBUTARY_RETURN_IF_ERROR(AwaitFinished(place.count + 1 - in_slots, place, until));
    if (mailbox::StatusOf(memory_->status()) != 0) return Ended();
    std::byte* const slot = memory_->SlotOf(place.count);
    CopyIn(layer.q, bytes_.inputs, slot + layout.q);
    CopyIn(layer.k, bytes_.inputs, slot + layout.k);
    CopyIn(layer.v, bytes_.inputs, slot + layout.v);
    mailbox::Ring(memory_->arrived(), place.count + 1);
    return absl::OkStatus();
  }

  absl::Status TakeBack(const LayerPlace& place, const SessionLayer& layer,
                        Deadline until) override {
    TRIBUTARY_RETURN_IF_ERROR(AwaitFinished(place.count + 1, place, until));
    const std::byte* const slot = memory_->SlotOf(place.count);
    CopyOut(slot + memory_->layout().output, layer.output, bytes_.output);
    if (layer.lse != nullptr) {
      std::memcpy(layer.lse, slot + memory_->layout().lse, LseBytes(layer));
    }
    return absl::OkStatus();
  }

  void End(const absl::Status& why) override {
    mailbox::SetStatus(memory_->status(), static_cast<uint32_t>(why.ok() ? 1 : why.raw_code()));
    mailbox::Wake(memory_->finished());
  }

 private:
  static absl::Status Ended() { return absl::CancelledError("the session is over"); }

  absl::Status AwaitFinished(uint32_t count, const LayerPlace& place, Deadline until) {
    switch (mailbox::Await(memory_->finished(), count, memory_->status(), spin_, until)) {
      case mailbox::Awaited::kReached:
        return absl::OkStatus();
      case mailbox::Awaited::kEnded:
        return Ended();
      case mailbox::Awaited::kTimedOut:
        break;
    }
    return absl::DeadlineExceededError(absl::StrCat(
        "the service did not finish layer ", place.layer, " of step ", place.step_id, " in time"));
  }

  const std::unique_ptr<MailboxMemory> memory_;
  const ElementBytes bytes_;
  const std::chrono::nanoseconds spin_;
};

class MessagePath final : public LayerPath {
 public:
  MessagePath(SessionStream* stream, ElementBytes bytes) : stream_(*stream), bytes_(bytes) {}

  absl::Status HandOver(const LayerPlace& place, const SessionLayer& layer, Deadline) override {
    v1::LayerInput input;
    input.set_step_id(place.step_id);
    input.set_layer(place.layer);
    input.set_piece(place.piece);
    Fill(layer.q, input.mutable_q());
    Fill(layer.k, input.mutable_k());
    Fill(layer.v, input.mutable_v());
    return stream_.SendLayer(std::move(input));
  }

  absl::Status TakeBack(const LayerPlace& place, const SessionLayer& layer,
                        Deadline until) override {
    TRIBUTARY_ASSIGN_OR_RETURN(const v1::LayerOutput output,
                               stream_.AwaitLayer(place.step_id, place.layer, place.piece, until));
    if (output.output().size() < DenseBytes(layer.output, bytes_.output) ||
        output.lse().size() < LseBytes(layer)) {
      return absl::InternalError("the service sent a result of another size");
    }
    CopyOut(reinterpret_cast<const std::byte*>(output.output().data()), layer.output,
            bytes_.output);
    if (layer.lse != nullptr) std::memcpy(layer.lse, output.lse().data(), LseBytes(layer));
    return absl::OkStatus();
  }

  void End(const absl::Status&) override {}  // the stream ends its own waits

 private:
  void Fill(const HeadRows& from, std::string* to) const {
    to->resize(DenseBytes(from, bytes_.inputs));
    CopyIn(from, bytes_.inputs, reinterpret_cast<std::byte*>(to->data()));
  }

  SessionStream& stream_;
  const ElementBytes bytes_;
};

}  // namespace

std::unique_ptr<LayerPath> CreateMailboxPath(std::unique_ptr<MailboxMemory> memory,
                                             ElementBytes bytes, std::chrono::nanoseconds spin) {
  return std::make_unique<MailboxPath>(std::move(memory), bytes, spin);
}

std::unique_ptr<LayerPath> CreateMessagePath(SessionStream* stream, ElementBytes bytes) {
  return std::make_unique<MessagePath>(stream, bytes);
}

}  // namespace tributary::client
