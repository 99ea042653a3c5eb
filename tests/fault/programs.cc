#include "tests/fault/programs.h"

namespace tributary::test {

std::unique_ptr<ChildProcess> StartWorker(const TemporaryDirectory& directory,
                                          const std::string& coordinator, int rank,
                                          std::vector<std::string> more_flags) {
  std::vector<std::string> arguments = {TRIBUTARY_WORKER_PROGRAM, "--coordinator=" + coordinator,
                                        "--rank=" + std::to_string(rank), "--threads=1",
                                        "--reconnect_max=500ms"};
  arguments.insert(arguments.end(), more_flags.begin(), more_flags.end());
  return std::make_unique<ChildProcess>(std::move(arguments),
                                        directory.File("worker" + std::to_string(rank) + ".log"));
}

std::unique_ptr<ChildProcess> StartCoordinator(const TemporaryDirectory& directory, int workers,
                                               std::vector<std::string> more_flags) {
  std::vector<std::string> arguments = {TRIBUTARY_COORDINATOR_PROGRAM,
                                        "--listen=" + PublicAddress(directory),
                                        "--worker_listen=" + WorkerAddress(directory),
                                        "--admin_listen=", "--workers=" + std::to_string(workers)};
  arguments.insert(arguments.end(), more_flags.begin(), more_flags.end());
  return std::make_unique<ChildProcess>(std::move(arguments), directory.File("coordinator.log"));
}

std::string PublicAddress(const TemporaryDirectory& directory) {
  return "unix:" + directory.File("public.sock");
}

std::string WorkerAddress(const TemporaryDirectory& directory) {
  return "unix:" + directory.File("workers.sock");
}

}  // namespace tributary::test
