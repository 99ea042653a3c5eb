#include "service/data/session_terms.h"

#include <algorithm>
#include <chrono>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status/errors.h"
#include "base/status/status_macros.h"
#include "kernels/output_format.h"
#include "service/data/resolve_spec.h"
#include "worker/slot_bytes.h"

namespace tributary::service {
namespace {

constexpr int32_t kMostRows = 1 << 20;
constexpr int32_t kMostSlots = 16;
constexpr int32_t kMostSteps = 16;
constexpr uint32_t kDefaultWaitMs = 10'000;
constexpr uint32_t kMostWaitMs = 300'000;

absl::Status CheckRange(absl::string_view field, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return InvalidField(absl::StrCat("open.", field),
                      absl::StrCat("must be ", least, " to ", most, ", is ", value));
}

absl::StatusOr<DType> ReadType(v1::DType dtype, absl::string_view field) {
  TRIBUTARY_ASSIGN_OR_RETURN(const DType read, ReadDType(dtype, absl::StrCat("open.", field)));
  if (IsUnscaled(read)) return read;
  return InvalidField(absl::StrCat("open.", field), "must be f32, bf16 or f16");
}

absl::StatusOr<DType> ReadOutputType(const v1::OpenSession& open) {
  if (open.memory() == v1::SESSION_MEMORY_DEVICE) {
    return ReadType(open.output_dtype(), "output_dtype");
  }
  TRIBUTARY_ASSIGN_OR_RETURN(const DType read, ReadDType(open.output_dtype(), "open.output_dtype"));
  if (IsOutputType(read)) return read;
  return InvalidField("open.output_dtype", "must be f32, bf16, f16, fp8_e4m3 or nvfp4");
}

void FillDefaults(v1::OpenSession* terms) {
  if (terms->kv_dtype() == v1::DTYPE_UNSPECIFIED) terms->set_kv_dtype(terms->q_dtype());
  if (terms->output_dtype() == v1::DTYPE_UNSPECIFIED) terms->set_output_dtype(terms->q_dtype());
  if (terms->slots() == 0) terms->set_slots(2);
  if (terms->max_steps() == 0) terms->set_max_steps(2);
  if (terms->wait_timeout_ms() == 0) terms->set_wait_timeout_ms(kDefaultWaitMs);
  if (terms->endpoints() == 0) terms->set_endpoints(1);
}

absl::Status CheckNumbers(const v1::OpenSession& terms) {
  TRIBUTARY_RETURN_IF_ERROR(CheckRange("max_rows", terms.max_rows(), 1, kMostRows));
  TRIBUTARY_RETURN_IF_ERROR(CheckRange("max_new_tokens", terms.max_new_tokens(), 0, kMostRows));
  TRIBUTARY_RETURN_IF_ERROR(CheckRange("slots", terms.slots(), 1, kMostSlots));
  if ((terms.slots() & (terms.slots() - 1)) != 0) {
    return InvalidField("open.slots", absl::StrCat("must be a power of two, is ", terms.slots()));
  }
  TRIBUTARY_RETURN_IF_ERROR(CheckRange("max_steps", terms.max_steps(), 1, kMostSteps));
  return CheckRange("wait_timeout_ms", terms.wait_timeout_ms(), 1, kMostWaitMs);
}

absl::Status CheckSplit(const v1::OpenSession& open, const worker::CacheSpec& spec,
                        const Endpoints& endpoints) {
  TRIBUTARY_RETURN_IF_ERROR(CheckEndpoints(spec, endpoints));
  if (endpoints.count == 1) return absl::OkStatus();
  if (open.memory() == v1::SESSION_MEMORY_MESSAGES) {
    return InvalidField("open.endpoints",
                        "more than one is of sessions whose memory is HOST or DEVICE");
  }
  // Its blocks lie behind their scales, so heads are not dense.
  if (open.output_dtype() == v1::DTYPE_NVFP4) {
    return InvalidField("open.output_dtype", "nvfp4 is of sessions with one endpoint");
  }
  return absl::OkStatus();
}

// Of a slot. Where each endpoint has slots of its own, endpoint 0 hands over as much as any other.
mailbox::SlotRoom RoomOfSlot(const worker::CacheSpec& spec, const SessionTerms& terms, int64_t rows,
                             int64_t tokens) {
  std::vector<worker::LayerGeometry> layers;
  for (const worker::LayerSpec& layer : spec.layers) {
    const worker::LayerGeometry geometry = worker::GeometryOf(spec, layer);
    layers.push_back(terms.shares_mailbox() ? geometry : OwnGeometry(geometry, terms.endpoints, 0));
  }
  return worker::MostSlotBytes(layers, terms.command, rows, tokens);
}

// Launches are made for a few rows more than there are, so that few graphs serve many steps.
int64_t PaddedRows(int64_t rows) { return rows + rows / 4 + 8; }

}  // namespace

absl::StatusOr<SessionTerms> ResolveSessionTerms(const v1::OpenSession& asked,
                                                 const worker::CacheSpec& spec) {
  SessionTerms terms{.public_terms = asked};
  FillDefaults(&terms.public_terms);
  const v1::OpenSession& open = terms.public_terms;
  TRIBUTARY_RETURN_IF_ERROR(CheckNumbers(open));
  if (open.measures() && open.memory() != v1::SESSION_MEMORY_DEVICE) {
    return InvalidField("open.measures", "is of sessions whose memory is DEVICE");
  }
  terms.endpoints = {open.endpoints(), open.kv_replicated()};
  TRIBUTARY_RETURN_IF_ERROR(CheckSplit(open, spec, terms.endpoints));
  if (open.timed() && open.memory() != v1::SESSION_MEMORY_DEVICE) {
    return InvalidField("open.timed", "is of sessions whose memory is DEVICE");
  }
  if (open.hands_over_in_parts() && open.memory() != v1::SESSION_MEMORY_DEVICE) {
    return InvalidField("open.hands_over_in_parts", "is of sessions whose memory is DEVICE");
  }
  worker::OpenSessionCommand& command = terms.command;
  TRIBUTARY_ASSIGN_OR_RETURN(command.q_dtype, ReadType(open.q_dtype(), "q_dtype"));
  TRIBUTARY_ASSIGN_OR_RETURN(command.kv_dtype, ReadType(open.kv_dtype(), "kv_dtype"));
  TRIBUTARY_ASSIGN_OR_RETURN(command.output_dtype, ReadOutputType(open));
  command.max_rows = open.max_rows();
  command.max_new_tokens = open.max_new_tokens();
  // Steps larger than a slot are several commands.
  command.max_steps = std::max(open.max_steps(), kCommandsAhead);
  command.return_lse = open.return_lse();
  command.wait_timeout = std::chrono::milliseconds(open.wait_timeout_ms());
  command.host_gpu = open.device_uuid();
  command.measures = open.measures();
  command.endpoints = terms.shares_mailbox() ? terms.endpoints.count : 1;
  command.layout = mailbox::LayOut(
      open.slots(),
      RoomOfSlot(spec, terms, PaddedRows(command.max_rows), PaddedRows(command.max_new_tokens)),
      {.endpoints = command.endpoints,
       .timed = open.timed(),
       .in_parts = open.hands_over_in_parts() && command.endpoints == 1});
  return terms;
}

}  // namespace tributary::service
