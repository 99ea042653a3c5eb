// What `tributary top` shows: text from two replies, nothing else, so that tests can look at it.
#pragma once

#include <string>

#include "service/cli/terminal.h"
#include "tributary/v1/attention.pb.h"

namespace tributary::cli {

// The group, what happened in the `seconds` between the replies, the workers and the caches.
std::string TopReport(const v1::GetTopologyReply& before, const v1::GetTopologyReply& after,
                      double seconds, const Style& style);

}  // namespace tributary::cli
