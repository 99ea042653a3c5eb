// Outputs in FP8 and NVFP4: the bytes are those of the f32 result of the same call, rounded as the
// proto says, whatever the number of ranks and the way of the call.
#include "tests/support/quantized_output.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "tests/service/model_host.h"
#include "tests/service/session_driver.h"
#include "tests/service/test_service.h"
#include "worker/rpc/dtype_conversion.h"

namespace tributary::service::testing {
namespace {

using ::grpc::StatusCode;

constexpr float kLayerScale = 0.013f;

v1::CacheSpec SpecWithScales() {
  v1::CacheSpec spec = SmallSpec();
  spec.set_interleave(8);
  spec.add_layer_specs();
  spec.add_layer_specs()->set_o_scale(kLayerScale);
  return spec;
}

std::string Bytes(const OutputFormat& format, const std::vector<float>& values) {
  const std::vector<uint8_t> bytes = test::QuantizedOutput(format, values);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

class QuantizedOutputTest : public ::testing::TestWithParam<int> {
 protected:
  // Repeats a call whose f32 result is known with an output of a format; `scale` 0: not the call's.
  void ExpectRounded(v1::AttendRequest request, const std::vector<float>& values, DType dtype,
                     float scale, float expected_scale) {
    request.mutable_output()->set_dtype(ToProto(dtype));
    if (scale > 0) request.set_o_scale(scale);
    v1::AttendReply reply;
    const grpc::Status status = Attend(service_.stub(), request, &reply);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(reply.output().dtype(), ToProto(dtype));
    EXPECT_EQ(reply.output().shape_size(), 3);
    EXPECT_EQ(reply.output().inline_(), Bytes({dtype, expected_scale}, values)) << Name(dtype);
  }
  // Every format of one call, which `host` made.
  void ExpectAllRounded(ModelHost& host, const v1::AttendRequest& request) {
    v1::AttendReply reply;
    const grpc::Status status = Attend(service_.stub(), request, &reply);
    ASSERT_TRUE(status.ok()) << status.error_message();
    host.Check(request, reply);  // against float64
    const std::vector<float> values = ValuesOf(reply.output());
    const float layer_scale = request.layer() == 1 ? kLayerScale : 1.0f;
    for (const DType dtype : {DType::kFp8E4M3, DType::kNvfp4}) {
      ExpectRounded(request, values, dtype, 0, layer_scale);
      ExpectRounded(request, values, dtype, 0.37f, 0.37f);
    }
  }

  TestService service_{{.workers = GetParam()}};
};
INSTANTIATE_TEST_SUITE_P(Ranks, QuantizedOutputTest, ::testing::Values(1, 3));

TEST_P(QuantizedOutputTest, CallsGiveTheF32ResultRoundedAsStated) {
  const v1::CacheSpec spec = SpecWithScales();
  ASSERT_TRUE(CreateCache(service_.stub(), "m", spec).ok());
  ModelHost host(&service_.stub(), "m", spec, DType::kF32, 5);
  for (const uint64_t sequence : {1, 2}) host.Open(sequence);
  for (const int32_t layer : {0, 1}) {
    SCOPED_TRACE(layer);
    ExpectAllRounded(host, host.MakeStep(layer, {{1, 75}, {2, 3}}));  // a prompt
    ExpectAllRounded(host, host.MakeStep(layer, {{2, 1}, {1, 1}}));
    ExpectAllRounded(host, host.MakeStep(layer, {{1, 5}}));
    ExpectAllRounded(host, host.MakeDraft(layer, {{1, 8}, {2, 4}}));
  }
}

TEST_P(QuantizedOutputTest, SessionsRoundWithTheScaleOfEachLayer) {
  const v1::CacheSpec spec = SpecWithScales();
  ASSERT_TRUE(CreateCache(service_.stub(), "m", spec).ok());
  ModelHost host(&service_.stub(), "m", spec, DType::kF32, 6);
  host.Open(1);
  std::vector<v1::AttendRequest> requests;
  std::vector<std::vector<float>> values;
  for (const int32_t layer : {0, 1}) {
    requests.push_back(host.MakeStep(layer, {{1, 9}}));
    v1::AttendReply reply;
    ASSERT_TRUE(Attend(service_.stub(), requests.back(), &reply).ok());
    values.push_back(ValuesOf(reply.output()));
  }
  for (const DType dtype : {DType::kFp8E4M3, DType::kNvfp4, DType::kBf16}) {
    v1::OpenSession open = MessagesSession(32);
    open.set_output_dtype(ToProto(dtype));
    SessionDriver session(service_.stub(), open);
    ASSERT_TRUE(session.is_open()) << session.Finish().error_message();
    session.Submit(SessionDriver::StepOf(1, requests));  // tokens that are held: a repeat
    ASSERT_FALSE(session.ReadAccepted().has_status());
    for (const size_t layer : {0, 1}) {
      session.SendLayer(1, requests[layer]);
      const std::string output = session.ReadLayer().output();
      if (dtype == DType::kBf16) {
        EXPECT_EQ(output.size(), 2 * values[layer].size());
        continue;
      }
      EXPECT_EQ(output, Bytes({dtype, layer == 1 ? kLayerScale : 1.0f}, values[layer]));
    }
    EXPECT_FALSE(session.ReadEnded().has_status());
  }
}

TEST(QuantizedOutputRefusalTest, FieldsAreNamed) {
  TestService service({.workers = 1});
  v1::CacheSpec spec = SpecWithScales();
  for (const float bad : {0.0f, -1.0f, std::numeric_limits<float>::infinity(),
                          std::numeric_limits<float>::quiet_NaN()}) {
    spec.mutable_layer_specs(1)->set_o_scale(bad);
    const grpc::Status status = CreateCache(service.stub(), "m", spec);
    EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(FieldOf(status), "spec.layer_specs[1].o_scale");
  }
  spec = SpecWithScales();
  ASSERT_TRUE(CreateCache(service.stub(), "m", spec).ok());
  spec.mutable_layer_specs(1)->set_o_scale(0.5f);
  EXPECT_EQ(CreateCache(service.stub(), "m", spec).error_code(), StatusCode::ALREADY_EXISTS);
  ASSERT_TRUE(Open(service.stub(), "m", 1).ok());
  const auto refused = [&](auto spoil) {
    v1::AttendRequest request = AttendOf(spec, "m", 1, 0, 2);
    spoil(request);
    v1::AttendReply reply;
    const grpc::Status status = Attend(service.stub(), request, &reply);
    EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
    return FieldOf(status);
  };
  using Request = v1::AttendRequest&;
  EXPECT_EQ(refused([](Request r) { r.mutable_output()->set_dtype(v1::DTYPE_FP8_E5M2); }),
            "output.dtype");
  EXPECT_EQ(refused([](Request r) { r.mutable_q()->set_dtype(v1::DTYPE_NVFP4); }), "q.dtype");
  EXPECT_EQ(refused([](Request r) { r.mutable_k()->set_dtype(v1::DTYPE_NVFP4); }), "k.dtype");
  EXPECT_EQ(refused([](Request r) { r.set_o_scale(0.5f); }), "o_scale");
  for (const float bad : {0.0f, -2.0f, std::numeric_limits<float>::quiet_NaN()}) {
    EXPECT_EQ(refused([&](Request r) {
                r.mutable_output()->set_dtype(v1::DTYPE_NVFP4);
                r.set_o_scale(bad);
              }),
              "o_scale");
  }
  EXPECT_EQ(refused([](Request r) {
              r.set_return_lse(true);
              r.mutable_lse()->set_dtype(v1::DTYPE_NVFP4);
            }),
            "lse.dtype");
  v1::OpenSession open = MessagesSession(8);
  open.set_output_dtype(v1::DTYPE_FP8_E5M2);
  EXPECT_EQ(FieldOf(SessionDriver(service.stub(), open).Finish()), "open.output_dtype");
  open.set_output_dtype(v1::DTYPE_NVFP4);
  open.set_q_dtype(v1::DTYPE_NVFP4);
  EXPECT_EQ(FieldOf(SessionDriver(service.stub(), open).Finish()), "open.q_dtype");
}

TEST(QuantizedOutputLimitsTest, LimitsNameTheTypesOfOutputs) {
  TestService service({.workers = 1});
  grpc::ClientContext context;
  v1::GetLimitsReply limits;
  ASSERT_TRUE(service.stub().GetLimits(&context, {}, &limits).ok());
  EXPECT_EQ(limits.tensor_dtypes_size(), 3);
  ASSERT_EQ(limits.output_dtypes_size(), 5);
  EXPECT_EQ(limits.output_dtypes(3), v1::DTYPE_FP8_E4M3);
  EXPECT_EQ(limits.output_dtypes(4), v1::DTYPE_NVFP4);
}

}  // namespace
}  // namespace tributary::service::testing
