// Errors that name the field at fault.
//
// A status made here carries the field's path as a payload, so that the floor that speaks RPC can
// put it into google.rpc.BadRequest. This floor knows nothing of Protobuf; the payload is the plain
// path. Paths are written as the public API spells them: "layer_specs[3].sinks".
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace tributary {

// Where the path lies in absl::Status. Statuses travel between processes of different builds: never
// change it.
inline constexpr char kFieldPayloadUrl[] = "tributary.v1/field";

// "<field>: <message>", with the field as payload.
absl::Status FieldError(absl::StatusCode code, absl::string_view field, absl::string_view message);

// FieldError with kInvalidArgument.
absl::Status InvalidField(absl::string_view field, absl::string_view message);

// The field's path; empty when the status names none.
std::string FieldOf(const absl::Status& status);

// The same error, details included, of a field that the caller knows by another name. A status that
// names no field (or is OK) comes back as it is.
absl::Status RenameField(absl::string_view field, const absl::Status& status);

// The same error one message further out: the field "q" under the prefix "spec" is "spec.q".
// A status that names no field (or is OK) comes back as it is.
absl::Status PrefixField(absl::string_view prefix, const absl::Status& status);

}  // namespace tributary
