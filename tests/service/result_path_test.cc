// Results on every way to a host: inline and in shared memory, in every type, from workers that
// write them themselves and from workers that send them, alone and with others in a step.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/cpu/backend.h"
#include "kernels/output_format.h"
#include "service/client/shared_region.h"
#include "service/workers/embedded_group.h"
#include "tests/service/model_host.h"
#include "tests/service/remote_like_group.h"
#include "tests/service/test_service.h"
#include "worker/rpc/dtype_conversion.h"

namespace tributary::service::testing {
namespace {

class ResultPathTest : public ::testing::TestWithParam<std::tuple<int, bool>> {
 protected:
  static std::unique_ptr<WorkerGroup> MakeGroup() {
    const auto [size, sends] = GetParam();
    if (sends) return std::make_unique<RemoteLikeGroup>(size);
    return CreateEmbeddedGroup({.workers = size, .threads = size});
  }
  void SetUp() override {
    ASSERT_TRUE(CreateCache(service_.stub(), "m", spec_).ok());
    auto memory = client::SharedRegion::Create(kBytes);
    ASSERT_TRUE(memory.ok());
    memory_ = *std::move(memory);
    v1::RegisterSharedMemoryRequest request;
    request.set_name("r");
    request.set_byte_size(kBytes);
    request.mutable_system()->set_key(memory_->key());
    v1::RegisterSharedMemoryReply reply;
    grpc::ClientContext context;
    ASSERT_TRUE(service_.stub().RegisterSharedMemory(&context, request, &reply).ok());
  }

  // A tensor of a reply, wherever it lies.
  std::string BytesOf(const v1::Tensor& tensor, size_t bytes) const {
    if (!tensor.has_shared_memory()) return tensor.inline_();
    const std::byte* at = memory_->data() + tensor.shared_memory().offset();
    return {reinterpret_cast<const char*>(at), bytes};
  }
  static void PlaceAt(uint64_t offset, const v1::Tensor& like, v1::DType dtype, v1::Tensor* asked) {
    asked->set_dtype(dtype);
    *asked->mutable_shape() = like.shape();
    asked->mutable_shared_memory()->set_region("r");
    asked->mutable_shared_memory()->set_offset(offset);
  }

  // Repeats a call whose f32 results are known, each way.
  void ExpectSameEachWay(v1::AttendRequest request, const v1::AttendReply& known) {
    constexpr float kScale = 0.37f;
    const std::vector<float> values = ValuesOf(known.output());
    request.set_return_lse(true);
    for (const DType dtype :
         {DType::kF32, DType::kBf16, DType::kF16, DType::kFp8E4M3, DType::kNvfp4}) {
      std::vector<std::byte> expected(OutputBytes(dtype, static_cast<int64_t>(values.size())));
      cpu::StoreOutput({dtype, kScale}, values.data(), values.size(), expected.data());
      const std::string output(reinterpret_cast<const char*>(expected.data()), expected.size());
      if (!IsUnscaled(dtype)) request.set_o_scale(kScale);
      for (const bool output_shared : {false, true}) {
        for (const bool lse_shared : {false, true}) {
          std::memset(memory_->data(), 0xa5, kBytes);
          request.clear_output();
          request.clear_lse();
          request.mutable_output()->set_dtype(ToProto(dtype));
          if (output_shared) {
            PlaceAt(64, known.output(), ToProto(dtype), request.mutable_output());
          }
          if (lse_shared) PlaceAt(kBytes / 2, known.lse(), v1::DTYPE_F32, request.mutable_lse());
          v1::AttendReply reply;
          const grpc::Status status = Attend(service_.stub(), request, &reply);
          ASSERT_TRUE(status.ok()) << status.error_message();
          EXPECT_EQ(reply.output().has_shared_memory(), output_shared);
          EXPECT_TRUE(BytesOf(reply.output(), output.size()) == output) << Name(dtype);
          EXPECT_EQ(reply.lse().has_shared_memory(), lse_shared);
          EXPECT_TRUE(BytesOf(reply.lse(), known.lse().inline_().size()) == known.lse().inline_());
          // Nothing beside it was touched.
          EXPECT_EQ(memory_->data()[63], std::byte{0xa5});
          EXPECT_EQ(memory_->data()[64 + output.size()], std::byte{0xa5});
        }
      }
      request.clear_o_scale();
    }
  }

