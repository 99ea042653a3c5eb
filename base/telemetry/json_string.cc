#include "base/telemetry/json_string.h"

#include <nlohmann/json.hpp>

namespace tributary::telemetry {

std::string JsonString(absl::string_view text) {
  const nlohmann::json value(std::string{text});
  return value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace tributary::telemetry
