// What a worker holds as a message (worker.proto), and back.
#pragma once

#include "absl/status/statusor.h"
#include "tributary/v1/worker.pb.h"
#include "worker/holdings.h"

namespace tributary::worker {

v1::Holdings EncodeHoldings(const Holdings& holdings);
// kInvalidArgument names the field that is missing or unknown. Whether the numbers make sense is
// for whoever uses them to check.
absl::StatusOr<Holdings> DecodeHoldings(const v1::Holdings& message);

}  // namespace tributary::worker
