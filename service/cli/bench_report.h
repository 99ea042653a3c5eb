// What bench prints.
#pragma once

#include <string>

#include "service/cli/load.h"
#include "service/cli/terminal.h"

namespace tributary::cli {

// The set-up, throughput, percentiles and errors. Sorts the samples.
std::string BenchReport(const LoadOptions& options, LoadResult& result, bool embedded,
                        const Style& style);
// The same as one JSON object; times in seconds, sizes in bytes.
std::string BenchJson(const LoadOptions& options, LoadResult& result);

}  // namespace tributary::cli
