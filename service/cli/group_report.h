// What every report says of the group of workers.
#pragma once

#include <string>
#include <vector>

#include "service/cli/table.h"
#include "service/cli/terminal.h"
#include "tributary/v1/attention.pb.h"

namespace tributary::cli {

// The group in a line: its state, its epoch, how many of its workers are connected, and the
// service's version, and whether builds are mixed. `more` stands behind the workers: "  up 2 h 5
// min", for example.
std::string GroupLine(const v1::GetTopologyReply& topology, const Style& style,
                      const std::string& more = "");

// Whether workers are of other builds than the coordinator.
bool MixedBuilds(const v1::GetTopologyReply& topology);

// The columns of a table of workers, and a worker's cells. Builds and protocol versions are shown
// where builds are mixed. A report adds columns at the end.
std::vector<Table::Column> WorkerColumns(const v1::GetTopologyReply& topology);
std::vector<std::string> WorkerCells(const v1::GetTopologyReply& topology,
                                     const v1::WorkerInfo& worker, const std::string& busy,
                                     const Style& style);

}  // namespace tributary::cli
