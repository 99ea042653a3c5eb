// Tensors in memory of a GPU that a host shares by CUDA IPC: the same calls with tensors in
// messages give the same results; what cannot be shared is refused and leaves the service as it
// was; memory of a host that died is let go of. Service and host are processes of their own, as
// CUDA wants it.
#include <cuda_runtime.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "base/status/errors.h"
#include "kernels/cpu/backend.h"
#include "service/client/client.h"
#include "service/client/cuda_memory.h"
#include "tests/fault/programs.h"
#include "tests/support/process.h"
#include "tests/support/random.h"
#include "worker/cuda/ipc_opener.h"
#include "worker/cuda_backend.h"
#include "worker/rpc/dtype_conversion.h"

namespace tributary::test {
namespace {

using client::AttendCall;
using client::Client;
using client::DeviceMemory;
using client::DeviceRegion;
using ::testing::HasSubstr;

constexpr std::chrono::seconds kPatience{60};
constexpr int32_t kQHeads = 32, kKvHeads = 4, kHeadDim = 128;
constexpr size_t kBytes = size_t{16} << 20;
constexpr char kCache[] = "m";

class Allocation {
 public:
  explicit Allocation(size_t bytes, int gpu = 0) {
    EXPECT_EQ(cudaSetDevice(gpu), cudaSuccess);
    EXPECT_EQ(cudaMalloc(&data_, bytes), cudaSuccess);
  }
  ~Allocation() { cudaFree(data_); }
  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  void* data_ = nullptr;
};

std::vector<std::byte> AsType(const std::vector<float>& values, DType dtype) {
  std::vector<std::byte> bytes(values.size() * SizeOf(dtype));
  cpu::Convert(DType::kF32, values.data(), dtype, bytes.data(), values.size());
  return bytes;
}

std::vector<float> FromType(const std::vector<std::byte>& bytes, DType dtype) {
  std::vector<float> values(bytes.size() / SizeOf(dtype));
  cpu::Convert(dtype, bytes.data(), DType::kF32, values.data(), values.size());
  return values;
}

v1::CacheSpec Spec() {
  v1::CacheSpec spec;
  spec.set_layers(2);
  spec.set_q_heads(kQHeads);
  spec.set_kv_heads(kKvHeads);
  spec.set_head_dim(kHeadDim);
  spec.set_capacity_tokens(1 << 16);
  spec.add_layer_specs();
  v1::LayerSpec* with_sinks = spec.add_layer_specs();
  for (int head = 0; head < kQHeads; ++head) with_sinks->add_sinks(0.1f * static_cast<float>(head));
  return spec;
}

// A call's values on the host, and its results.
struct Values {
  Values(int rows, DType type, uint64_t seed)
      : q(AsType(NormalValues(size_t(rows) * kQHeads * kHeadDim, seed), type)),
        k(AsType(NormalValues(size_t(rows) * kKvHeads * kHeadDim, seed + 1), type)),
        v(AsType(NormalValues(size_t(rows) * kKvHeads * kHeadDim, seed + 2), type)),
        output(q.size()),
        lse(size_t(rows) * kQHeads) {}

  std::vector<std::byte> q, k, v, output;
  std::vector<float> lse;
};

// How a service's workers are spread, and where the host's memory lies.
struct Case {
  int workers;
  int gpu;
  const char* exchange;
};

std::string NameOf(const ::testing::TestParamInfo<Case>& info) {
  return std::to_string(info.param.workers) + "_workers_memory_on_gpu_" +
         std::to_string(info.param.gpu) + "_exchange_" + info.param.exchange;
}

class DeviceMemoryTest : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    const Case& c = GetParam();
    const int needed = std::max(c.workers, c.gpu + 1);
    if (const absl::Status gpus = worker::CheckGpus(0, needed); !gpus.ok()) {
      GTEST_SKIP() << gpus.message();
    }
    Serve();
    client_ = Connect();
    ASSERT_NE(client_, nullptr);
    CreateCache();
  }
  void Serve() {
    coordinator_ =
        StartEmbedded(directory_, GetParam().workers,
                      {"--device=cuda", "--device_exchange=" + std::string(GetParam().exchange)});
  }
  void CreateCache() {
    ASSERT_TRUE(Eventually(kPatience, [&] { return client_->CreateCache(kCache, Spec()).ok(); }));
  }
  std::unique_ptr<Client> Connect() {
    auto client = Client::Connect({.target = PublicAddress(directory_), .timeout = kPatience});
    EXPECT_TRUE(client.ok()) << client.status();
    return client.ok() ? *std::move(client) : nullptr;
  }
  uint64_t Open() {
    const auto sequence = client_->OpenSequence(kCache);
    EXPECT_TRUE(sequence.ok()) << sequence.status();
    return sequence.value_or(0);
  }
  std::shared_ptr<const DeviceRegion> Share(const Allocation& allocation, size_t bytes = kBytes) {
    const auto memory = client::DescribeDeviceMemory(allocation.data(), bytes);
    EXPECT_TRUE(memory.ok()) << memory.status();
    if (!memory.ok()) return nullptr;
    auto region = client_->ShareDeviceMemory(*memory);
    EXPECT_TRUE(region.ok()) << region.status();
    return region.ok() ? *std::move(region) : nullptr;
  }

