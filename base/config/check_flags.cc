#include "base/config/check_flags.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status/errors.h"

namespace tributary {

absl::Status CheckAddress(absl::string_view flag, absl::string_view address) {
  if (absl::StartsWith(address, "unix:")) {
    if (address.size() > 5) return absl::OkStatus();
  } else if (const size_t colon = address.rfind(':');
             colon != absl::string_view::npos && colon > 0 && colon + 1 < address.size()) {
    return absl::OkStatus();
  }
  return InvalidField(flag, absl::StrCat("must be host:port or unix:/path, is '", address, "'"));
}

absl::Status CheckReadable(absl::string_view flag, const std::string& path) {
  if (path.empty()) return absl::OkStatus();
  struct stat info = {};
  if (access(path.c_str(), R_OK) != 0 || stat(path.c_str(), &info) != 0) {
    return InvalidField(flag, absl::StrCat("cannot read ", path, ": ", std::strerror(errno)));
  }
  if (S_ISDIR(info.st_mode)) return InvalidField(flag, absl::StrCat(path, " is a directory"));
  return absl::OkStatus();
}

}  // namespace tributary
