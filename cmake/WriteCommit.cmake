# Run by every build: writes OUTPUT, which defines tributary::BuildCommit(), when the commit of SOURCE is another one
# than it says. TRIBUTARY_COMMIT in the environment wins: an image is built from sources without their history.
set(commit "$ENV{TRIBUTARY_COMMIT}")
if(commit STREQUAL "")
  execute_process(COMMAND git -C ${SOURCE} rev-parse HEAD
                  OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
if(NOT commit MATCHES "^[0-9a-f]+$")
  set(commit unknown)
endif()
string(SUBSTRING "${commit}" 0 12 commit)
file(CONFIGURE OUTPUT ${OUTPUT} @ONLY CONTENT [[
#include "base/process/version.h"

namespace tributary {

const char* BuildCommit() { return "@commit@"; }

}  // namespace tributary
]])
