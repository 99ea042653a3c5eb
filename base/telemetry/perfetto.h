// Spans as a trace in Perfetto's own format, which ui.perfetto.dev and trace_processor open:
// https://perfetto.dev/docs/reference/synthetic-track-event
//
// Times are nanoseconds. Each rank is a process of the trace; the coordinator's calls and steps are
// threads of another. What overlaps lies on threads beside each other ("calls", "calls 2"), so that
// the slices of a thread always nest.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "base/telemetry/trace.h"

namespace tributary::telemetry {

// `process` is the name of what is no rank. `to_wall` is what a time of the spans' clock lacks to
// the time since 1970.
std::string PerfettoTrace(std::vector<Span> spans, absl::string_view process,
                          std::chrono::nanoseconds to_wall);

}  // namespace tributary::telemetry
