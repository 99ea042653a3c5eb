// What every function of the C interface needs: statuses as codes and errors, and structures of
// callers that were built with another version.
#pragma once

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status/errors.h"
#include "service/client/c/tributary.h"
#include "service/client/client.h"

struct tributary_error {
  tributary_code code;
  std::string message;
  std::string field;
  int64_t retry_delay_ms;
  int64_t length;
  uint64_t lost_sequence;
  int32_t lost_layer;
  std::vector<tributary_range> missing;
};

struct tributary_client {
  std::unique_ptr<tributary::client::Client> client;
  tributary::client::ConnectOptions options;  // for sessions, which have connections of their own
};

namespace tributary::client {

// The status's code. `error`, if it is wanted, receives what else the status says; it is not
// touched for OK.
tributary_code Report(const absl::Status& status, tributary_error** error);

// Runs what returns a status; what it throws becomes one.
template <typename Body>
tributary_code Guarded(tributary_error** error, const Body& body) {
  try {
    return Report(body(), error);
  } catch (const std::bad_alloc&) {
    return Report(absl::Status(absl::StatusCode::kResourceExhausted, "out of memory"), error);
  } catch (const std::exception& thrown) {
    return Report(absl::Status(absl::StatusCode::kInternal, thrown.what()), error);
  }
}

// INVALID_ARGUMENT, with the argument as its field, where the caller handed NULL over for something
// that there must be.
inline absl::Status Present(const void* given, absl::string_view what) {
  return given == nullptr ? InvalidField(what, "is missing") : absl::OkStatus();
}

// Guarded, of a body that uses what the argument `what` points to.
template <typename Body>
tributary_code GuardedWith(const void* given, absl::string_view what, tributary_error** error,
                           const Body& body) {
  return Guarded(error, [&]() -> absl::Status {
    if (given == nullptr) return Present(given, what);
    return body();
  });
}

// The caller's structure, which may be of another version, as this one's. INVALID_ARGUMENT when its
// size cannot be right.
template <typename T>
absl::StatusOr<T> Known(const T* given, absl::string_view what) {
  if (given == nullptr) return InvalidField(what, "is missing");
  if (given->size < sizeof(given->size)) {
    return InvalidField(absl::StrCat(what, ".size"), "must be the structure's size");
  }
  T known{};
  std::memcpy(&known, given, std::min(given->size, sizeof(T)));
  return known;
}

inline std::string Text(const char* text) { return text == nullptr ? "" : text; }

}  // namespace tributary::client
