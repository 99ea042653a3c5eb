#include "collective/peers/broken_pipes.h"

#include <csignal>

namespace tributary::collective {

void IgnoreBrokenPipes() {
  struct sigaction current = {};
  if (sigaction(SIGPIPE, nullptr, &current) == 0 && current.sa_handler == SIG_DFL) {
    current.sa_handler = SIG_IGN;
    sigaction(SIGPIPE, &current, nullptr);
  }
}

}  // namespace tributary::collective
