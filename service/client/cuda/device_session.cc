#include "service/client/cuda/device_session.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/cuda/device_memory.h"
#include "base/mailbox/layout_message.h"
#include "base/status/errors.h"
#include "base/status/status_macros.h"
#include "base/sync/mutex.h"
#include "service/client/connect.h"
#include "service/client/cuda/session_kernels.h"
#include "service/client/session_messages.h"
#include "service/client/session_stream.h"
#include "tributary/v1/attention.grpc.pb.h"

namespace tributary::client {
namespace {

using Clock = std::chrono::steady_clock;

// How long all round trips may take that are timed when a session is opened.
constexpr std::chrono::seconds kProbePatience{5};
// The time between two looks at a stream's wait.
constexpr std::chrono::milliseconds kGuardPause{20};

absl::Status FromCuda(absl::string_view what, cudaError_t error) {
  if (error == cudaSuccess) return absl::OkStatus();
  cudaGetLastError();
  return absl::InternalError(absl::StrCat(what, ": ", cudaGetErrorString(error)));
}

Element ElementOf(v1::DType dtype) {
  if (dtype == v1::DTYPE_F32) return Element::kF32;
  return dtype == v1::DTYPE_BF16 ? Element::kBf16 : Element::kF16;
}

absl::Status CheckRows(absl::string_view field, const HeadRows& rows, int32_t element_bytes) {
  if (rows.data == nullptr) return absl::OkStatus();
  if (rows.rows < 1 || rows.heads < 1 || rows.dim < 1) {
    return InvalidField(field, "has data, but no rows, heads or dimensions");
  }
  const auto odd = [element_bytes](int64_t elements) { return elements * element_bytes % 16 != 0; };
  if (odd(rows.dim) || odd(rows.row_stride) || odd(rows.head_stride) ||
      reinterpret_cast<uintptr_t>(rows.data) % 16 != 0) {
    return InvalidField(field, "address, dim and strides must be multiples of 16 bytes");
  }
  return absl::OkStatus();
}

class CudaDeviceSession final : public DeviceSession {
 public:
  CudaDeviceSession(const ConnectOptions& connect, const DeviceSessionOptions& options)
      : options_(options), timeout_(connect.timeout), lease_(connect.lease) {}

  ~CudaDeviceSession() override {
    stream_.reset();  // the service ends every wait, and so does EndWaits
    {
      const MutexLock lock(mutex_);
      stopping_ = true;
      changed_.NotifyAll();
    }
    if (guard_.joinable()) guard_.join();
    if (mailbox_ == nullptr || cudaSetDevice(gpu_) != cudaSuccess) return;
    cudaDeviceSynchronize();
    if (opened_here_) cudaIpcCloseMemHandle(mailbox_);
    cudaFree(counter_);
    cudaFreeHost(pinned_);
    cudaStreamDestroy(control_);
  }

  absl::Status Start(const ConnectOptions& connect) {
    TRIBUTARY_RETURN_IF_ERROR(FromCuda("the current GPU", cudaGetDevice(&gpu_)));
    cudaDeviceProp properties;
    TRIBUTARY_RETURN_IF_ERROR(
        FromCuda("the current GPU", cudaGetDeviceProperties(&properties, gpu_)));
    TRIBUTARY_RETURN_IF_ERROR(FromCuda("loading kernels", LoadSessionKernels()));
    const std::string gpu = cuda::UuidOf(properties);
    absl::StatusOr<std::shared_ptr<grpc::Channel>> channel = MakeChannel(connect);
    TRIBUTARY_RETURN_IF_ERROR(channel.status());
    stub_ = v1::AttentionService::NewStub(*channel);
    v1::SessionRequest first;
    v1::OpenSession& open = *first.mutable_open();
    open.set_cache_id(options_.cache_id);
    open.set_memory(v1::SESSION_MEMORY_DEVICE);
    open.set_max_rows(options_.max_rows);
    open.set_max_new_tokens(options_.max_new_tokens);
    open.set_q_dtype(options_.dtype);
    open.set_kv_dtype(options_.dtype);
    open.set_output_dtype(v1::DTYPE_F32);  // rounded on the way out of the slot
    open.set_return_lse(options_.return_lse);
    open.set_max_steps(options_.max_steps);
    open.set_wait_timeout_ms(static_cast<uint32_t>(options_.wait_timeout.count()));
    open.set_device_uuid(gpu);
    open.set_measures(true);
    TRIBUTARY_ASSIGN_OR_RETURN(stream_, SessionStream::Open(stub_.get(), first, lease_, Until(),
                                                            [&](const v1::SessionProbe& asked) {
                                                              return Probe(asked, gpu);
                                                            }));
    const v1::SessionOpened& opened = stream_->opened();
    // The service did not ask for round trips.
    if (mailbox_ == nullptr) {
      TRIBUTARY_RETURN_IF_ERROR(OpenMailbox(opened.layout(), opened.device(), gpu));
    }
    view_.stream_waits = opened.waiting() == v1::WAITING_STREAM_MEMORY_OPS;
    if (view_.stream_waits) guard_ = std::thread([this] { GuardWaits(); });
    stream_->OnEnd([this](const absl::Status& why) { EndWaits(why); });
    return absl::OkStatus();
  }

