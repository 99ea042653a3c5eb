// What `tributary limits` prints: text from a reply, nothing else, so that tests can look at it.
#pragma once

#include <string>

#include "service/cli/terminal.h"
#include "tributary/v1/attention.pb.h"

namespace tributary::cli {

// What a service accepts and what one client may have, then what caches each backend serves and how
// precise f32 outputs are.
std::string LimitsReport(const v1::GetLimitsReply& limits, const Style& style);

}  // namespace tributary::cli