  static constexpr uint64_t kBytes = 1 << 20;
  const v1::CacheSpec spec_ = SmallSpec();
  TestService service_{{.coordinator = {.shared_memory_prefixes = {"/"}}}, MakeGroup()};
  std::unique_ptr<client::SharedRegion> memory_;
};
INSTANTIATE_TEST_SUITE_P(Groups, ResultPathTest,
                         ::testing::Combine(::testing::Values(1, 3), ::testing::Bool()),
                         [](const auto& group) {
                           return std::string(std::get<1>(group.param) ? "Sending" : "Embedded") +
                                  std::to_string(std::get<0>(group.param));
                         });

TEST_P(ResultPathTest, EveryTypeInEveryPlace) {
  ModelHost host(&service_.stub(), "m", spec_, DType::kF32, 5);
  for (const uint64_t sequence : {1, 2}) host.Open(sequence);
  const auto expect = [&](v1::AttendRequest request) {
    request.set_return_lse(true);
    v1::AttendReply reply;
    const grpc::Status status = Attend(service_.stub(), request, &reply);
    ASSERT_TRUE(status.ok()) << status.error_message();
    host.Check(request, reply);  // against float64
    ExpectSameEachWay(request, reply);
  };
  expect(host.MakeStep(0, {{1, 75}, {2, 3}}));  // a prompt
  expect(host.MakeStep(0, {{2, 1}, {1, 1}}));
  expect(host.MakeDraft(0, {{1, 8}, {2, 4}}));
}

// Several callers share a step: to each its own, in its own type.
TEST_P(ResultPathTest, CallersOfAStepHaveTypesAndPlacesOfTheirOwn) {
  constexpr int kCallers = 6;
  constexpr DType kTypes[] = {DType::kBf16, DType::kF32, DType::kFp8E4M3};
  std::vector<v1::AttendRequest> requests;
  std::vector<std::vector<float>> values;
  for (uint64_t sequence = 1; sequence <= kCallers; ++sequence) {
    ASSERT_TRUE(Open(service_.stub(), "m", sequence).ok());
    requests.push_back(AttendOf(spec_, "m", sequence, 0, 3, 0, sequence));
    v1::AttendReply reply;
    requests.back().mutable_output()->set_dtype(v1::DTYPE_F32);
    ASSERT_TRUE(Attend(service_.stub(), requests.back(), &reply).ok());
    values.push_back(ValuesOf(reply.output()));
    const DType dtype = kTypes[sequence % std::size(kTypes)];
    requests.back().mutable_output()->set_dtype(ToProto(dtype));
    requests.back().set_request_id(sequence);
    if (sequence % 2 == 0) {
      PlaceAt(sequence * 65536, reply.output(), ToProto(dtype), requests.back().mutable_output());
    }
  }
  grpc::ClientContext context;
  const auto stream = service_.stub().AttendStream(&context);
  for (const v1::AttendRequest& request : requests) ASSERT_TRUE(stream->Write(request));
  for (int i = 0; i < kCallers; ++i) {
    v1::AttendReply reply;
    ASSERT_TRUE(stream->Read(&reply));
    ASSERT_EQ(reply.status().code(), 0) << reply.status().message();
    const size_t caller = reply.request_id() - 1;
    const DType dtype = kTypes[(caller + 1) % std::size(kTypes)];
    std::vector<std::byte> expected(
        OutputBytes(dtype, static_cast<int64_t>(values[caller].size())));
    cpu::StoreOutput({dtype}, values[caller].data(), values[caller].size(), expected.data());
    const std::string got = BytesOf(reply.output(), expected.size());
    ASSERT_EQ(got.size(), expected.size());
    EXPECT_EQ(std::memcmp(got.data(), expected.data(), got.size()), 0) << "caller " << caller;
  }
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
}

}  // namespace
}  // namespace tributary::service::testing