  absl::StatusOr<uint64_t> Submit(const SessionStep& step) override {
    TRIBUTARY_RETURN_IF_ERROR(stream_->Submit(MessageOf(step, ++last_step_), Until()).status());
    return last_step_;
  }

  absl::Status Attend(cudaStream_t stream, const SessionLayer& layer) override {
    const int32_t bytes = BytesOf(options_.dtype);
    TRIBUTARY_RETURN_IF_ERROR(CheckRows("q", layer.q, bytes));
    TRIBUTARY_RETURN_IF_ERROR(CheckRows("k", layer.k, bytes));
    TRIBUTARY_RETURN_IF_ERROR(CheckRows("v", layer.v, bytes));
    TRIBUTARY_RETURN_IF_ERROR(CheckRows("output", layer.output, bytes));
    TRIBUTARY_RETURN_IF_ERROR(CheckRoom(layer.q.rows, layer.k.rows));
    if (layer.q.data == nullptr) return InvalidField("q", "has no data: see Append");
    if (layer.lse != nullptr && !options_.return_lse) {
      return InvalidField("lse", "is given, but the session was opened without return_lse");
    }
    TRIBUTARY_RETURN_IF_ERROR(
        FromCuda("handing a layer over", LaunchHandOver(view_, Strided(layer.q), Strided(layer.k),
                                                        Strided(layer.v), false, stream)));
    const HeadRows& to = layer.output;
    const bool has_output = to.data != nullptr;
    const ResultTarget target{.output = to.data,
                              .lse = layer.lse,
                              .element = ElementOf(options_.dtype),
                              .rows = layer.q.rows,
                              .heads = layer.q.heads,
                              .value_dim = has_output ? to.dim : 8,
                              .row_stride = has_output ? RowStride(to) : 0,
                              .head_stride = has_output ? HeadStride(to) : 0};
    return FromCuda("taking a layer back", LaunchTakeBack(view_, target, stream));
  }

  absl::Status Append(cudaStream_t stream, const HeadRows& k, const HeadRows& v) override {
    const int32_t bytes = BytesOf(options_.dtype);
    TRIBUTARY_RETURN_IF_ERROR(CheckRows("k", k, bytes));
    TRIBUTARY_RETURN_IF_ERROR(CheckRows("v", v, bytes));
    TRIBUTARY_RETURN_IF_ERROR(CheckRoom(0, k.rows));
    const bool no_result = !view_.stream_waits;
    TRIBUTARY_RETURN_IF_ERROR(
        FromCuda("handing a layer over",
                 LaunchHandOver(view_, {}, Strided(k), Strided(v), no_result, stream)));
    if (no_result) return absl::OkStatus();
    return FromCuda("taking a layer back", LaunchTakeBack(view_, {}, stream));
  }

  absl::Status Await(uint64_t step) override { return stream_->Await(step, Until()); }

  absl::Status status() const override {
    if (absl::Status said = stream_->status(); !said.ok()) return said;
    const uint32_t failure = pinned_->failure.status;
    if (failure == 0) return absl::OkStatus();
    return absl::Status(static_cast<absl::StatusCode>(failure), "a wait for the service ended");
  }

  const v1::SessionOpened& opened() const override { return stream_->opened(); }

 private:
  struct Pinned {
    HostFailure failure;
    uint32_t end_status = 0;  // what EndWaits writes
    uint32_t ends_waits = mailbox::kEndsWaits;
  };

  Clock::time_point Until() const { return Clock::now() + timeout_; }

  absl::StatusOr<v1::ProbeResult> Probe(const v1::SessionProbe& asked, const std::string& gpu) {
    TRIBUTARY_RETURN_IF_ERROR(OpenMailbox(asked.layout(), asked.device(), gpu));
    cudaStream_t stream = nullptr;
    TRIBUTARY_RETURN_IF_ERROR(
        FromCuda("a stream", cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)));
    RoundTrips times;
    const cudaError_t timed =
        TimeRoundTrips(view_, asked.rounds(), Clock::now() + kProbePatience, stream, &times);
    const absl::Status late =
        absl::DeadlineExceededError("the service's GPU answers no round trip");
    if (timed != cudaSuccess) EndWaits(late);
    cudaStreamDestroy(stream);  // what is left in it ends by itself
    if (timed == cudaErrorTimeout) return late;
    TRIBUTARY_RETURN_IF_ERROR(FromCuda("timing round trips", timed));
    v1::ProbeResult result;
    result.set_memory_ops_seconds(times.memory_ops);
    result.set_spinning_seconds(times.spinning);
    return result;
  }

