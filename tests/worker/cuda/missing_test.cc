// A build without CUDA says so.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "worker/cuda_backend.h"

namespace tributary::worker::testing {
namespace {

using ::testing::HasSubstr;

TEST(CudaMissingTest, EveryQuestionIsAnsweredWithTheReason) {
  for (const absl::Status& status :
       {CreateCudaBackend({}).status(), CountGpus().status(), CheckGpus(0, 1)}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()), HasSubstr("this build has no CUDA"));
  }
}

}  // namespace
}  // namespace tributary::worker::testing
