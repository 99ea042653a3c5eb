#include "absl/strings/str_cat.h"
#include "base/process/version.h"

namespace tributary {

std::string BuildVersion() { return absl::StrCat(TRIBUTARY_VERSION, "-g", BuildCommit()); }

}  // namespace tributary
