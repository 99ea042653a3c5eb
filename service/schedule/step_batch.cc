#include "service/schedule/step_batch.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status/rpc_errors.h"

namespace tributary::service {
namespace {

using Field = std::optional<InputTensor> StepRequest::*;

// What a request that runs alone borrows from.
struct Borrowed {
  std::shared_ptr<const void> message, q, k, v;
};

// Where the tensors of several requests are brought together.
struct Gathered {
  std::unique_ptr<std::byte[]> q, k, v;
};

worker::TensorView ViewOf(const std::optional<InputTensor>& tensor) {
  return tensor.has_value() ? tensor->view : worker::TensorView{};
}

std::shared_ptr<const void> OwnerOf(const std::optional<InputTensor>& tensor) {
  return tensor.has_value() ? tensor->owner : nullptr;
}

worker::TensorView Gather(const std::vector<ReservedRequest>& requests, Field field, DType dtype,
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

// Of a request that wants results in memory of a GPU.
worker::RegionOutput OutputOf(const StepRequest& request) {
  worker::RegionOutput output{.rows = request.query_rows,
                              .format = {request.output->dtype, request.output->scale}};
  if (request.output->device != nullptr) output.o = request.output->part;
  if (request.lse.has_value() && request.lse->device != nullptr) output.lse = request.lse->part;
  return output;
}

template <typename T>
void AppendTo(const std::vector<T>& from, std::vector<T>* to) {
  to->insert(to->end(), from.begin(), from.end());
}

}  // namespace

BuiltStep BuildStep(const std::vector<ReservedRequest>& requests, bool copy_shared) {
  BuiltStep built;
  worker::StepCommand& step = built.command;
  const StepRequest& first = *requests.front().request;
  step.kind = first.key.kind;
  step.bf16_partials = true;
  step.result_in_reply = false;
  for (const ReservedRequest& r : requests) {
    const std::optional<OutputTensor>& output = r.request->output;
    step.result_in_reply |= r.request->wants_result_on_host();
    step.bf16_partials &= !output.has_value() || output->dtype == DType::kBf16;
    AppendTo(r.reservation->page_copies, &step.page_copies);
    AppendTo(r.reservation->page_updates, &step.page_updates);
    AppendTo(r.reservation->entries, &step.entries);
    const auto on_device = [](const auto& result) {
      return result.has_value() && result->device != nullptr;
    };
    if (on_device(r.request->output) || on_device(r.request->lse)) {
      step.outputs.push_back(OutputOf(*r.request));
    }
  }
  if (requests.size() == 1 && !(copy_shared && SharesMemory(first))) {
    step.q = ViewOf(first.q);
    step.k = ViewOf(first.k);
    step.v = ViewOf(first.v);
    built.owner = std::make_shared<const Borrowed>(
        Borrowed{first.message, OwnerOf(first.q), OwnerOf(first.k), OwnerOf(first.v)});
    return built;
  }
  auto gathered = std::make_shared<Gathered>();
  step.q = Gather(requests, &StepRequest::q, first.key.q_dtype, &gathered->q);
  step.k = Gather(requests, &StepRequest::k, first.key.kv_dtype, &gathered->k);
  step.v = Gather(requests, &StepRequest::v, first.key.kv_dtype, &gathered->v);
  built.owner = std::move(gathered);
  return built;
}

absl::Status CheckResult(const worker::LayerGeometry& geometry, int64_t query_rows,
                         const worker::Reply& merged) {
  const size_t lse = static_cast<size_t>(query_rows) * static_cast<size_t>(geometry.q_heads);
  const size_t o = lse * static_cast<size_t>(geometry.kv.value_dim);
  if (merged.o.size() == o && merged.lse.size() == lse) return absl::OkStatus();
  return WrongResult(absl::StrCat("rank ", merged.rank, " answered a step of ", query_rows,
                                  " rows with ", merged.o.size(), " elements of output and ",
                                  merged.lse.size(), " LSEs; it has ", o, " and ", lse));
}

void WriteReply(const StepRequest& request, const worker::CacheSpec& spec, int64_t first_row,
                const std::vector<float>& o, const std::vector<float>& lse,
                v1::AttendReply* reply) {
  // Empty where nobody looks at it on the host.
  const auto from = [](const std::vector<float>& values, int64_t first) {
    return values.empty() ? nullptr : values.data() + first;
  };
  const worker::LayerGeometry geometry =
      worker::GeometryOf(spec, spec.layers[static_cast<size_t>(request.key.layer)]);
  const int64_t first_head = first_row * geometry.q_heads;
  WriteOutput(*request.output, from(o, first_head * geometry.kv.value_dim),
              reply->mutable_output());
  if (request.lse.has_value()) {
    WriteOutput(*request.lse, from(lse, first_head), reply->mutable_lse());
  }
}

}  // namespace tributary::service