  static AttendCall Call(uint64_t sequence, int32_t layer, int64_t position, int32_t rows,
                         DType type) {
    AttendCall call;
    call.cache_id = kCache;
    call.layer = layer;
    call.entries = {{sequence, position, rows, rows}};
    call.dtype = ToProto(type);
    call.q_heads = kQHeads;
    call.kv_heads = kKvHeads;
    call.head_dim = kHeadDim;
    return call;
  }

  absl::Status Inline(AttendCall call, Values& values) {
    call.q = values.q.data();
    call.k = values.k.data();
    call.v = values.v.data();
    call.output = values.output.data();
    call.lse = values.lse.data();
    return client_->Attend(call);
  }

  // The same by way of shared memory, from `offset` on; brings the results back.
  absl::Status OnDevice(AttendCall call, const std::shared_ptr<const DeviceRegion>& region,
                        const Allocation& memory, size_t offset, Values& values) {
    std::byte* at = memory.data() + offset;
    const auto take = [&](size_t bytes) {
      std::byte* taken = at;
      at += (bytes + 255) / 256 * 256;
      return taken;
    };
    std::byte* const q = take(values.q.size());
    std::byte* const k = take(values.k.size());
    std::byte* const v = take(values.v.size());
    std::byte* const output = take(values.output.size());
    std::byte* const lse = take(values.lse.size() * sizeof(float));
    // What is read back must have been written for this very call.
    EXPECT_EQ(cudaMemset(output, 0xff, values.output.size()), cudaSuccess);
    EXPECT_EQ(cudaMemset(lse, 0xff, values.lse.size() * sizeof(float)), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(q, values.q.data(), values.q.size(), cudaMemcpyHostToDevice), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(k, values.k.data(), values.k.size(), cudaMemcpyHostToDevice), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(v, values.v.data(), values.v.size(), cudaMemcpyHostToDevice), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    call.device = region;
    call.q = q;
    call.k = k;
    call.v = v;
    call.output = output;
    call.lse = reinterpret_cast<float*>(lse);
    const absl::Status attended = client_->Attend(call);
    EXPECT_EQ(cudaMemcpy(values.output.data(), output, values.output.size(), cudaMemcpyDefault),
              cudaSuccess);
    EXPECT_EQ(
        cudaMemcpy(values.lse.data(), lse, values.lse.size() * sizeof(float), cudaMemcpyDefault),
        cudaSuccess);
    return attended;
  }

  static void ExpectSame(const Values& expected, const Values& actual, DType type) {
    // The same kernels over the same plan, and one rounding to `type`.
    const float relative = type == DType::kF32 ? 1e-5f : type == DType::kF16 ? 2e-3f : 1.6e-2f;
    const std::vector<float> a = FromType(expected.output, type);
    const std::vector<float> b = FromType(actual.output, type);
    ASSERT_EQ(a.size(), b.size());
    for (size_t i = 0; i < a.size(); ++i) {
      ASSERT_NEAR(a[i], b[i], relative * std::abs(a[i]) + 1e-5f) << "output element " << i;
    }
    for (size_t i = 0; i < expected.lse.size(); ++i) {
      ASSERT_NEAR(expected.lse[i], actual.lse[i], 1e-4f) << "lse element " << i;
    }
  }

  TemporaryDirectory directory_;
  std::unique_ptr<ChildProcess> coordinator_;
  std::unique_ptr<Client> client_;
};

// The GPU's bytes are those that the CPU makes of the same f32 result.
TEST_P(DeviceMemoryTest, QuantisedOutputsAreTheF32ResultRounded) {
  Allocation memory(kBytes, GetParam().gpu);
  const auto region = Share(memory);
  ASSERT_NE(region, nullptr);
  constexpr float kScale = 0.013f;
  const uint64_t sequence = Open();
  int64_t position = 0;
  for (const int32_t rows : {100, 1, 5}) {
    Values values(rows, DType::kBf16, static_cast<uint64_t>(rows));
    const size_t elements = size_t(rows) * kQHeads * kHeadDim;
    for (const int32_t layer : {0, 1}) {
      AttendCall call = Call(sequence, layer, position, rows, DType::kBf16);
      call.output_dtype = v1::DTYPE_F32;
      values.output.assign(elements * sizeof(float), std::byte{0});
      ASSERT_EQ(OnDevice(call, region, memory, 0, values), absl::OkStatus());
      const std::vector<float> exact = FromType(values.output, DType::kF32);
      for (const DType type : {DType::kFp8E4M3, DType::kNvfp4}) {
        const size_t bytes = OutputBytes(type, static_cast<int64_t>(elements));
        std::vector<std::byte> expected(bytes);
        cpu::StoreOutput({type, kScale}, exact.data(), elements, expected.data());
        call.output_dtype = ToProto(type);
        call.o_scale = kScale;
        values.output.assign(bytes, std::byte{0});
        ASSERT_EQ(OnDevice(call, region, memory, 0, values), absl::OkStatus());
        EXPECT_TRUE(values.output == expected) << Name(type) << ", " << rows << " rows";
      }
    }
    position += rows;
  }
}

// Decode that repeats at one place (and so becomes a graph that reads there), at places that
// change, at counts that are padded; prefills; in every type; layers with and without sinks.
TEST_P(DeviceMemoryTest, ResultsAreThoseOfTensorsInMessages) {
  Allocation memory(kBytes, GetParam().gpu);
  const auto region = Share(memory);
  ASSERT_NE(region, nullptr);
  for (const DType type : {DType::kBf16, DType::kF32, DType::kF16}) {
    const uint64_t inlined = Open();
    const uint64_t shared = Open();
    int64_t position = 0;
    int step = 0;
    for (const int32_t rows : {1, 1, 1, 1, 3, 3, 3, 100, 1, 5, 2, 1, 17, 1}) {
      for (const int32_t layer : {0, 1}) {
        SCOPED_TRACE(std::string(Name(type)) + ", step " + std::to_string(step) + ", layer " +
                     std::to_string(layer));
        Values values(rows, type, 1000 * step + 10 * layer);
        Values on_device = values;
        ASSERT_EQ(Inline(Call(inlined, layer, position, rows, type), values), absl::OkStatus());
        const size_t offset = step % 5 == 4 ? size_t{4096} * step : 0;
        ASSERT_EQ(
            OnDevice(Call(shared, layer, position, rows, type), region, memory, offset, on_device),
            absl::OkStatus());
        ExpectSame(values, on_device, type);
        if (HasFatalFailure()) return;
      }
      position += rows;
      ++step;
    }
    // A repeat is compared with what is held; other bytes are a conflict.
    Values again(1, type, 1000 * (step - 1));
    EXPECT_EQ(OnDevice(Call(shared, 0, position - 1, 1, type), region, memory, 0, again),
              absl::OkStatus());
    Values other(1, type, 77);
    EXPECT_EQ(OnDevice(Call(shared, 0, position - 1, 1, type), region, memory, 0, other).code(),
              absl::StatusCode::kAlreadyExists);
  }
  EXPECT_EQ(client_->UnshareDeviceMemory(*region), absl::OkStatus());
}

TEST_P(DeviceMemoryTest, AppendsReadItToo) {
  Allocation memory(kBytes, GetParam().gpu);
  const auto region = Share(memory);
  ASSERT_NE(region, nullptr);
  const uint64_t inlined = Open();
  const uint64_t shared = Open();
  Values tokens(40, DType::kBf16, 5);
  client::AppendCall append{.cache_id = kCache,
                            .entries = {{inlined, 0, 40}},
                            .dtype = v1::DTYPE_BF16,
                            .k = tokens.k.data(),
                            .v = tokens.v.data(),
                            .kv_heads = kKvHeads,
                            .head_dim = kHeadDim};
  ASSERT_EQ(client_->Append(append), absl::OkStatus());
  std::byte* const v = memory.data() + (1 << 20);
  ASSERT_EQ(cudaMemcpy(memory.data(), tokens.k.data(), tokens.k.size(), cudaMemcpyHostToDevice),
            cudaSuccess);
  ASSERT_EQ(cudaMemcpy(v, tokens.v.data(), tokens.v.size(), cudaMemcpyHostToDevice), cudaSuccess);
  append.entries = {{shared, 0, 40}};
  append.device = region;
  append.k = memory.data();
  append.v = v;
  ASSERT_EQ(client_->Append(append), absl::OkStatus());
  Values a(1, DType::kBf16, 9);
  Values b = a;
  ASSERT_EQ(Inline(Call(inlined, 0, 40, 1, DType::kBf16), a), absl::OkStatus());
  ASSERT_EQ(Inline(Call(shared, 0, 40, 1, DType::kBf16), b), absl::OkStatus());
  ExpectSame(a, b, DType::kBf16);
}

TEST_P(DeviceMemoryTest, WhatCannotBeOpenedIsRefusedAndTheServiceGoesOn) {
  Allocation memory(kBytes, GetParam().gpu);
  const auto good = client::DescribeDeviceMemory(memory.data(), kBytes);
  ASSERT_TRUE(good.ok()) << good.status();
  const auto refused = [&](const DeviceMemory& bad, absl::StatusCode code) {
    const absl::Status status = client_->ShareDeviceMemory(bad).status();
    EXPECT_EQ(status.code(), code) << status;
    std::printf("refused: %s\n", std::string(status.message()).c_str());
    return client::FieldOf(status);
  };
  DeviceMemory bad = *good;
  bad.ipc_handle = std::string(64, '\x5a');
  EXPECT_EQ(refused(bad, absl::StatusCode::kInvalidArgument), "cuda_ipc.raw_handle");
  bad = *good;
  bad.bytes = size_t{1} << 40;
  EXPECT_EQ(refused(bad, absl::StatusCode::kInvalidArgument), "byte_size");
  bad = *good;
  bad.gpu = "GPU-00000000-0000-0000-0000-000000000000";
  EXPECT_EQ(refused(bad, absl::StatusCode::kFailedPrecondition), "cuda_ipc.device_uuid");

  const auto region = Share(memory);
  ASSERT_NE(region, nullptr);
  const uint64_t sequence = Open();
  Values values(1, DType::kF32, 3);
  EXPECT_EQ(OnDevice(Call(sequence, 0, 0, 1, DType::kF32), region, memory, 0, values),
            absl::OkStatus());
  // Unregistered, freed and shared again at the same place.
  EXPECT_EQ(client_->UnshareDeviceMemory(*region), absl::OkStatus());
  const absl::Status unknown =
      OnDevice(Call(sequence, 0, 1, 1, DType::kF32), region, memory, 0, values);
  EXPECT_EQ(unknown.code(), absl::StatusCode::kNotFound) << unknown;
  for (int time = 0; time < 3; ++time) {
    Allocation fresh(kBytes, GetParam().gpu);
    const auto again = Share(fresh);
    ASSERT_NE(again, nullptr);
    EXPECT_EQ(OnDevice(Call(sequence, 0, 1 + time, 1, DType::kF32), again, fresh, 0, values),
              absl::OkStatus());
    EXPECT_EQ(client_->UnshareDeviceMemory(*again), absl::OkStatus());
  }
}

TEST_P(DeviceMemoryTest, AServiceThatRestartedIsGivenItAgain) {
  Allocation memory(kBytes, GetParam().gpu);
  const auto region = Share(memory);
  ASSERT_NE(region, nullptr);
  Values before(1, DType::kF32, 3);
  Values after = before;
  ASSERT_EQ(OnDevice(Call(Open(), 0, 0, 1, DType::kF32), region, memory, 0, before),
            absl::OkStatus());
  coordinator_->Signal(SIGKILL);
  ASSERT_EQ(coordinator_->Wait(kPatience), -SIGKILL);
  Serve();
  CreateCache();
  if (HasFatalFailure()) return;
  EXPECT_EQ(OnDevice(Call(Open(), 0, 0, 1, DType::kF32), region, memory, 0, after),
            absl::OkStatus());
  ExpectSame(before, after, DType::kF32);
  EXPECT_EQ(client_->UnshareDeviceMemory(*region), absl::OkStatus());
}

// A host that shares memory and waits to be killed: another run of this program.
TEST(Holder, SharesUntilItIsKilled) {
  const char* target = std::getenv("TRIBUTARY_HOLDER_TARGET");
  if (target == nullptr) GTEST_SKIP() << "another test of this file runs it";
  auto client = Client::Connect({.target = target, .timeout = kPatience});
  ASSERT_TRUE(client.ok()) << client.status();
  Allocation memory(kBytes);
  const auto described = client::DescribeDeviceMemory(memory.data(), kBytes);
  ASSERT_TRUE(described.ok()) << described.status();
  const auto region = (*client)->ShareDeviceMemory(*described);
  ASSERT_TRUE(region.ok()) << region.status();
  std::printf("shared\n");
  std::fflush(stdout);
  for (;;) pause();
}

TEST_P(DeviceMemoryTest, MemoryOfAHostThatDiedIsLetGoOf) {
  ASSERT_EQ(setenv("TRIBUTARY_HOLDER_TARGET", PublicAddress(directory_).c_str(), 1), 0);
  ChildProcess holder({std::filesystem::read_symlink("/proc/self/exe"),
                       "--gtest_filter=Holder.SharesUntilItIsKilled"},
                      directory_.File("holder.log"));
  ASSERT_TRUE(Eventually(kPatience, [&] {
    return holder.Log().find("\nshared\n") != std::string::npos;
  })) << holder.Log();
  holder.Signal(SIGKILL);
  ASSERT_EQ(holder.Wait(kPatience), -SIGKILL);
  Allocation memory(kBytes, GetParam().gpu);
  const auto region = Share(memory);  // the next registration looks for the dead
  ASSERT_NE(region, nullptr);
  EXPECT_TRUE(Eventually(kPatience, [&] {
    return coordinator_->Log().find("region of a dead client closed") != std::string::npos;
  }));
  Values values(1, DType::kF32, 3);
  EXPECT_EQ(OnDevice(Call(Open(), 0, 0, 1, DType::kF32), region, memory, 0, values),
            absl::OkStatus());
}

INSTANTIATE_TEST_SUITE_P(Services, DeviceMemoryTest,
                         ::testing::Values(Case{1, 0, "host"}, Case{2, 0, "host"},
                                           Case{2, 0, "auto"}, Case{2, 1, "auto"},
                                           Case{4, 3, "host"}, Case{4, 0, "auto"}),
                         NameOf);

TEST(DeviceMemory, OfTheServicesOwnProcessIsRefused) {
  if (const absl::Status gpus = worker::CheckGpus(0, 1); !gpus.ok()) {
    GTEST_SKIP() << gpus.message();
  }
  Allocation memory(kBytes);
  const auto described = client::DescribeDeviceMemory(memory.data(), kBytes);
  ASSERT_TRUE(described.ok()) << described.status();
  worker::IpcOpener opener(0);
  const auto opened = opener.Open({.handle = described->ipc_handle,
                                   .offset = described->offset,
                                   .bytes = described->bytes,
                                   .gpu = described->gpu});
  std::printf("refused: %s\n", std::string(opened.status().message()).c_str());
  EXPECT_EQ(opened.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FieldOf(opened.status()), "cuda_ipc.raw_handle");
  EXPECT_THAT(std::string(opened.status().message()), HasSubstr("own process"));
}

TEST(DeviceMemory, IsDescribedAsItLies) {
  if (const absl::Status gpus = worker::CheckGpus(0, 1); !gpus.ok()) {
    GTEST_SKIP() << gpus.message();
  }
  Allocation memory(kBytes);
  const auto part = client::DescribeDeviceMemory(memory.data() + 4096, 8192);
  ASSERT_TRUE(part.ok()) << part.status();
  EXPECT_EQ(part->offset, 4096u);
  EXPECT_EQ(part->ipc_handle.size(), 64u);
  EXPECT_EQ(client::FieldOf(client::DescribeDeviceMemory(memory.data(), size_t{1} << 40).status()),
            "bytes");
  int on_stack = 0;
  EXPECT_EQ(client::FieldOf(client::DescribeDeviceMemory(&on_stack, 4).status()), "data");
}

}  // namespace
}  // namespace tributary::test
