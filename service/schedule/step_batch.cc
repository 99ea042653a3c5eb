#include "service/schedule/step_batch.h"

#include <cstring>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "base/status/rpc_errors.h"
#include "worker/output_bytes.h"

namespace tributary::service {
namespace {

using Field = std::optional<InputTensor> StepRequest::*;

// What the tensors of a command point to.
struct Kept {
  absl::InlinedVector<std::shared_ptr<const void>, 6> owners;  // of one request: all of them
  std::unique_ptr<std::byte[]> q, k, v;  // where those of several requests are brought together

  void Keep(std::shared_ptr<const void> owner) {
    if (owner != nullptr) owners.push_back(std::move(owner));
  }
};

worker::TensorView ViewOf(const std::optional<InputTensor>& tensor) {
  return tensor.has_value() ? tensor->view : worker::TensorView{};
}

template <typename Tensor>
std::shared_ptr<const void> OwnerOf(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? tensor->owner : nullptr;
}

worker::TensorView Gather(std::span<const ReservedRequest> requests, Field field, DType dtype,
                          std::unique_ptr<std::byte[]>* buffer) {
  worker::TensorView all{.dtype = dtype};
  for (const ReservedRequest& r : requests) {
    const worker::TensorView part = ViewOf(r.request->*field);
    all.bytes += part.bytes;
    all.parts.insert(all.parts.end(), part.parts.begin(), part.parts.end());
  }
  if (all.bytes == 0) return {};
  if (all.in_regions()) return all;  // one key: all of them are
  *buffer = std::make_unique_for_overwrite<std::byte[]>(all.bytes);
  std::byte* next = buffer->get();
  for (const ReservedRequest& r : requests) {
    const worker::TensorView part = ViewOf(r.request->*field);
    if (part.bytes == 0) continue;
    std::memcpy(next, part.data, part.bytes);
    next += part.bytes;
  }
  all.data = buffer->get();
  return all;
}

// Whether inputs lie in memory of the host's own process.
bool SharesMemory(const StepRequest& request) {
  return OwnerOf(request.q) != nullptr || OwnerOf(request.k) != nullptr ||
         OwnerOf(request.v) != nullptr;
}

worker::OutputPlace PlaceOf(const std::optional<OutputTensor>& tensor, bool copy_shared) {
  if (!tensor.has_value()) return {};
  if (tensor->device != nullptr) return {.part = tensor->part};
  if (tensor->region == nullptr || copy_shared) return {.in_reply = true};
  return {.data = tensor->region, .pinned = tensor->pinned};
}

worker::StepOutput OutputOf(const StepRequest& request, bool copy_shared) {
  return {.rows = request.query_rows,
          .format = {request.output->dtype, request.output->scale},
          .o = PlaceOf(request.output, copy_shared),
          .lse = PlaceOf(request.lse, copy_shared)};
}

template <typename T>
void AppendTo(const std::vector<T>& from, std::vector<T>* to) {
  to->insert(to->end(), from.begin(), from.end());
}

}  // namespace

BuiltStep BuildStep(std::span<const ReservedRequest> requests, bool copy_shared) {
  BuiltStep built;
  worker::StepCommand& step = built.command;
  const auto kept = std::make_shared<Kept>();
  const StepRequest& first = *requests.front().request;
  step.kind = first.key.kind;
  step.bf16_partials = true;
  for (const ReservedRequest& r : requests) {
    const std::optional<OutputTensor>& output = r.request->output;
    step.bf16_partials &= !output.has_value() || output->dtype == DType::kBf16;
    AppendTo(r.reservation->page_copies, &step.page_copies);
    AppendTo(r.reservation->page_updates, &step.page_updates);
    AppendTo(r.reservation->entries, &step.entries);
    if (!output.has_value()) continue;
    step.outputs.push_back(OutputOf(*r.request, copy_shared));
    kept->Keep(OwnerOf(r.request->output));
    kept->Keep(OwnerOf(r.request->lse));
  }
  if (requests.size() == 1 && !(copy_shared && SharesMemory(first))) {
    step.q = ViewOf(first.q);
    step.k = ViewOf(first.k);
    step.v = ViewOf(first.v);
    kept->Keep(first.message);
    kept->Keep(OwnerOf(first.q));
    kept->Keep(OwnerOf(first.k));
    kept->Keep(OwnerOf(first.v));
  } else {
    step.q = Gather(requests, &StepRequest::q, first.key.q_dtype, &kept->q);
    step.k = Gather(requests, &StepRequest::k, first.key.kv_dtype, &kept->k);
    step.v = Gather(requests, &StepRequest::v, first.key.kv_dtype, &kept->v);
  }
  built.owner = kept;
  return built;
}

absl::Status CheckResult(const worker::LayerGeometry& geometry,
                         std::span<const worker::StepOutput> outputs, const worker::Reply& merged) {
  const size_t wanted = worker::BytesInReply(outputs, geometry);
  if (merged.result.size() == wanted) return absl::OkStatus();
  int64_t rows = 0;
  for (const worker::StepOutput& output : outputs) rows += output.rows;
  return WrongResult(absl::StrCat("rank ", merged.rank, " answered a step of ", rows, " rows with ",
                                  merged.result.size(), " bytes of results; it has ", wanted));
}

void WriteReply(const StepRequest& request, const worker::StepOutput& output,
                const std::byte* result, v1::AttendReply* reply) {
  WriteOutput(*request.output, output.o.in_reply ? result : nullptr, reply->mutable_output());
  if (!request.lse.has_value()) return;
  if (output.o.in_reply) result += request.output->bytes;
  WriteOutput(*request.lse, output.lse.in_reply ? result : nullptr, reply->mutable_lse());
}

}  // namespace tributary::service
