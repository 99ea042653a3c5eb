// The open sessions, as `topology` and `top` show them.
#pragma once

#include <string>

#include "service/cli/terminal.h"
#include "tributary/v1/attention.pb.h"

namespace tributary::cli {

// A table of them, and below it what would make one of them faster. Empty where none is open.
// `before`: as they were `seconds` ago, for rates; null: totals are shown.
std::string SessionsReport(const v1::GetTopologyReply& now, const v1::GetTopologyReply* before,
                           double seconds, const Style& style);

}  // namespace tributary::cli
