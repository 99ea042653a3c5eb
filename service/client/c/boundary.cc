#include "service/client/c/boundary.h"

#include <optional>

namespace tributary::client {
namespace {

tributary_error Describe(const absl::Status& status) {
  const auto delay = RetryDelayOf(status);
  return {.code = static_cast<tributary_code>(status.code()),
          .message = std::string(status.message()),
          .field = FieldOf(status),
          .retry_delay_ms = delay.has_value() ? delay->count() : -1,
          .length = LengthOf(status).value_or(-1)};
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
