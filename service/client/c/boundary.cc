#include "service/client/c/boundary.h"

#include <optional>
#include <utility>
#include <vector>

namespace tributary::client {
namespace {

tributary_error Describe(const absl::Status& status) {
  const auto delay = RetryDelayOf(status);
  const auto missing = MissingTokensOf(status).value_or(MissingTokens());
  std::vector<tributary_range> ranges;
  for (const PositionRange& range : missing.ranges) ranges.push_back({range.begin, range.end});
  return {.code = static_cast<tributary_code>(status.code()),
          .message = std::string(status.message()),
          .field = FieldOf(status),
          .retry_delay_ms = delay.has_value() ? delay->count() : -1,
          .length = LengthOf(status).value_or(-1),
          .lost_sequence = missing.sequence,
          .lost_layer = missing.layer,
          .missing = std::move(ranges)};
}

}  // namespace

tributary_code Report(const absl::Status& status, tributary_error** error) {
  if (!status.ok() && error != nullptr) {
    // Without memory for the error its code remains.
    try {
      *error = std::make_unique<tributary_error>(Describe(status)).release();
    } catch (const std::bad_alloc&) {
      *error = nullptr;
    }
  }
  return static_cast<tributary_code>(status.code());
}

}  // namespace tributary::client
