// Calls whose tensors lie in memory of a GPU, as messages. No GPU is asked.
#include "service/client/attend_message.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>

namespace tributary::client {
namespace {

class FakeRegion final : public DeviceRegion {
 public:
  const std::string& name() const override { return name_; }
  const DeviceMemory& memory() const override { return memory_; }

 private:
  const std::string name_ = "gpu";
  const DeviceMemory memory_{.data = reinterpret_cast<const void*>(0x7000'0000), .bytes = 65536};
};

class DeviceCallTest : public ::testing::Test {
 protected:
  DeviceCallTest() {
    call_.entries = {{.sequence_id = 1, .query_rows = 2, .new_tokens = 2}};
    call_.dtype = v1::DTYPE_BF16;
    call_.q_heads = 4;
    call_.kv_heads = 2;
    call_.head_dim = 64;
    call_.device = std::make_shared<FakeRegion>();
    call_.q = At(0);
    call_.k = At(4096);
    call_.v = At(8192);
    call_.output = At(12288);
    call_.lse = static_cast<float*>(At(16384));
  }
  static void* At(int64_t offset) { return reinterpret_cast<void*>(0x7000'0000 + offset); }

  AttendCall call_;
};

TEST_F(DeviceCallTest, TensorsAreNamedAndNothingIsCopied) {
  ASSERT_TRUE(CheckCall(call_).ok());
  v1::AttendRequest request = DescribeCall(call_);
  PlaceTensors(call_, {}, nullptr, request);
  const auto expect = [](const v1::Tensor& tensor, uint64_t offset) {
    EXPECT_EQ(tensor.shared_memory().region(), "gpu");
    EXPECT_EQ(tensor.shared_memory().offset(), offset);
  };
  expect(request.q(), 0);
  expect(request.k(), 4096);
  expect(request.v(), 8192);
  expect(request.output(), 12288);
  expect(request.lse(), 16384);
  EXPECT_EQ(request.output().dtype(), v1::DTYPE_BF16);
  EXPECT_EQ(request.lse().shape_size(), 2);
  EXPECT_TRUE(CheckSize(call_, request, 1000).ok()) << "far less than the tensors";
  EXPECT_TRUE(TakeResults(call_, {}, nullptr, v1::AttendReply()).ok());

  AppendCall append{.entries = {{1, 0, 2}}, .dtype = v1::DTYPE_BF16, .k = At(64), .v = At(1024)};
  append.kv_heads = 2;
  append.head_dim = 64;
  append.device = call_.device;
  ASSERT_TRUE(CheckCall(append).ok());
  v1::AppendRequest appended = DescribeCall(append);
  PlaceTensors(append, {}, nullptr, appended);
  expect(appended.k(), 64);
  expect(appended.v(), 1024);
}

TEST_F(DeviceCallTest, PointersOutsideAreRefusedAndNamed) {
  const auto refused = [&](auto AttendCall::*field, int64_t offset) {
    AttendCall call = call_;
    call.*field = static_cast<std::remove_reference_t<decltype(call.*field)>>(At(offset));
    return FieldOf(CheckCall(call));
  };
  EXPECT_EQ(refused(&AttendCall::q, -16), "q");
  EXPECT_EQ(refused(&AttendCall::k, 65536 - 256), "k");
  EXPECT_EQ(refused(&AttendCall::v, 65536), "v");
  EXPECT_EQ(refused(&AttendCall::output, 65536 - 16), "output");
  EXPECT_EQ(refused(&AttendCall::lse, 65536 - 16), "lse");
}

}  // namespace
}  // namespace tributary::client