  absl::Status OpenMailbox(const v1::MailboxLayout& layout, const v1::DeviceMailbox& device,
                           const std::string& gpu) {
    view_.layout = mailbox::ReadLayout(layout);
    if (device.process_nonce() == cuda::ProcessNonce()) {
      mailbox_ = reinterpret_cast<void*>(device.address());
    } else {
      cudaIpcMemHandle_t handle;
      if (device.raw_handle().size() != sizeof(handle)) {
        return absl::InternalError("the service sent no handle of a mailbox");
      }
      std::memcpy(&handle, device.raw_handle().data(), sizeof(handle));
      TRIBUTARY_RETURN_IF_ERROR(
          FromCuda("opening the mailbox",
                   cudaIpcOpenMemHandle(&mailbox_, handle, cudaIpcMemLazyEnablePeerAccess)));
      opened_here_ = true;
    }
    TRIBUTARY_RETURN_IF_ERROR(FromCuda("a counter", cudaMalloc(&counter_, sizeof(HostCounter))));
    TRIBUTARY_RETURN_IF_ERROR(FromCuda("a counter", cudaMemset(counter_, 0, sizeof(HostCounter))));
    TRIBUTARY_RETURN_IF_ERROR(
        FromCuda("pinned memory", cudaHostAlloc(&pinned_, sizeof(Pinned), cudaHostAllocMapped)));
    *pinned_ = {};
    TRIBUTARY_RETURN_IF_ERROR(
        FromCuda("a stream", cudaStreamCreateWithFlags(&control_, cudaStreamNonBlocking)));
    view_.mailbox = static_cast<std::byte*>(mailbox_);
    view_.counter = counter_;
    view_.failure = &pinned_->failure;
    view_.bound = static_cast<uint64_t>(std::chrono::nanoseconds(options_.wait_timeout).count());
    view_.one_gpu = device.device_uuid() == gpu;
    view_.several_gpus = device.several_gpus();
    return absl::OkStatus();
  }

  // On the stream's thread: a service that died ends no wait.
  void EndWaits(const absl::Status& why) {
    if (cudaSetDevice(gpu_) != cudaSuccess) return;
    pinned_->end_status = static_cast<uint32_t>(why.ok() ? 1 : why.raw_code());
    cudaMemcpyAsync(view_.mailbox + view_.layout.status, &pinned_->end_status, sizeof(uint32_t),
                    cudaMemcpyHostToDevice, control_);
    EndStreamWaits();
  }

  // Of layers, and of round trips.
  void EndStreamWaits() {
    for (const size_t word : {view_.layout.handed_back, view_.layout.host_sleeps}) {
      cudaMemcpyAsync(view_.mailbox + word, &pinned_->ends_waits, sizeof(uint32_t),
                      cudaMemcpyHostToDevice, control_);
    }
  }

  // A wait of a stream has no bound of its own: this thread ends it when it has taken too long.
  void GuardWaits() {
    if (cudaSetDevice(gpu_) != cudaSuccess) return;
    uint32_t waits_for = 0;
    Clock::time_point since = Clock::now();
    const MutexLock lock(mutex_);
    while (!stopping_) {
      changed_.WaitUntil(mutex_, Clock::now() + kGuardPause);
      const uint32_t handed_over = std::atomic_ref(pinned_->failure.handed_over).load();
      const uint32_t taken_back = std::atomic_ref(pinned_->failure.taken_back).load();
      const Clock::time_point now = Clock::now();
      if (handed_over == taken_back || handed_over != waits_for) since = now;
      waits_for = handed_over;
      if (now - since > options_.wait_timeout) EndStreamWaits();
    }
  }

  absl::Status CheckRoom(int32_t rows, int32_t tokens) const {
    if (rows > options_.max_rows) {
      return InvalidField(
          "q.rows", absl::StrCat("is ", rows, ", the session was opened for ", options_.max_rows));
    }
    if (tokens > options_.max_new_tokens) {
      return InvalidField("k.rows", absl::StrCat("is ", tokens, ", the session was opened for ",
                                                 options_.max_new_tokens));
    }
    return absl::OkStatus();
  }

  StridedTensor Strided(const HeadRows& rows) const {
    if (rows.data == nullptr) return {};
    const int32_t bytes = BytesOf(options_.dtype);
    return {.data = static_cast<const std::byte*>(rows.data),
            .rows = rows.rows,
            .heads = rows.heads,
            .head_bytes = rows.dim * bytes,
            .row_stride = RowStride(rows) * bytes,
            .head_stride = HeadStride(rows) * bytes};
  }

  const DeviceSessionOptions options_;
  const std::chrono::milliseconds timeout_;
  const std::string lease_;  // that the session presents; empty: none
  int gpu_ = 0;
  std::unique_ptr<v1::AttentionService::Stub> stub_;
  void* mailbox_ = nullptr;
  bool opened_here_ = false;  // by its handle
  HostCounter* counter_ = nullptr;
  Pinned* pinned_ = nullptr;
  cudaStream_t control_ = nullptr;
  MailboxView view_;
  uint64_t last_step_ = 0;
  std::unique_ptr<SessionStream> stream_;

  Mutex mutex_;
  CondVar changed_;
  bool stopping_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  std::thread guard_;  // where streams wait
};

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceSession>> DeviceSession::Open(
    const ConnectOptions& connect, const DeviceSessionOptions& options) {
  auto session = std::make_unique<CudaDeviceSession>(connect, options);
  TRIBUTARY_RETURN_IF_ERROR(session->Start(connect));
  return session;
}

}  // namespace tributary::client
