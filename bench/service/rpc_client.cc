#include "bench/service/rpc_client.h"

#include <grpcpp/grpcpp.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <random>

#include "absl/strings/str_cat.h"
#include "base/status/grpc_status.h"
#include "base/status/rpc_errors.h"
#include "base/status/status_macros.h"
#include "kernels/half.h"
#include "service/client/host_session.h"
#include "service/client/shared_region.h"
#include "tributary/v1/attention.grpc.pb.h"

#ifdef TRIBUTARY_BENCH_CUDA
#include <cuda_runtime.h>

#include "service/client/cuda_memory.h"
#endif

namespace tributary::service::bench {
namespace {

using Bf16 = uint16_t;
constexpr size_t kSlot = size_t{1} << 16;  // of each tensor in a region
constexpr size_t kRegionBytes = 4 * kSlot;
constexpr char kRegion[] = "bench";

// Where q, k, v and the output of every call lie, one after the other, kSlot apart.
class Tensors {
 public:
  virtual ~Tensors() = default;
  // Null: in the messages.
  virtual v1::RegisterSharedMemoryRequest* registration() { return nullptr; }
  virtual void Write(size_t offset, const std::vector<Bf16>& values) {}
  virtual void Read(size_t offset, std::vector<Bf16>* values) {}
};

class InSharedMemory final : public Tensors {
 public:
  static absl::StatusOr<std::unique_ptr<Tensors>> Create() {
    auto region = client::SharedRegion::Create(kRegionBytes);
    if (!region.ok()) return region.status();
    return std::make_unique<InSharedMemory>(*std::move(region));
  }
  explicit InSharedMemory(std::unique_ptr<client::SharedRegion> region)
      : region_(std::move(region)) {
    request_.mutable_system()->set_key(region_->key());
  }
  v1::RegisterSharedMemoryRequest* registration() override { return &request_; }
  void Write(size_t offset, const std::vector<Bf16>& values) override {
    std::memcpy(region_->data() + offset, values.data(), values.size() * sizeof(Bf16));
  }
  void Read(size_t offset, std::vector<Bf16>* values) override {
    std::memcpy(values->data(), region_->data() + offset, values->size() * sizeof(Bf16));
  }

 private:
  const std::unique_ptr<client::SharedRegion> region_;
  v1::RegisterSharedMemoryRequest request_;
};

#ifdef TRIBUTARY_BENCH_CUDA
class InDeviceMemory final : public Tensors {
 public:
  static absl::StatusOr<std::unique_ptr<Tensors>> Create(int gpu) {
    void* data = nullptr;
    if (cudaSetDevice(gpu) != cudaSuccess || cudaMalloc(&data, kRegionBytes) != cudaSuccess) {
      return absl::FailedPreconditionError("cannot take memory of a GPU");
    }
    const auto described = client::DescribeDeviceMemory(data, kRegionBytes);
    if (!described.ok()) return described.status();
    return std::make_unique<InDeviceMemory>(static_cast<std::byte*>(data), *described);
  }
  InDeviceMemory(std::byte* data, const client::DeviceMemory& memory) : data_(data) {
    v1::CudaIpcMemory* cuda = request_.mutable_cuda_ipc();
    cuda->set_raw_handle(memory.ipc_handle);
    cuda->set_device_uuid(memory.gpu);
    cuda->set_offset(memory.offset);
  }
  // The memory goes with the process, after the service has let go of it.
  v1::RegisterSharedMemoryRequest* registration() override { return &request_; }
  void Write(size_t offset, const std::vector<Bf16>& values) override {
    cudaMemcpy(data_ + offset, values.data(), values.size() * sizeof(Bf16), cudaMemcpyDefault);
    cudaDeviceSynchronize();
  }
  void Read(size_t offset, std::vector<Bf16>* values) override {
    cudaMemcpy(values->data(), data_ + offset, values->size() * sizeof(Bf16), cudaMemcpyDefault);
  }

 private:
  std::byte* const data_;
  v1::RegisterSharedMemoryRequest request_;
};
#endif

absl::StatusOr<std::unique_ptr<Tensors>> MakeTensors(const ClientOptions& options) {
  if (options.tensors == "inline") return std::make_unique<Tensors>();
  if (options.tensors == "shm") return InSharedMemory::Create();
#ifdef TRIBUTARY_BENCH_CUDA
  if (options.tensors == "cuda_ipc") return InDeviceMemory::Create(options.gpu);
#endif
  return absl::InvalidArgumentError(absl::StrCat("tensors: '", options.tensors, "' is not here"));
}

std::vector<Bf16> Randoms(size_t count) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<Bf16> values(count);
  for (Bf16& value : values) value = Bf16FromFloat(normal(random));
  return values;
}

class Host {
 public:
  Host(const ClientOptions& options, std::unique_ptr<Tensors> tensors)
      : options_(options),
        tensors_(std::move(tensors)),
        stub_(v1::AttentionService::NewStub(
            grpc::CreateChannel(options.target, grpc::InsecureChannelCredentials()))),
        values_{Randoms(Elements(options.q_heads)), Randoms(Elements(options.kv_heads)),
                Randoms(Elements(options.kv_heads))} {}

