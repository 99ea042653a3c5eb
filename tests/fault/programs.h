// The programs under test, as processes: those that were built with the test, or the ones that the
// environment names in TRIBUTARY_COORDINATOR_PROGRAM, TRIBUTARY_WORKER_PROGRAM and
// TRIBUTARY_PREVIOUS_WORKER_PROGRAM.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/process.h"

namespace tributary::test {

enum class Build : uint8_t {
  kThis,
  kPrevious,  // it speaks the protocol version before this one, and says that it is another build
};

// What a program is started by: a program that replaces itself by it, and that one's arguments.
// Empty: nothing.
using Launcher = std::vector<std::string>;

// A tributary-worker that dials `coordinator` and asks for `rank` (-1: any). One thread, short
// pauses between attempts, log in `directory`.
std::unique_ptr<ChildProcess> StartWorker(const TemporaryDirectory& directory,
                                          const std::string& coordinator, int rank,
                                          std::vector<std::string> more_flags = {},
                                          Build build = Build::kThis, Launcher launcher = {});

// A tributary-coordinator that listens on Unix sockets in `directory` and waits for `workers`.
std::unique_ptr<ChildProcess> StartCoordinator(const TemporaryDirectory& directory, int workers,
                                               std::vector<std::string> more_flags = {},
                                               Launcher launcher = {});

// One whose workers are threads of its own.
std::unique_ptr<ChildProcess> StartEmbedded(const TemporaryDirectory& directory, int workers,
                                            std::vector<std::string> more_flags = {});

// Where coordinators listen.
std::string PublicAddress(const TemporaryDirectory& directory);
std::string WorkerAddress(const TemporaryDirectory& directory);

}  // namespace tributary::test
