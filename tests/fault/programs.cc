#include "tests/fault/programs.h"

#include <cstdlib>

namespace tributary::test {
namespace {

// Where it was built, or where `variable` says: tests may be carried to another machine.
std::string Program(const char* variable, const char* built) {
  const char* given = std::getenv(variable);
  return given == nullptr ? built : given;
}

std::string Coordinator() {
  return Program("TRIBUTARY_COORDINATOR_PROGRAM", TRIBUTARY_COORDINATOR_PROGRAM);
}

}  // namespace

std::unique_ptr<ChildProcess> StartWorker(const TemporaryDirectory& directory,
                                          const std::string& coordinator, int rank,
                                          std::vector<std::string> more_flags, Build build,
                                          Launcher launcher) {
  const std::string program =
      build == Build::kPrevious
          ? Program("TRIBUTARY_PREVIOUS_WORKER_PROGRAM", TRIBUTARY_PREVIOUS_WORKER_PROGRAM)
          : Program("TRIBUTARY_WORKER_PROGRAM", TRIBUTARY_WORKER_PROGRAM);
  std::vector<std::string> arguments = std::move(launcher);
  for (const std::string& argument :
       {program, "--coordinator=" + coordinator, "--rank=" + std::to_string(rank),
        std::string("--threads=1"), std::string("--reconnect_max=500ms")}) {
    arguments.push_back(argument);
  }
  arguments.insert(arguments.end(), more_flags.begin(), more_flags.end());
  return std::make_unique<ChildProcess>(std::move(arguments),
                                        directory.File("worker" + std::to_string(rank) + ".log"));
}

std::unique_ptr<ChildProcess> StartCoordinator(const TemporaryDirectory& directory, int workers,
                                               std::vector<std::string> more_flags,
                                               Launcher launcher) {
  std::vector<std::string> arguments = std::move(launcher);
  for (const std::string& argument :
       {Coordinator(), "--listen=" + PublicAddress(directory),
        "--worker_listen=" + WorkerAddress(directory), std::string("--admin_listen="),
        "--workers=" + std::to_string(workers)}) {
    arguments.push_back(argument);
  }
  arguments.insert(arguments.end(), more_flags.begin(), more_flags.end());
  return std::make_unique<ChildProcess>(std::move(arguments), directory.File("coordinator.log"));
}

std::unique_ptr<ChildProcess> StartEmbedded(const TemporaryDirectory& directory, int workers,
                                            std::vector<std::string> more_flags) {
  std::vector<std::string> arguments = {
      Coordinator(), "--listen=" + PublicAddress(directory),
      "--admin_listen=", "--embedded_workers=" + std::to_string(workers)};
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
