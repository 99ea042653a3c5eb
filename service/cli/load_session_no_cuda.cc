#include "service/cli/load_session.h"

namespace tributary::cli {

absl::StatusOr<std::unique_ptr<LoadSession>> OpenDeviceLoadSession(const LoadOptions& /*options*/,
                                                                   const std::string& /*cache_id*/,
                                                                   const LoadTensors& /*tensors*/) {
  return absl::UnimplementedError("--session_memory=device: this program was built without CUDA");
}

}  // namespace tributary::cli
