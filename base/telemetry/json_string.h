// A text as a JSON string, quotes included. Bytes that are not UTF-8 become U+FFFD.
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace tributary::telemetry {

std::string JsonString(absl::string_view text);

}  // namespace tributary::telemetry
