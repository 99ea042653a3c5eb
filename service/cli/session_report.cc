#include "service/cli/session_report.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "service/cli/table.h"
#include "service/cli/units.h"

namespace tributary::cli {
namespace {

// "host" for "SESSION_MEMORY_HOST", "spinning warp" for "WAITING_SPINNING_WARP".
std::string Spoken(absl::string_view name, absl::string_view prefix) {
  absl::ConsumePrefix(&name, prefix);
  return absl::AsciiStrToLower(absl::StrReplaceAll(name, {{"_", " "}}));
}

std::string WaitingOf(const v1::SessionInfo& session) {
  if (session.waiting() == v1::WAITING_UNSPECIFIED) return "-";
  return Spoken(v1::Waiting_Name(session.waiting()), "WAITING_");
}

const v1::SessionInfo* FindSession(const v1::GetTopologyReply* topology, uint64_t id) {
  if (topology == nullptr) return nullptr;
  for (const v1::SessionInfo& session : topology->sessions()) {
    if (session.session_id() == id) return &session;
  }
  return nullptr;
}

}  // namespace

std::string SessionsReport(const v1::GetTopologyReply& now, const v1::GetTopologyReply* before,
                           double seconds, const Style& style) {
  if (now.sessions().empty()) return "";
  const bool rates = before != nullptr && seconds > 0;
  Table table({{"SESSION", Align::kRight},
               {"CLIENT"},
               {"CACHE"},
               {"MEMORY"},
               {"WAITING"},
               {"ROUND TRIP", Align::kRight},
               {"MAILBOX", Align::kRight},
               {"IN FLIGHT", Align::kRight},
               {rates ? "STEPS/S" : "STEPS", Align::kRight},
               {rates ? "LAYERS/S" : "LAYERS", Align::kRight},
               {"AGE", Align::kRight}});
  std::string warnings;
  for (const v1::SessionInfo& session : now.sessions()) {
    const v1::SessionInfo* was = FindSession(before, session.session_id());
    const auto shown = [&](uint64_t value, uint64_t value_before) {
      if (!rates) return Count(static_cast<int64_t>(value));
      return Rate(static_cast<double>(value - value_before) / seconds);
    };
    table.AddRow(
        {absl::StrCat(session.session_id()), session.client().empty() ? "-" : session.client(),
         session.cache_id(), Spoken(v1::SessionMemory_Name(session.memory()), "SESSION_MEMORY_"),
         WaitingOf(session),
         session.round_trip_seconds() > 0 ? Seconds(session.round_trip_seconds()) : "-",
         session.mailbox_bytes() > 0 ? Bytes(static_cast<double>(session.mailbox_bytes())) : "-",
         Count(session.steps_in_flight()),
         shown(session.steps_done(), was == nullptr ? 0 : was->steps_done()),
         shown(session.layers_done(), was == nullptr ? 0 : was->layers_done()),
         Seconds(session.age_seconds())});
    if (session.warning().empty()) continue;
    absl::StrAppend(
        &warnings,
        style.Yellow(absl::StrCat("session ", session.session_id(), ": ", session.warning())),
        "\n");
  }
  return absl::StrCat(table.Render(style), warnings);
}

}  // namespace tributary::cli
