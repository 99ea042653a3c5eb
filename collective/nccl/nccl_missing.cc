#include "collective/nccl/nccl.h"

namespace tributary::collective {

std::string WhyNoNccl() {
  return "this build has no NCCL: nccl.h was not found when it was configured";
}

Status CreateNcclCommunicator(const NcclOptions&, Rendezvous&, Deadline,
                              std::unique_ptr<DeviceCommunicator>*) {
  return {StatusCode::kFailedPrecondition, WhyNoNccl()};
}

}  // namespace tributary::collective
