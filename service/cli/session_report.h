// How `topology` and `top` show the open sessions.
#pragma once

#include <string>

#include "service/cli/terminal.h"
#include "tributary/v1/attention.pb.h"

namespace tributary::cli {

// A table of the open sessions, with hints below it on what would make one faster. Empty where none
// is open. `before` is the reply of `seconds` ago, from which rates are computed; where it is null,
// totals are shown.
std::string SessionsReport(const v1::GetTopologyReply& now, const v1::GetTopologyReply* before,
                           double seconds, const Style& style);

}  // namespace tributary::cli