  absl::Status Begin() {
    for (size_t i = 0; i < 3; ++i) tensors_->Write(i * kSlot, values_[i]);
    if (v1::RegisterSharedMemoryRequest* region = tensors_->registration(); region != nullptr) {
      region->set_name(kRegion);
      region->set_byte_size(kRegionBytes);
      grpc::ClientContext context;
      v1::RegisterSharedMemoryReply reply;
      TRIBUTARY_RETURN_IF_ERROR(
          FromGrpcStatus(stub_->RegisterSharedMemory(&context, *region, &reply)));
    }
    return absl::OkStatus();
  }

  absl::Status End() {
    if (tensors_->registration() == nullptr) return absl::OkStatus();
    v1::UnregisterSharedMemoryRequest request;
    request.set_name(kRegion);
    grpc::ClientContext context;
    v1::UnregisterSharedMemoryReply reply;
    return FromGrpcStatus(stub_->UnregisterSharedMemory(&context, request, &reply));
  }

  // Another sequence with what the given one holds, and how long it is.
  absl::Status Fork(uint64_t* sequence, int64_t* length) {
    v1::ForkSequenceRequest request;
    request.set_cache_id(options_.cache);
    request.set_parent_id(options_.sequence);
    grpc::ClientContext context;
    v1::ForkSequenceReply reply;
    TRIBUTARY_RETURN_IF_ERROR(FromGrpcStatus(stub_->ForkSequence(&context, request, &reply)));
    *sequence = reply.sequence_id();
    *length = reply.length();
    return absl::OkStatus();
  }

  v1::AttendRequest OneToken(uint64_t sequence, int64_t position, bool in_message) const {
    v1::AttendRequest request;
    request.set_request_id(static_cast<uint64_t>(position) + 1);
    request.set_cache_id(options_.cache);
    request.set_mode(v1::ATTEND_MODE_CAUSAL);
    v1::AttendEntry* entry = request.add_entries();
    entry->set_sequence_id(sequence);
    entry->set_first_position(position);
    entry->set_query_rows(1);
    entry->set_new_tokens(1);
    const bool by_value = in_message || options_.tensors == "inline";
    *request.mutable_q() = Place(0, options_.q_heads, by_value);
    *request.mutable_k() = Place(1, options_.kv_heads, by_value);
    *request.mutable_v() = Place(2, options_.kv_heads, by_value);
    if (!by_value) *request.mutable_output() = Place(3, options_.q_heads, false);
    return request;
  }

  absl::Status Attend(const v1::AttendRequest& request, v1::AttendReply* reply) {
    if (options_.way != "stream") {
      grpc::ClientContext context;
      return FromGrpcStatus(stub_->Attend(&context, request, reply));
    }
    if (stream_ == nullptr) stream_ = stub_->AttendStream(&stream_context_);
    if (!stream_->Write(request) || !stream_->Read(reply)) {
      return absl::UnavailableError("the stream ended");
    }
    return FromRpcStatus(reply->status());
  }

  using Times = std::pair<TimePoint, TimePoint>;

  absl::StatusOr<Times> TimeCall(uint64_t sequence, int64_t position) {
    const v1::AttendRequest request = OneToken(sequence, position, false);
    v1::AttendReply reply;
    const TimePoint begin = std::chrono::steady_clock::now();
    TRIBUTARY_RETURN_IF_ERROR(Attend(request, &reply));
    const TimePoint end = std::chrono::steady_clock::now();
    output_ = Output(reply);
    return Times{begin, end};
  }

  // A step of a session: of every layer but the first, which waits for the step to be accepted.
  absl::Status TimeStep(uint64_t sequence, int64_t position, std::vector<Times>* times) {
    if (session_ == nullptr) {
      TRIBUTARY_ASSIGN_OR_RETURN(session_,
                                 client::HostSession::Open({.target = options_.target},
                                                           {.cache_id = options_.cache,
                                                            .dtype = v1::DTYPE_BF16,
                                                            .memory = v1::SESSION_MEMORY_HOST}));
    }
    output_.resize(Elements(options_.q_heads));
    const auto rows = [this](const std::vector<Bf16>& values, int32_t heads) {
      return client::HeadRows{const_cast<Bf16*>(values.data()), 1, heads, options_.head_dim};
    };
    TRIBUTARY_ASSIGN_OR_RETURN(const uint64_t step,
                               session_->Submit({.layers = options_.layers,
                                                 .entries = {{.sequence_id = sequence,
                                                              .first_position = position,
                                                              .query_rows = 1,
                                                              .new_tokens = 1}}}));
    for (int32_t layer = 0; layer < options_.layers; ++layer) {
      const TimePoint begin = std::chrono::steady_clock::now();
      TRIBUTARY_RETURN_IF_ERROR(session_->Attend({.q = rows(values_[0], options_.q_heads),
                                                  .k = rows(values_[1], options_.kv_heads),
                                                  .v = rows(values_[2], options_.kv_heads),
                                                  .output = rows(output_, options_.q_heads)}));
      if (layer > 0) times->emplace_back(begin, std::chrono::steady_clock::now());
    }
    return session_->Await(step);
  }

