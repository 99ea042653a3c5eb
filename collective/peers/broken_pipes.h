// Keeps writes to sockets whose peer is gone from ending the process.
#pragma once

namespace tributary::collective {

// Ignores SIGPIPE from now on, unless the process handles it. Without it such a write ends the
// process by the signal instead of returning the error.
void IgnoreBrokenPipes();

}  // namespace tributary::collective
