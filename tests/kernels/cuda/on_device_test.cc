// Whose device CUDA is asked about, without a GPU: the current device is a variable here.
#include "kernels/cuda/launch/on_device.h"

#include <gtest/gtest.h>

#include <vector>

namespace tributary::cuda {
namespace {

struct FakeDevices {
  static inline int current = 0;
  static inline cudaError_t get_error = cudaSuccess;
  static inline std::vector<int> refused;  // devices that cannot be made current
  static inline std::vector<int> set;      // every device that was made current, in order

  static cudaError_t Get(int* device) {
    *device = current;
    return get_error;
  }
  static cudaError_t Set(int device) {
    for (const int d : refused) {
      if (d == device) return cudaErrorInvalidDevice;
    }
    set.push_back(device);
    current = device;
    return cudaSuccess;
  }
};

class OnDeviceTest : public testing::Test {
 protected:
  void SetUp() override {
    FakeDevices::current = 0;
    FakeDevices::get_error = cudaSuccess;
    FakeDevices::refused.clear();
    FakeDevices::set.clear();
    seen_.clear();
  }

  // Asks about `device`, and notes which device was current meanwhile.
  cudaError_t Ask(int device, cudaError_t answer = cudaSuccess) {
    return OnDevice<FakeDevices>(device, [&] {
      seen_.push_back(FakeDevices::current);
      return answer;
    });
  }

  std::vector<int> seen_;
};

TEST_F(OnDeviceTest, TheDeviceThatIsNamedIsAskedAndTheCurrentOneStaysCurrent) {
  for (const int device : {3, 1, 0}) {
    EXPECT_EQ(Ask(device), cudaSuccess);
    EXPECT_EQ(seen_.back(), device);
    EXPECT_EQ(FakeDevices::current, 0);
  }
  FakeDevices::current = 2;
  EXPECT_EQ(Ask(0), cudaSuccess);
  EXPECT_EQ(seen_.back(), 0);
  EXPECT_EQ(FakeDevices::current, 2);
}

TEST_F(OnDeviceTest, TheCurrentDeviceIsNotSetOnceMore) {
  EXPECT_EQ(Ask(0), cudaSuccess);
  EXPECT_EQ(seen_, std::vector<int>{0});
  EXPECT_TRUE(FakeDevices::set.empty());  // which would create a context where there is none
}

TEST_F(OnDeviceTest, AFailureLeavesTheCurrentDeviceAsItWas) {
  EXPECT_EQ(Ask(1, cudaErrorInvalidValue), cudaErrorInvalidValue);
  EXPECT_EQ(seen_, std::vector<int>{1});
  EXPECT_EQ(FakeDevices::current, 0);
}

TEST_F(OnDeviceTest, ADeviceThatCannotBeCurrentIsNotAskedAbout) {
  FakeDevices::refused = {1};
  EXPECT_EQ(Ask(1), cudaErrorInvalidDevice);
  EXPECT_TRUE(seen_.empty());
  EXPECT_EQ(FakeDevices::current, 0);
  FakeDevices::get_error = cudaErrorNoDevice;
  EXPECT_EQ(Ask(2), cudaErrorNoDevice);
  EXPECT_TRUE(seen_.empty());
}

TEST_F(OnDeviceTest, AFailureToComeBackIsReported) {
  FakeDevices::refused = {0};
  EXPECT_EQ(Ask(1), cudaErrorInvalidDevice);
  EXPECT_EQ(seen_, std::vector<int>{1});
}

}  // namespace
}  // namespace tributary::cuda