  // As the options have it.
  absl::Status Time(uint64_t sequence, int64_t position, std::vector<Times>* times) {
    if (options_.way == "session") return TimeStep(sequence, position, times);
    TRIBUTARY_ASSIGN_OR_RETURN(const Times time, TimeCall(sequence, position));
    times->push_back(time);
    return absl::OkStatus();
  }
  // Of the last call or layer that was timed.
  const std::vector<Bf16>& output() const { return output_; }

  // Of a call that put it where calls do.
  std::vector<Bf16> Output(const v1::AttendReply& reply) {
    std::vector<Bf16> output(Elements(options_.q_heads));
    if (reply.output().has_inline_()) {
      std::memcpy(output.data(), reply.output().inline_().data(),
                  std::min(output.size() * sizeof(Bf16), reply.output().inline_().size()));
    } else {
      tensors_->Read(3 * kSlot, &output);
    }
    return output;
  }

 private:
  size_t Elements(int32_t heads) const {
    return static_cast<size_t>(heads) * static_cast<size_t>(options_.head_dim);
  }
  v1::Tensor Place(size_t index, int32_t heads, bool by_value) const {
    v1::Tensor tensor;
    tensor.set_dtype(v1::DTYPE_BF16);
    for (const int32_t extent : {1, heads, options_.head_dim}) tensor.add_shape(extent);
    if (by_value) {
      tensor.set_inline_(values_[index].data(), values_[index].size() * sizeof(Bf16));
    } else {
      tensor.mutable_shared_memory()->set_region(kRegion);
      tensor.mutable_shared_memory()->set_offset(index * kSlot);
    }
    return tensor;
  }

  const ClientOptions& options_;
  const std::unique_ptr<Tensors> tensors_;
  const std::unique_ptr<v1::AttentionService::Stub> stub_;
  const std::vector<Bf16> values_[3];
  grpc::ClientContext stream_context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::AttendRequest, v1::AttendReply>> stream_;
  std::unique_ptr<client::HostSession> session_;
  std::vector<Bf16> output_;
};

absl::Status CheckResult(Host& host, uint64_t first, uint64_t second, int64_t position) {
  v1::AttendReply reply;
  TRIBUTARY_RETURN_IF_ERROR(host.Attend(host.OneToken(first, position, true), &reply));
  const std::vector<Bf16> expected = host.Output(reply);
  std::vector<Host::Times> times;
  TRIBUTARY_RETURN_IF_ERROR(host.Time(second, position, &times));
  const std::vector<Bf16>& actual = host.output();
  for (size_t i = 0; i < expected.size(); ++i) {
    const float a = FloatFromBf16(expected[i]);
    const float b = FloatFromBf16(actual[i]);
    if (!(std::abs(a - b) <= 1e-3f + 1.6e-2f * std::abs(a))) {
      return absl::InternalError(absl::StrCat("output[", i, "] is ", b, " instead of ", a));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<std::pair<TimePoint, TimePoint>>> RunClient(
    const ClientOptions& options) {
  TRIBUTARY_ASSIGN_OR_RETURN(std::unique_ptr<Tensors> tensors, MakeTensors(options));
  Host host(options, std::move(tensors));
  TRIBUTARY_RETURN_IF_ERROR(host.Begin());
  uint64_t inlined = 0;
  uint64_t sequence = 0;
  int64_t position = 0;
  TRIBUTARY_RETURN_IF_ERROR(host.Fork(&inlined, &position));
  TRIBUTARY_RETURN_IF_ERROR(host.Fork(&sequence, &position));
  TRIBUTARY_RETURN_IF_ERROR(CheckResult(host, inlined, sequence, position++));
  std::vector<std::pair<TimePoint, TimePoint>> times;
  times.reserve(static_cast<size_t>(options.calls));
  while (times.size() < static_cast<size_t>(options.calls)) {
    TRIBUTARY_RETURN_IF_ERROR(host.Time(sequence, position++, &times));
  }
  TRIBUTARY_RETURN_IF_ERROR(host.End());
  return times;
}

}  // namespace tributary::service::bench
