// What topology and stat print: text from replies, nothing else, so that tests can look at it.
#pragma once

#include <string>

#include "service/cli/terminal.h"
#include "tributary/v1/attention.pb.h"
#include "tributary/v1/diagnostics.pb.h"

namespace tributary::cli {

// The group in a line, then tables of workers, caches and, where listed, sequences with the tokens
// each rank holds of them.
std::string TopologyReport(const v1::GetTopologyReply& topology, const Style& style);

// Totals since the service started, and what a step and a request cost on average.
std::string StatisticsReport(const v1::GetTopologyReply& topology, const Style& style);

// One line of `stat --watch`: rates between two replies, and the line of titles above them.
std::string RatesTitle(const Style& style);
std::string RatesLine(const v1::Statistics& before, const v1::Statistics& after, double seconds);

// The steps of a flight record, a line each, oldest first.
std::string FlightReport(const v1::FlightRecord& record, const Style& style);

}  // namespace tributary::cli
