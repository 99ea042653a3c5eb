// What gRPC and Protobuf have to say goes into our log, in its format and at its level.
#pragma once

#include <memory>

#include "base/telemetry/log.h"

namespace tributary {

// Takes effect until the process ends, because their threads may outlive the caller. The last call
// counts. gRPC itself passes on no more than GRPC_VERBOSITY asks for (errors by default).
void LogLibrariesTo(std::shared_ptr<const telemetry::Logger> log);

}  // namespace tributary
