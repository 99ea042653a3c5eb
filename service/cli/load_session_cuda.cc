#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status/status_macros.h"
#include "service/cli/load_session.h"
#include "service/client/cuda/device_session.h"
#include "worker/rpc/dtype_conversion.h"

namespace tributary::cli {
namespace {

using Clock = std::chrono::steady_clock;

absl::Status FromCuda(absl::string_view what, cudaError_t error) {
  if (error == cudaSuccess) return absl::OkStatus();
  cudaGetLastError();
  return absl::InternalError(absl::StrCat(what, ": ", cudaGetErrorString(error)));
}

class DeviceLoadSession final : public LoadSession {
 public:
  explicit DeviceLoadSession(const LoadOptions& options) : options_(options) {}
  ~DeviceLoadSession() override {
    session_.reset();  // it waits for what was launched
    if (cudaSetDevice(options_.host_gpu) != cudaSuccess) return;
    if (graph_ != nullptr) cudaGraphExecDestroy(graph_);
    for (void* memory : {q_, kv_, output_}) cudaFree(memory);
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }

  absl::Status Start(const std::string& cache_id, const LoadTensors& tensors) {
    TRIBUTARY_RETURN_IF_ERROR(FromCuda("--host_gpu", cudaSetDevice(options_.host_gpu)));
    TRIBUTARY_RETURN_IF_ERROR(
        FromCuda("a stream", cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)));
    const int64_t rows = options_.StepRows();
    const int64_t value_dim = options_.ValueDim();
    TRIBUTARY_RETURN_IF_ERROR(Take(rows * options_.q_heads * options_.head_dim, tensors.q, &q_));
    TRIBUTARY_RETURN_IF_ERROR(
        Take(rows * options_.kv_heads * std::max<int64_t>(options_.head_dim, value_dim), tensors.kv,
             &kv_));
    TRIBUTARY_RETURN_IF_ERROR(Take(rows * options_.q_heads * value_dim, nullptr, &output_));
    TRIBUTARY_ASSIGN_OR_RETURN(
        session_,
        client::DeviceSession::Open(
            {.target = options_.target, .security = options_.security, .timeout = options_.timeout},
            {.cache_id = cache_id,
             .max_rows = options_.SlotRows(),
             .max_new_tokens = options_.SlotRows(),
             .dtype = ToProto(options_.dtype),
             .timed = options_.breakdown}));
    return absl::OkStatus();
  }

  absl::Status Run(const client::SessionStep& step,
                   const std::function<void(double)>& layer_done) override {
    TRIBUTARY_ASSIGN_OR_RETURN(const uint64_t number, session_->Submit(step));
    const Clock::time_point begin = Clock::now();
    TRIBUTARY_RETURN_IF_ERROR(Launch(step.layers));
    TRIBUTARY_RETURN_IF_ERROR(FromCuda("a step", cudaStreamSynchronize(stream_)));
    TRIBUTARY_RETURN_IF_ERROR(session_->status());
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    for (int32_t layer = 0; layer < step.layers; ++layer) layer_done(seconds / step.layers);
    return session_->Await(number);
  }

  std::vector<client::LayerTimes> TakeTimes() override { return session_->TakeTimes(); }

 private:
  absl::Status Take(int64_t elements, const std::byte* values, void** to) const {
    const size_t bytes = BytesOf(options_.dtype, elements);
    TRIBUTARY_RETURN_IF_ERROR(FromCuda("memory on the GPU", cudaMalloc(to, bytes)));
    if (values == nullptr) return absl::OkStatus();
    TRIBUTARY_RETURN_IF_ERROR(
        FromCuda("a tensor", cudaMemcpyAsync(*to, values, bytes, cudaMemcpyHostToDevice, stream_)));
    return FromCuda("a tensor", cudaStreamSynchronize(stream_));
  }

  // All layers: by a graph, or one by one where a layer goes in pieces.
  absl::Status Launch(int32_t layers) {
    if (options_.StepRows() > options_.SlotRows()) return LaunchLayers(layers);
    if (graph_ == nullptr) TRIBUTARY_RETURN_IF_ERROR(Capture(layers));
    return FromCuda("a step", cudaGraphLaunch(graph_, stream_));
  }

  absl::Status Capture(int32_t layers) {
    TRIBUTARY_RETURN_IF_ERROR(
        FromCuda("a graph", cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal)));
    const absl::Status launched = LaunchLayers(layers);
    cudaGraph_t graph = nullptr;
    TRIBUTARY_RETURN_IF_ERROR(FromCuda("a graph", cudaStreamEndCapture(stream_, &graph)));
    const cudaError_t made = cudaGraphInstantiate(&graph_, graph, 0);
    cudaGraphDestroy(graph);
    TRIBUTARY_RETURN_IF_ERROR(launched);
    return FromCuda("a graph", made);
  }

  absl::Status LaunchLayers(int32_t layers) {
    const int32_t rows = options_.StepRows();
    const int32_t value_dim = options_.ValueDim();
    const client::SessionLayer layer{.q = {q_, rows, options_.q_heads, options_.head_dim},
                                     .k = {kv_, rows, options_.kv_heads, options_.head_dim},
                                     .v = {kv_, rows, options_.kv_heads, value_dim},
                                     .output = {output_, rows, options_.q_heads, value_dim}};
    for (int32_t i = 0; i < layers; ++i) {
      TRIBUTARY_RETURN_IF_ERROR(session_->Attend(stream_, layer));
    }
    return absl::OkStatus();
  }

  const LoadOptions& options_;
  cudaStream_t stream_ = nullptr;
  void* q_ = nullptr;
  void* kv_ = nullptr;
  void* output_ = nullptr;
  std::unique_ptr<client::DeviceSession> session_;
  cudaGraphExec_t graph_ = nullptr;
};

}  // namespace

absl::StatusOr<std::unique_ptr<LoadSession>> OpenDeviceLoadSession(const LoadOptions& options,
                                                                   const std::string& cache_id,
                                                                   const LoadTensors& tensors) {
  auto session = std::make_unique<DeviceLoadSession>(options);
  TRIBUTARY_RETURN_IF_ERROR(session->Start(cache_id, tensors));
  return session;
}

}  // namespace tributary::cli
