// Early returns for absl::Status and absl::StatusOr (this Abseil release carries none).
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define TRIBUTARY_RETURN_IF_ERROR(expression)              \
  do {                                                     \
    absl::Status tributary_status_ = (expression);         \
    if (!tributary_status_.ok()) return tributary_status_; \
  } while (false)

#define TRIBUTARY_CONCAT_INNER_(a, b) a##b
#define TRIBUTARY_CONCAT_(a, b) TRIBUTARY_CONCAT_INNER_(a, b)

// TRIBUTARY_ASSIGN_OR_RETURN(auto value, Compute());
#define TRIBUTARY_ASSIGN_OR_RETURN(declaration, expression)                                 \
  TRIBUTARY_ASSIGN_OR_RETURN_IMPL_(TRIBUTARY_CONCAT_(tributary_or_, __LINE__), declaration, \
                                   expression)
#define TRIBUTARY_ASSIGN_OR_RETURN_IMPL_(temporary, declaration, expression) \
  auto temporary = (expression);                                             \
  if (!temporary.ok()) return std::move(temporary).status();                 \
  declaration = *std::move(temporary)
