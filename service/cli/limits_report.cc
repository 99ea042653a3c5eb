#include "service/cli/limits_report.h"

#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "service/cli/dtype_name.h"
#include "service/cli/table.h"
#include "service/cli/units.h"

namespace tributary::cli {
namespace {

std::string OrNoLimit(int64_t limit) { return limit == 0 ? "no limit" : Count(limit); }
std::string OrNoLimitBytes(int64_t limit) {
  return limit == 0 ? "no limit" : Bytes(static_cast<double>(limit));
}

template <typename DTypes>
std::string Names(const DTypes& dtypes) {
  return absl::StrJoin(dtypes, ", ", [](std::string* out, int dtype) {
    absl::StrAppend(out, DTypeName(static_cast<v1::DType>(dtype)));
  });
}

std::string ServiceTable(const v1::GetLimitsReply& limits, const Style& style) {
  Table table({{"SERVICE"}, {""}});
  table.AddRow({"a message", Bytes(static_cast<double>(limits.max_message_bytes()))});
  table.AddRow({"calls in flight on a stream", OrNoLimit(limits.max_calls_per_stream())});
  table.AddRow({"sequences of a cache", OrNoLimit(limits.max_sequences())});
  table.AddRow(
      {"a step that calls share", absl::StrCat(Count(limits.batch_max_rows()), " rows, ",
                                               Count(limits.batch_max_entries()), " entries")});
  table.AddRow({"a step of one call", Bytes(static_cast<double>(limits.max_step_bytes()))});
  table.AddRow({"wait of a call", Seconds(limits.max_call_seconds())});
  table.AddRow({"time of a step", Seconds(limits.step_timeout_seconds())});
  table.AddRow({"layers, KV heads",
                absl::StrCat(Count(limits.max_layers()), ", ", Count(limits.max_kv_heads()))});
  table.AddRow({"shared memory", limits.shared_memory() ? "yes" : "not for this caller"});
  table.AddRow({"tensors", Names(limits.tensor_dtypes())});
  table.AddRow({"outputs", Names(limits.output_dtypes())});
  return table.Render(style);
}

std::string ClientTable(const v1::PerClientLimits& client, const Style& style) {
  Table table({{"ONE CLIENT"}, {""}});
  table.AddRow({"calls in flight", OrNoLimit(client.calls())});
  table.AddRow({"bytes of calls in flight", OrNoLimitBytes(client.message_bytes())});
  table.AddRow({"streams", OrNoLimit(client.streams())});
  table.AddRow({"sequences", OrNoLimit(client.sequences())});
  table.AddRow({"pages", OrNoLimit(client.pages())});
  table.AddRow({"caches", OrNoLimit(client.caches())});
  table.AddRow({"bytes of caches", OrNoLimitBytes(client.cache_bytes())});
  table.AddRow({"sessions", OrNoLimit(client.sessions())});
  table.AddRow({"bytes of mailboxes", OrNoLimitBytes(client.mailbox_bytes())});
  return table.Render(style);
}

// "causal (left_window, soft_cap, sinks)".
std::string ModeText(const v1::ModeLimits& mode) {
  constexpr size_t kPrefix = sizeof("ATTEND_MODE_") - 1;
  std::vector<std::string> can;
  const auto add = [&](bool offered, const char* what) {
    if (offered) can.emplace_back(what);
  };
  add(mode.left_window(), "left_window");
  add(mode.right_window(), "right_window");
  add(mode.anchor_window(), "anchor_window");
  add(mode.causal_block(), "causal_block");
  add(mode.soft_cap(), "soft_cap");
  add(mode.sinks(), "sinks");
  const std::string name = absl::AsciiStrToLower(v1::AttendMode_Name(mode.mode()).substr(kPrefix));
  return can.empty() ? name : absl::StrCat(name, " (", absl::StrJoin(can, ", "), ")");
}

std::string BackendTables(const v1::BackendLimits& backend, const Style& style) {
  Table table({{absl::StrCat("BACKEND ", absl::AsciiStrToUpper(backend.name()))}, {""}});
  for (const v1::ModeLimits& mode : backend.modes()) table.AddRow({"mode", ModeText(mode)});
  table.AddRow({"head dims", absl::StrJoin(backend.head_dims(), ", ",
                                           [](std::string* out, const v1::HeadDimLimits& dims) {
                                             absl::StrAppend(out, dims.head_dim());
                                             if (dims.value_head_dim() != dims.head_dim()) {
                                               absl::StrAppend(out, "/", dims.value_head_dim());
                                             }
                                           })});
  table.AddRow({"page sizes", absl::StrJoin(backend.page_sizes(), ", ")});
  table.AddRow({"kv dtypes", Names(backend.kv_dtypes())});
  table.AddRow({"query heads per KV head", Count(backend.max_gqa_ratio())});
  table.AddRow({"deterministic", backend.deterministic() ? "can be" : "no"});
  std::string out = table.Render(style);
  if (backend.f32_output_errors().empty()) return out;
  Table errors(
      {{"F32 OUTPUT OF Q"}, {"KV"}, {"ERROR", Align::kRight}, {"OF MANY ROWS", Align::kRight}});
  for (const v1::OutputError& error : backend.f32_output_errors()) {
    errors.AddRow({DTypeName(error.q_dtype()), DTypeName(error.kv_dtype()),
                   absl::StrFormat("%.0e", error.few_rows()),
                   absl::StrFormat("%.0e", error.many_rows())});
  }
  return absl::StrCat(out, "\n", errors.Render(style));
}

}  // namespace

std::string LimitsReport(const v1::GetLimitsReply& limits, const Style& style) {
  std::string out =
      absl::StrFormat("%d %s, %s%s\n", limits.ranks(), limits.ranks() == 1 ? "worker" : "workers",
                      limits.device(), limits.deterministic() ? ", deterministic" : "");
  absl::StrAppend(&out, "\n", ServiceTable(limits, style), "\n",
                  ClientTable(limits.per_client(), style));
  for (const v1::BackendLimits& backend : limits.backends()) {
    absl::StrAppend(&out, "\n", BackendTables(backend, style));
  }
  return out;
}

}  // namespace tributary::cli
