#include "base/status/errors.h"

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace tributary {

absl::Status FieldError(absl::StatusCode code, absl::string_view field, absl::string_view message) {
  absl::Status status(code, absl::StrCat(field, ": ", message));
  status.SetPayload(kFieldPayloadUrl, absl::Cord(field));
  return status;
}

absl::Status InvalidField(absl::string_view field, absl::string_view message) {
  return FieldError(absl::StatusCode::kInvalidArgument, field, message);
}

std::string FieldOf(const absl::Status& status) {
  const absl::optional<absl::Cord> field = status.GetPayload(kFieldPayloadUrl);
  return field.has_value() ? std::string(*field) : std::string();
}

absl::Status RenameField(absl::string_view field, const absl::Status& status) {
  const std::string before = FieldOf(status);
  if (before.empty()) return status;
  absl::string_view message = status.message();
  const bool names_it = absl::ConsumePrefix(&message, absl::StrCat(before, ": "));
  absl::Status renamed(status.code(),
                       absl::StrCat(names_it ? absl::StrCat(field, ": ") : "", message));
  status.ForEachPayload([&renamed](absl::string_view url, const absl::Cord& payload) {
    renamed.SetPayload(url, payload);
  });
  renamed.SetPayload(kFieldPayloadUrl, absl::Cord(field));
  return renamed;
}

absl::Status PrefixField(absl::string_view prefix, const absl::Status& status) {
  if (status.ok()) return status;
  return RenameField(absl::StrCat(prefix, ".", FieldOf(status)), status);
}

}  // namespace tributary
