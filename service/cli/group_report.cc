#include "service/cli/group_report.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "service/cli/units.h"

namespace tributary::cli {

std::string GroupLine(const v1::GetTopologyReply& topology, const Style& style,
                      const std::string& more) {
  const bool ready = topology.state() == v1::GROUP_STATE_READY;
  const auto connected = std::count_if(topology.workers().begin(), topology.workers().end(),
                                       [](const auto& worker) { return worker.connected(); });
  return absl::StrCat(ready ? style.Green("ready") : style.Yellow("forming"), "  epoch ",
                      topology.epoch(), "  ", connected, " of ", topology.workers_size(),
                      " workers", more, topology.version().empty() ? "" : "  version ",
                      topology.version(),
                      MixedBuilds(topology) ? style.Yellow("  mixed builds") : "", "\n");
}

bool MixedBuilds(const v1::GetTopologyReply& topology) {
  return std::any_of(topology.workers().begin(), topology.workers().end(),
                     [&](const v1::WorkerInfo& worker) {
                       return worker.connected() && !worker.version().empty() &&
                              worker.version() != topology.version();
                     });
}

std::vector<Table::Column> WorkerColumns(const v1::GetTopologyReply& topology) {
  std::vector<Table::Column> columns = {{"RANK", Align::kRight},
                                        {"ADDRESS"},
                                        {"BACKEND"},
                                        {"STATE"},
                                        {"MEMORY", Align::kRight},
                                        {"TOKENS", Align::kRight},
                                        {"BUSY", Align::kRight}};
  if (MixedBuilds(topology)) {
    columns.push_back({"BUILD"});
    columns.push_back({"PROTOCOL", Align::kRight});
  }
  return columns;
}

std::vector<std::string> WorkerCells(const v1::GetTopologyReply& topology,
                                     const v1::WorkerInfo& worker, const std::string& busy,
                                     const Style& style) {
  std::vector<std::string> cells = {
      absl::StrCat(worker.rank()),
      worker.address(),
      worker.backend(),
      worker.connected() ? style.Green("connected") : style.Red("lost"),
      Bytes(static_cast<double>(worker.memory_bytes())),
      Count(worker.tokens()),
      busy};
  if (MixedBuilds(topology)) {
    const bool other = worker.version() != topology.version();
    cells.push_back(other ? style.Yellow(worker.version()) : worker.version());
    cells.push_back(absl::StrCat(worker.protocol_version()));
  }
  return cells;
}

}  // namespace tributary::cli
