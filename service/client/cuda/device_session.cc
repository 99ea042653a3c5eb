#include "service/client/cuda/device_session.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/cuda/device_memory.h"
#include "base/cuda/lent_memory.h"
#include "base/mailbox/layout_message.h"
#include "base/mailbox/pieces.h"
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

// Where the heads of a layer's tensors lie in a slot.
struct SlotPlaces {
  SlotHeads q;  // and output
  SlotHeads kv;
  bool operator==(const SlotPlaces&) const = default;
};

// Takes memory of `bytes` bytes on the GPU, all of them 0.
template <typename T>
absl::Status TakeZeros(size_t bytes, T** data) {
  TRIBUTARY_RETURN_IF_ERROR(FromCuda("memory of the session", cudaMalloc(data, bytes)));
  return FromCuda("memory of the session", cudaMemset(*data, 0, bytes));
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
    lent_mailbox_.reset();
    if (opened_here_) cudaIpcCloseMemHandle(mailbox_);
    cudaFree(view_.counter);
    cudaFree(timing_.stamps);
    cudaFreeHost(timing_.records);
    cudaFreeHost(pinned_);
    cudaStreamDestroy(control_);
  }

  absl::Status Start(const ConnectOptions& connect) {
    TRIBUTARY_RETURN_IF_ERROR(Prepare(connect));
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
    open.set_device_uuid(gpu_uuid_);
    open.set_measures(true);
    open.set_endpoints(options_.endpoints);
    open.set_kv_replicated(options_.kv_replicated);
    open.set_timed(options_.timed);
    open.set_hands_over_in_parts(true);
    return Begin(first);
  }

  absl::Status StartAsEndpoint(const ConnectOptions& connect, const EndpointOptions& endpoint) {
    TRIBUTARY_RETURN_IF_ERROR(Prepare(connect));
    v1::SessionRequest first;
    first.mutable_join()->set_session_id(endpoint.session_id);
    first.mutable_join()->set_secret(endpoint.secret);
    first.mutable_join()->set_endpoint(endpoint.endpoint);
    return Begin(first);
  }

  absl::StatusOr<uint64_t> Submit(const SessionStep& step) override {
    ++last_step_;
    TRIBUTARY_RETURN_IF_ERROR((opened().endpoint() > 0
                                   ? stream_->AwaitAccepted(last_step_, Until())
                                   : stream_->Submit(MessageOf(step, last_step_), Until()))
                                  .status());
    LargeStep large{.pieces = PiecesOf(step, options_.max_rows, options_.max_new_tokens),
                    .layers_left = step.layers};
    for (const SessionEntry& entry : step.entries) {
      large.rows += entry.query_rows;
      large.tokens += entry.new_tokens;
    }
    if (large.pieces.size() > 1) large_steps_.push_back(std::move(large));
    return last_step_;
  }

  absl::Status Attend(cudaStream_t stream, const SessionLayer& layer) override {
    TRIBUTARY_RETURN_IF_ERROR(CheckTensors(layer));
    TRIBUTARY_RETURN_IF_ERROR(CheckRows("q", layer.q, BytesOf(options_.dtype)));
    TRIBUTARY_RETURN_IF_ERROR(CheckRows("output", layer.output, BytesOf(options_.dtype)));
    if (layer.q.data == nullptr) return InvalidField("q", "has no data: see Append");
    if (layer.lse != nullptr && !options_.return_lse) {
      return InvalidField("lse", "is given, but the session was opened without return_lse");
    }
    TRIBUTARY_ASSIGN_OR_RETURN(const SlotPlaces slot, PlacesOf(layer));
    if (FitsSlot(layer)) {
      TRIBUTARY_RETURN_IF_ERROR(LaunchOver(layer, slot, {}, stream));
      return LaunchBack(layer, slot, stream);
    }
    TRIBUTARY_ASSIGN_OR_RETURN(const std::vector<mailbox::Piece> pieces, NextPieces(layer, stream));
    const bool ahead = !view_.stream_waits && view_.layout.slots > 1;
    std::optional<SessionLayer> last;  // whose results are not taken back yet
    for (const mailbox::Piece& piece : pieces) {
      const SessionLayer part = PartOf(layer, piece, element_bytes());
      if (!ahead && last.has_value()) TRIBUTARY_RETURN_IF_ERROR(LaunchBack(*last, slot, stream));
      const HandOver how{.ahead = ahead && last.has_value() ? 1u : 0u};
      TRIBUTARY_RETURN_IF_ERROR(LaunchOver(part, slot, how, stream));
      if (ahead && last.has_value()) TRIBUTARY_RETURN_IF_ERROR(LaunchBack(*last, slot, stream));
      last = part;
    }
    return LaunchBack(*last, slot, stream);
  }

  absl::Status Append(cudaStream_t stream, const HeadRows& k, const HeadRows& v) override {
    const SessionLayer layer{.k = k, .v = v};
    TRIBUTARY_RETURN_IF_ERROR(CheckTensors(layer));
    TRIBUTARY_ASSIGN_OR_RETURN(const SlotPlaces slot, PlacesOf(layer));
    std::vector<mailbox::Piece> pieces = {{.tokens = k.rows}};
    if (!FitsSlot(layer)) {
      TRIBUTARY_ASSIGN_OR_RETURN(pieces, NextPieces(layer, stream));
    }
    for (const mailbox::Piece& piece : pieces) {
      const SessionLayer part = PartOf(layer, piece, element_bytes());
      const HandOver how{.no_result = !view_.stream_waits};
      TRIBUTARY_RETURN_IF_ERROR(LaunchOver(part, slot, how, stream));
      if (!how.no_result) TRIBUTARY_RETURN_IF_ERROR(LaunchBack(part, slot, stream));
    }
    return absl::OkStatus();
  }

  absl::Status Await(uint64_t step) override { return stream_->Await(step, Until()); }

  absl::Status status() const override {
    if (absl::Status said = stream_->status(); !said.ok()) return said;
    const uint32_t failure = pinned_->failure.status;
    if (failure == 0) return absl::OkStatus();
    return absl::Status(static_cast<absl::StatusCode>(failure), "a wait for the service ended");
  }

  std::vector<LayerTimes> TakeTimes() override {
    std::vector<LayerTimes> times;
    if (timing_.records == nullptr) return times;
    const uint32_t taken = std::atomic_ref(timing_.records->taken).load(std::memory_order_acquire);
    if (taken - times_told_ > LayerRecords::kLayers) times_told_ = taken - LayerRecords::kLayers;
    for (; times_told_ != taken; ++times_told_) {
      times.push_back(
          TimesOf(timing_.records->layers[times_told_ % LayerRecords::kLayers], view_.one_gpu));
    }
    return times;
  }

  const v1::SessionOpened& opened() const override { return stream_->opened(); }

 private:
  // A step that is larger than a slot, and whose layers have not all been launched.
  struct LargeStep {
    std::vector<mailbox::Piece> pieces;
    int32_t layers_left = 0;
    int32_t rows = 0;
    int32_t tokens = 0;
  };
  struct Pinned {
    HostFailure failure;
    uint32_t end_status = 0;  // what EndWaits writes
    uint32_t ends_waits = mailbox::kEndsWaits;
  };

  Clock::time_point Until() const { return Clock::now() + timeout_; }
  ElementBytes element_bytes() const {
    return {.inputs = BytesOf(options_.dtype), .output = BytesOf(options_.dtype)};
  }

  absl::Status Prepare(const ConnectOptions& connect) {
    TRIBUTARY_RETURN_IF_ERROR(FromCuda("the current GPU", cudaGetDevice(&gpu_)));
    cudaDeviceProp properties;
    TRIBUTARY_RETURN_IF_ERROR(
        FromCuda("the current GPU", cudaGetDeviceProperties(&properties, gpu_)));
    gpu_uuid_ = cuda::UuidOf(properties);
    TRIBUTARY_RETURN_IF_ERROR(FromCuda("loading kernels", LoadSessionKernels()));
    absl::StatusOr<std::shared_ptr<grpc::Channel>> channel = MakeChannel(connect);
    TRIBUTARY_RETURN_IF_ERROR(channel.status());
    stub_ = v1::AttentionService::NewStub(*channel);
    return absl::OkStatus();
  }

  // Opens or joins the session, as the first message says.
  absl::Status Begin(const v1::SessionRequest& first) {
    TRIBUTARY_ASSIGN_OR_RETURN(stream_, SessionStream::Open(stub_.get(), first, lease_, Until(),
                                                            [this](const v1::SessionProbe& asked) {
                                                              return Probe(asked);
                                                            }));
    const v1::SessionOpened& opened = stream_->opened();
    if (!opened.has_device()) {
      return InvalidField("join.session_id", "the session has no mailbox on a GPU");
    }
    // An endpoint that joins has the options of the one that opened the session.
    const v1::OpenSession& terms = opened.terms();
    options_ = {.cache_id = terms.cache_id(),
                .max_rows = terms.max_rows(),
                .max_new_tokens = terms.max_new_tokens(),
                .dtype = terms.q_dtype(),
                .return_lse = terms.return_lse(),
                .max_steps = terms.max_steps(),
                .wait_timeout = std::chrono::milliseconds(terms.wait_timeout_ms()),
                .endpoints = terms.endpoints(),
                .kv_replicated = terms.kv_replicated(),
                .timed = terms.timed()};
    // The service did not ask for round trips.
    if (mailbox_ == nullptr) {
      TRIBUTARY_RETURN_IF_ERROR(OpenMailbox(opened.layout(), opened.device()));
    }
    view_.stream_waits = opened.waiting() == v1::WAITING_STREAM_MEMORY_OPS;
    if (view_.stream_waits) guard_ = std::thread([this] { GuardWaits(); });
    stream_->OnEnd([this](const absl::Status& why) { EndWaits(why); });
    return absl::OkStatus();
  }

  absl::StatusOr<v1::ProbeResult> Probe(const v1::SessionProbe& asked) {
    TRIBUTARY_RETURN_IF_ERROR(OpenMailbox(asked.layout(), asked.device()));
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

  absl::Status OpenMailbox(const v1::MailboxLayout& layout, const v1::DeviceMailbox& device) {
    view_.layout = mailbox::ReadLayout(layout);
    if (device.process_nonce() == cuda::ProcessNonce()) {
      lent_mailbox_ = cuda::ShareOfLentMemory(reinterpret_cast<const void*>(device.address()));
      if (lent_mailbox_ == nullptr) {
        return absl::AbortedError("the session has ended: its mailbox is gone");
      }
      mailbox_ = lent_mailbox_.get();
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
    TRIBUTARY_RETURN_IF_ERROR(TakeZeros(sizeof(HostCounter), &view_.counter));
    if (view_.layout.stamps != 0) {
      const auto slots = static_cast<size_t>(view_.layout.slots);
      TRIBUTARY_RETURN_IF_ERROR(TakeZeros(slots * sizeof(LayerStamps), &timing_.stamps));
      TRIBUTARY_RETURN_IF_ERROR(
          FromCuda("pinned memory",
                   cudaHostAlloc(&timing_.records, sizeof(LayerRecords), cudaHostAllocMapped)));
      *timing_.records = {};
    }
    TRIBUTARY_RETURN_IF_ERROR(
        FromCuda("pinned memory", cudaHostAlloc(&pinned_, sizeof(Pinned), cudaHostAllocMapped)));
    *pinned_ = {};
    TRIBUTARY_RETURN_IF_ERROR(
        FromCuda("a stream", cudaStreamCreateWithFlags(&control_, cudaStreamNonBlocking)));
    view_.mailbox = static_cast<std::byte*>(mailbox_);
    view_.failure = &pinned_->failure;
    view_.bound = static_cast<uint64_t>(std::chrono::nanoseconds(options_.wait_timeout).count());
    view_.one_gpu = device.device_uuid() == gpu_uuid_;
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

  absl::Status CheckTensors(const SessionLayer& layer) const {
    const int32_t bytes = BytesOf(options_.dtype);
    TRIBUTARY_RETURN_IF_ERROR(CheckRows("k", layer.k, bytes));
    return CheckRows("v", layer.v, bytes);
  }

  bool FitsSlot(const SessionLayer& layer) const {
    if (layer.q.rows > options_.max_rows || layer.k.rows > options_.max_new_tokens) return false;
    // An endpoint without KV heads need not say how many new tokens come with its rows.
    const bool unsaid = layer.q.data != nullptr && layer.k.data == nullptr && layer.k.rows == 0;
    return !unsaid || layer.q.rows <= options_.max_new_tokens || large_steps_.empty() ||
           large_steps_.front().rows != layer.q.rows;
  }

  // Where the endpoint's heads lie among those of all endpoints.
  absl::StatusOr<SlotPlaces> PlacesOf(const SessionLayer& layer) const {
    if (options_.endpoints == 1) return SlotPlaces{};
    std::optional<SlotPlaces> places;
    for (const v1::LayerShape& shape : opened().shapes()) {
      const auto fits = [&shape](const HeadRows& rows, int32_t heads) {
        return rows.data == nullptr || (rows.heads == heads && rows.dim == shape.head_dim());
      };
      if (!fits(layer.q, shape.q_heads()) || !fits(layer.k, shape.kv_heads())) continue;
      SlotPlaces found;
      if (layer.q.data != nullptr) found.q = {shape.slot_q_heads(), shape.first_q_head()};
      if (layer.k.data != nullptr) found.kv = {shape.slot_kv_heads(), shape.first_kv_head()};
      if (places.has_value() && *places != found) {
        return absl::FailedPreconditionError(
            "layers of this cache with as many heads of this endpoint have other heads of others, "
            "and a layer does not tell which of them it is");
      }
      places = found;
    }
    if (places.has_value()) return *places;
    return InvalidField(layer.q.data != nullptr ? "q.heads" : "k.heads",
                        "no layer has so many heads of this endpoint: see SessionOpened.shapes");
  }

  // The pieces of a layer that does not fit a slot: the next one of the first step that is so
  // large.
  absl::StatusOr<std::vector<mailbox::Piece>> NextPieces(const SessionLayer& layer,
                                                         cudaStream_t stream) {
    const auto larger = [](absl::string_view field, int32_t is, int32_t room) {
      return InvalidField(field, absl::StrCat("is ", is, ", a slot has room for ", room,
                                              ", and no step of so many has been submitted"));
    };
    const bool has_rows = large_steps_.empty() || layer.q.rows == large_steps_.front().rows;
    if (layer.q.rows > options_.max_rows && (large_steps_.empty() || !has_rows)) {
      return larger("q.rows", layer.q.rows, options_.max_rows);
    }
    // An endpoint without KV heads need not state tokens where it has rows.
    const bool rows_tell = layer.k.data == nullptr && layer.q.data != nullptr;
    const bool has_tokens =
        !large_steps_.empty() && (rows_tell || layer.k.rows == large_steps_.front().tokens);
    if (!has_tokens || !has_rows) {
      return larger("k.rows", layer.k.rows, options_.max_new_tokens);
    }
    cudaStreamCaptureStatus captured = cudaStreamCaptureStatusNone;
    TRIBUTARY_RETURN_IF_ERROR(
        FromCuda("the stream's state", cudaStreamIsCapturing(stream, &captured)));
    if (captured != cudaStreamCaptureStatusNone) {
      return absl::FailedPreconditionError(
          "layers of a step that is larger than a slot are not captured in a graph");
    }
    LargeStep& step = large_steps_.front();
    std::vector<mailbox::Piece> pieces = step.pieces;
    if (--step.layers_left == 0) large_steps_.pop_front();
    return pieces;
  }

  // The launches of one layer, or of a piece of one.
  absl::Status LaunchOver(const SessionLayer& layer, const SlotPlaces& slot, HandOver how,
                          cudaStream_t stream) const {
    how.q = slot.q;
    how.kv = slot.kv;
    how.timing = timing_;
    return FromCuda(
        "handing a layer over",
        LaunchHandOver(view_, Strided(layer.q), Strided(layer.k), Strided(layer.v), how, stream));
  }
  absl::Status LaunchBack(const SessionLayer& layer, const SlotPlaces& slot,
                          cudaStream_t stream) const {
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
    return FromCuda("taking a layer back",
                    LaunchTakeBack(view_, target, {.q = slot.q, .timing = timing_}, stream));
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

  DeviceSessionOptions options_;
  const std::chrono::milliseconds timeout_;
  const std::string lease_;  // that the session presents; empty: none
  int gpu_ = 0;
  std::string gpu_uuid_;
  std::unique_ptr<v1::AttentionService::Stub> stub_;
  void* mailbox_ = nullptr;
  bool opened_here_ = false;            // by its handle
  std::shared_ptr<void> lent_mailbox_;  // by a service of this process
  Pinned* pinned_ = nullptr;
  cudaStream_t control_ = nullptr;
  MailboxView view_;
  Timing timing_;
  uint64_t last_step_ = 0;
  std::deque<LargeStep> large_steps_;
  uint32_t times_told_ = 0;
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

absl::StatusOr<std::unique_ptr<DeviceSession>> DeviceSession::Join(
    const ConnectOptions& connect, const EndpointOptions& endpoint) {
  auto session = std::make_unique<CudaDeviceSession>(connect, DeviceSessionOptions{});
  TRIBUTARY_RETURN_IF_ERROR(session->StartAsEndpoint(connect, endpoint));
  return session;
}

}  // namespace tributary::client
