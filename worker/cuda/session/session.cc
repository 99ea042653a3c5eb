#include "worker/cuda/session/session.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/cuda/device_memory.h"
#include "base/cuda/stream_wait.h"
#include "base/process/boot_id.h"
#include "base/status/errors.h"
#include "base/status/status_macros.h"
#include "kernels/cuda/append/append.h"
#include "kernels/cuda/merge/merge.h"
#include "worker/cuda/capture.h"
#include "worker/cuda/nvtx_range.h"
#include "worker/cuda/session/gate_kernel.h"
#include "worker/cuda/session/session_group.h"
#include "worker/cuda/shard.h"
#include "worker/cuda/status.h"
#include "worker/slot_bytes.h"
#include "worker/status_conversion.h"

namespace tributary::worker {
namespace {

using Clock = std::chrono::steady_clock;

// For what still runs of a session that was told to end.
constexpr std::chrono::seconds kEndGrace{5};
constexpr std::chrono::microseconds kEndNap{50};
// How much longer exchanges wait, for ranks that end the session, too.
constexpr std::chrono::seconds kExchangeGrace{2};

}  // namespace

struct CudaSession::Layer {
  PlannedStep step;
  const DevicePlan& plan;
  CudaPlace place;
  uint32_t count = 0;
  bool own_gate = false;  // the gate is a launch of its own
  mailbox::SharedGate gate;
  uint32_t* differs = nullptr;  // [entries] in pinned memory, where the layer repeats tokens
  StepResults results;
  std::unique_ptr<CudaOperations> operations;

  bool MayBeCaptured() const {
    return step.kind != StepKind::kPrefill && plan.repeatable() && differs == nullptr &&
           !operations->narrows() && operations->MayBeCaptured() &&
           std::max(step.plan.query_rows, step.plan.new_tokens) <= kMostGraphRows;
  }
};

absl::StatusOr<std::unique_ptr<CudaSession>> CudaSession::Open(CudaRank& rank, SessionWatch& watch,
                                                               const OpenSessionCommand& command,
                                                               collective::Communicator& comm,
                                                               collective::Deadline deadline,
                                                               OnSessionNews news) {
  TRIBUTARY_RETURN_IF_ERROR(rank.Use());
  TRIBUTARY_RETURN_IF_ERROR(LoadGate());
  std::unique_ptr<CudaSession> session(
      new CudaSession(rank, watch, command, comm.size(), comm.rank()));
  TRIBUTARY_RETURN_IF_ERROR(comm.size() == 1 ? session->TakeMemory()
                                             : session->MeetOthers(comm, deadline));
  const bool answers = command.measures && comm.rank() == 0;
  // Ahead of the launches, so that no memory is freed meanwhile: that would wait for them, and they
  // wait for the host.
  session->Watch(std::move(news), answers);
  if (answers) TRIBUTARY_RETURN_IF_ERROR(session->AnswerProbe());
  return session;
}

absl::Status CudaSession::TakeMemory() {
  TRIBUTARY_ASSIGN_OR_RETURN(memory_, SessionMemory::Take(rank_, command_, ranks_, own_rank_));
  return own_rank_ == 0 ? Describe() : absl::OkStatus();
}

absl::Status CudaSession::MeetOthers(collective::Communicator& comm,
                                     collective::Deadline deadline) {
  SessionMeeting meeting(comm, deadline);
  absl::Status own;
  if (rank_.options().exchange == ExchangePlace::kHost) {
    own = FieldError(absl::StatusCode::kFailedPrecondition, "open.memory",
                     "partials meet in host memory (device_exchange), and with several ranks a "
                     "mailbox on a GPU needs them to meet on GPUs; HOST serves any");
  }
  if (own.ok()) own = TakeMemory();
  TRIBUTARY_RETURN_IF_ERROR(meeting.Agree(own));
  TRIBUTARY_ASSIGN_OR_RETURN(mailbox_, meeting.HearMailbox(mailbox_));
  mailbox_.machine = BootId();
  mailbox_.several_gpus = true;
  std::unique_ptr<PeerMailbox> root;
  if (own_rank_ > 0) {
    absl::StatusOr<std::unique_ptr<PeerMailbox>> mapped = PeerMailbox::Map(rank_, mailbox_);
    own = mapped.status();
    if (own.ok()) root = *std::move(mapped);
  }
  TRIBUTARY_RETURN_IF_ERROR(meeting.Agree(own));
  TRIBUTARY_ASSIGN_OR_RETURN(std::unique_ptr<collective::DeviceGroup> group,
                             FormSessionGroup(rank_, command_, meeting));
  memory_->Share(std::move(root), std::move(group));
  return absl::OkStatus();
}

absl::Status CudaSession::Describe() {
  cudaIpcMemHandle_t handle;
  TRIBUTARY_CUDA_OK(cudaIpcGetMemHandle(&handle, memory_->mailbox()));
  cudaDeviceProp properties;
  TRIBUTARY_CUDA_OK(cudaGetDeviceProperties(&properties, rank_.options().gpu));
  mailbox_ = {.handle = std::string(reinterpret_cast<const char*>(&handle), sizeof(handle)),
              .gpu = cuda::UuidOf(properties),
              .address = reinterpret_cast<uint64_t>(memory_->mailbox()),
              .process_nonce = cuda::ProcessNonce(),
              .machine = BootId()};
  return absl::OkStatus();
}

absl::Status CudaSession::AnswerProbe() {
  const ProbeWords words{.asked = Word(command_.layout.service_sleeps),
                         .answered = Word(command_.layout.host_sleeps),
                         .status = Word(command_.layout.status),
                         .bound = static_cast<uint64_t>(command_.wait_timeout.count())};
  uint32_t answered = 0;
  while (answered < kProbeRounds) {
    const uint32_t round = answered + 1;
    const cudaError_t waits = cuda::EnqueueWaitAtLeast(words.asked, round, memory_->stream());
    // The host has the same driver, so it has no such operations either and leaves these rounds
    // out.
    if (waits == cudaErrorNotSupported) break;
    TRIBUTARY_RETURN_IF_ERROR(FromCuda("waiting for a round trip", waits));
    TRIBUTARY_RETURN_IF_ERROR(LaunchAnswer(words, round, memory_->stream()));
    answered = round;
  }
  TRIBUTARY_RETURN_IF_ERROR(
      LaunchAnswers(words, answered + 1, 2 * kProbeRounds, memory_->stream()));
  probe_launched_ = true;
  return absl::OkStatus();
}

void CudaSession::Watch(OnSessionNews news, bool answers) {
  std::function<bool()> answered;
  if (answers) {
    answered = [this] { return probe_launched_ && StateOfStream() != cudaErrorNotReady; };
  }
  watch_.Add(
      command_.session, memory_->progress(),
      [this, news = std::move(news)](SessionNews told) {
        told.rank = own_rank_;
        AddConflicts(&told);
        news(told);
      },
      [this] {
        EndIfHostIsSilent();
        const cudaError_t state = StateOfStream();
        if (state == cudaSuccess || state == cudaErrorNotReady) return absl::OkStatus();
        return FromCuda("a layer of a session", state);
      },
      std::move(answered));
  watched_ = true;
}

cudaError_t CudaSession::StateOfStream() {
  const MutexLock lock(capture_);
  return cudaStreamQuery(memory_->stream());
}

CudaSession::~CudaSession() {
  if (watched_) watch_.Remove(command_.session);
  End(static_cast<int32_t>(absl::StatusCode::kAborted));
  if (memory_ == nullptr || !rank_.Use().ok()) return;
  // Every wait has ended, so what is left of the steps is through in a moment.
  const Clock::time_point grace = Clock::now() + kEndGrace;
  while (cudaStreamQuery(memory_->stream()) == cudaErrorNotReady && Clock::now() < grace) {
    std::this_thread::sleep_for(kEndNap);
    // The host may have overwritten the words that end the waits.
    memory_->EndStreamWaits(command_.layout, command_.endpoints).IgnoreError();
    // A rank that is gone is not waited for.
    if (memory_->group() != nullptr && Clock::now() > grace - kEndGrace + kExchangeGrace) {
      memory_->group()->Abort("the session is over");
    }
  }
  std::vector<std::shared_ptr<PinnedMemory>> unused;
  {
    const MutexLock lock(mutex_);
    unused = std::move(spare_);
    for (Repeat& repeat : repeats_) unused.push_back(std::move(repeat.differs));
  }
  for (std::shared_ptr<PinnedMemory>& memory : unused) watch_.FreeLater(std::move(memory));
  // Other ranks may reach the mailbox for a while.
  SessionMemory* memory = memory_.get();
  watch_.FreeLater(std::move(memory_), [memory] { return memory->PeersAreGone(); });
}

void CudaSession::End(int32_t status) {
  const MutexLock lock(mutex_);
  if (ended_ || memory_ == nullptr || !rank_.Use().ok()) return;
  ended_ = true;
  // An error means that the GPU is lost, and with it the host's wait.
  memory_->WriteStatus(command_.layout, command_.endpoints, static_cast<uint32_t>(status))
      .IgnoreError();
  memory_->EndStreamWaits(command_.layout, command_.endpoints).IgnoreError();
}

void CudaSession::EndIfHostIsSilent() {
  {
    const MutexLock lock(mutex_);
    if (!stream_waits_ || ended_) return;
    const Clock::time_point now = Clock::now();
    const uint32_t passed = std::atomic_ref(memory_->progress()->passed).load();
    if (passed != seen_ || mailbox::Reached(passed, expected_)) {
      seen_ = passed;
      seen_since_ = now;
    }
    if (now - seen_since_ <= command_.wait_timeout) return;
  }
  End(static_cast<int32_t>(absl::StatusCode::kDeadlineExceeded));
}

// ------------------------------------------------------------------------------------ in the slot

DeviceSession::SlotTensors CudaSession::TensorsOf(const LayerGeometry& geometry, uint32_t count,
                                                  int32_t rows, int32_t tokens) const {
  const std::byte* slot = memory_->mailbox() + command_.layout.SlotOf(count);
  const mailbox::SlotRoom bytes = SlotBytes(geometry, command_, rows, tokens);
  return {.q = {.data = slot + command_.layout.q, .dtype = command_.q_dtype, .bytes = bytes.q},
          .k = {.data = slot + command_.layout.k, .dtype = command_.kv_dtype, .bytes = bytes.k},
          .v = {.data = slot + command_.layout.v, .dtype = command_.kv_dtype, .bytes = bytes.v}};
}

mailbox::SharedGate CudaSession::GateOf(int32_t layer, int32_t layers, bool has_results) const {
  const bool is_root = own_rank_ == 0;
  // Other ranks do not share the GPU with the host.
  const bool stream_waits = waiting_ == Waiting::kStreamMemoryOps && is_root;
  const bool hears_begun = command_.layout.begun != 0 && is_root && !stream_waits;
  uint32_t* peers = ranks_ > 1 ? memory_->finished_of_peers() : nullptr;
  mailbox::SharedGate gate;
  static_cast<mailbox::Gate&>(gate) = {
      .arrived = Word(command_.layout.arrived),
      .unit = command_.layout.arrived_unit(),
      .finished =
          is_root ? Word(command_.layout.finished) : peers + (own_rank_ - 1) * mailbox::kPeerWords,
      .status = Word(command_.layout.status),
      .counter = memory_->counter(),
      .progress = memory_->progress(),
      .bound = static_cast<uint64_t>(command_.wait_timeout.count()),
      .layer = layer,
      .layers = layers,
      // Where other endpoints compute is not known.
      .one_gpu = is_root && command_.endpoints == 1 && command_.host_gpu == mailbox_.gpu,
      .begun = hears_begun ? Word(command_.layout.begun) : nullptr,
      .handed_over = stream_waits ? Word(command_.layout.handed_over) : nullptr,
      .handed_back = stream_waits ? Word(command_.layout.handed_back) : nullptr,
      .exchange_failure = ranks_ > 1 ? memory_->group()->failure_word() : nullptr,
      .peers = is_root && !has_results ? peers : nullptr,
      .ranks = ranks_};
  gate.endpoints = command_.endpoints;
  gate.told = is_root ? command_.endpoints : 1;
  if (!is_root || command_.layout.stamps == 0) return gate;
  gate.stamps = memory_->mailbox() + command_.layout.first_slot + command_.layout.stamps;
  gate.slot_bytes = command_.layout.slot_bytes;
  gate.slots = static_cast<uint32_t>(command_.layout.slots);
  return gate;
}

CudaPlace CudaSession::PlaceOf(const PlannedStep& step, const DevicePlan& plan,
                               const mailbox::SharedGate& gate, uint32_t count) const {
  CudaPlace place{
      .stream = memory_->stream(), .memory = memory_->workspace(), .group = memory_->group()};
  const bool fetches = own_rank_ > 0;
  const mailbox::Layout& layout = command_.layout;
  place.q = fetches ? memory_->fetched() + layout.q : step.q.data;
  place.k = fetches ? memory_->fetched() + layout.k : step.k.data;
  place.v = fetches ? memory_->fetched() + layout.v : step.v.data;
  if (command_.output_dtype == DType::kF32 && own_rank_ == 0) {
    std::byte* slot = memory_->mailbox() + command_.layout.SlotOf(count);
    place.result_o = reinterpret_cast<float*>(slot + command_.layout.output);
    place.result_lse = reinterpret_cast<float*>(slot + command_.layout.lse);
  }
  // What a prefill multiplies is narrowed before it is appended, and so behind the gate.
  const bool narrows_first = plan.new_tokens() != nullptr && step.k.dtype == DType::kF32;
  // Behind a wait of the stream nothing begins early, as the gate's launch lets the append do.
  const bool stream_waits = gate.handed_over != nullptr;
  const bool small_append =
      !fetches && !gate.is_shared() && !stream_waits && !narrows_first &&
      step.kind != StepKind::kDflash && plan.write_slots().count > 0 &&
      plan.listed_tokens().count == 0 &&
      cuda::AppendBlocks(step.geometry().kv, plan.append_places()) <= cuda::kMostGatedBlocks;
  if (small_append) place.gate = gate;
  place.begins_before_arrival = gate.begun != nullptr;
  place.timed_gate = gate;
  return place;
}

// With the padding that launches of the layer may read, because a graph serves steps of other
// sizes.
FetchArgs CudaSession::FetchOf(const PlannedStep& step, const DevicePlan& plan,
                               const mailbox::SharedGate& gate) const {
  const int32_t rows = step.plan.query_rows > 0 ? plan.padded_rows() : 0;
  const int32_t tokens = step.plan.new_tokens > 0 ? plan.padded_tokens() : 0;
  const mailbox::SlotRoom bytes = SlotBytes(step.geometry(), command_, rows, tokens);
  const mailbox::Layout& layout = command_.layout;
  return {.gate = gate,
          .layout = layout,
          .mailbox = memory_->mailbox(),
          .to = memory_->fetched(),
          .bytes = {std::min(bytes.q, layout.k - layout.q), std::min(bytes.k, layout.v - layout.k),
                    std::min(bytes.v, layout.output - layout.v)}};
}

// ----------------------------------------------------------------------------------------- steps

absl::Status CudaSession::CopyPages(Shard& shard, const std::vector<PageCopy>& copies) {
  if (copies.empty()) return absl::OkStatus();
  TRIBUTARY_RETURN_IF_ERROR(rank_.Use());
  TRIBUTARY_RETURN_IF_ERROR(memory_->FollowRank());
  return static_cast<CudaShard&>(shard).CopyPages(copies, memory_->stream());
}

absl::Status CudaSession::Enqueue(std::span<const PlannedStep> steps,
                                  std::span<Shard* const> shards, uint32_t first_count,
                                  Waiting waiting) {
  const NvtxRange range("session step", 0);
  waiting_ = waiting;
  TRIBUTARY_RETURN_IF_ERROR(rank_.Use());
  TRIBUTARY_RETURN_IF_ERROR(memory_->FollowRank());
  std::deque<Layer> layers;
  TRIBUTARY_RETURN_IF_ERROR(Prepare(steps, shards, first_count, &layers));
  TRIBUTARY_RETURN_IF_ERROR(memory_->plans().Enqueue());
  TRIBUTARY_RETURN_IF_ERROR(ExpectDifferences(first_count, &layers));
  const bool may_be_graph = rank_.options().graphs && graphs_work_ &&
                            std::all_of(layers.begin(), layers.end(),
                                        [](const Layer& layer) { return layer.MayBeCaptured(); });
  TRIBUTARY_RETURN_IF_ERROR(may_be_graph ? LaunchGraph(layers) : Launch(layers));
  if (waiting == Waiting::kStreamMemoryOps) {
    const MutexLock lock(mutex_);
    const bool idle = !stream_waits_ || mailbox::Reached(seen_, expected_);
    if (idle) seen_since_ = Clock::now();
    stream_waits_ = true;
    expected_ = first_count + static_cast<uint32_t>(steps.size());
  }
  watch_.Expect(command_.session, first_count + static_cast<uint32_t>(steps.size()));
  return absl::OkStatus();
}

absl::Status CudaSession::Prepare(std::span<const PlannedStep> steps,
                                  std::span<Shard* const> shards, uint32_t first_count,
                                  std::deque<Layer>* layers) {
  memory_->plans().BeginStep();
  const auto count = static_cast<int32_t>(steps.size());
  for (int32_t i = 0; i < count; ++i) {
    const PlannedStep& step = steps[static_cast<size_t>(i)];
    TRIBUTARY_ASSIGN_OR_RETURN(const SessionPlans::Slot* slot,
                               memory_->plans().PlanOf(step, rank_.plan_options()));
    const mailbox::SharedGate gate = GateOf(i, count, step.plan.query_rows > 0);
    const uint32_t number = first_count + static_cast<uint32_t>(i);
    const CudaPlace place = PlaceOf(step, slot->plan, gate, number);
    layers->push_back({.step = step,
                       .plan = slot->plan,
                       .place = place,
                       .count = number,
                       .own_gate = place.gate.arrived == nullptr,
                       .gate = gate});
    Layer& layer = layers->back();
    const auto& shard = static_cast<const CudaShard&>(*shards[static_cast<size_t>(i)]);
    layer.operations = std::make_unique<CudaOperations>(layer.step, slot->plan, slot->data.data(),
                                                        shard.layer(step.layer_index), rank_,
                                                        layer.place, &layer.results);
    TRIBUTARY_RETURN_IF_ERROR(layer.operations->Reserve(2));
  }
  return absl::OkStatus();
}

absl::Status CudaSession::LaunchLayer(Layer& layer) {
  const bool stream_waits = layer.gate.handed_over != nullptr;
  if (stream_waits) {
    if (layer.gate.layer > 0) {
      TRIBUTARY_RETURN_IF_ERROR(LaunchFinish(layer.gate, early_launch_, memory_->stream()));
    }
    for (int32_t e = 0; e < command_.endpoints; ++e) {
      const uint32_t* word = Word(command_.layout.OfEndpoint(e).handed_over);
      TRIBUTARY_RETURN_IF_ERROR(
          FromCuda("waiting for a layer", cuda::EnqueueWaitAtLeast(word, 1, memory_->stream())));
    }
  }
  if (own_rank_ > 0) {
    TRIBUTARY_RETURN_IF_ERROR(
        LaunchFetch(FetchOf(layer.step, layer.plan, layer.gate), early_launch_, memory_->stream()));
  } else if (layer.own_gate) {
    TRIBUTARY_RETURN_IF_ERROR(
        LaunchGate(layer.gate, early_launch_ && !stream_waits, memory_->stream()));
  }
  TRIBUTARY_RETURN_IF_ERROR(layer.operations->StageAndEnqueueInputs());
  TRIBUTARY_RETURN_IF_ERROR(RunStep(layer.step, *layer.operations));
  if (layer.differs != nullptr) {
    TRIBUTARY_CUDA_OK(cudaMemcpyAsync(layer.differs, memory_->workspace().differs.data(),
                                      static_cast<size_t>(layer.plan.entries()) * sizeof(uint32_t),
                                      cudaMemcpyDeviceToHost, memory_->stream()));
  }
  if (command_.output_dtype == DType::kF32 || layer.step.plan.query_rows == 0 || own_rank_ > 0) {
    return absl::OkStatus();
  }
  const LayerGeometry geometry = layer.step.geometry();
  std::byte* slot = memory_->mailbox() + command_.layout.SlotOf(layer.count);
  cuda::MergeArgs args = cuda::ConversionOf(
      memory_->workspace().result_o.as<float>(), memory_->workspace().result_lse.as<float>(),
      layer.step.plan.query_rows, geometry.q_heads, geometry.kv.value_dim);
  args.out = slot + command_.layout.output;
  args.out_dtype = command_.output_dtype;
  args.begins_early = early_launch_;
  if (command_.return_lse) args.lse_out = reinterpret_cast<float*>(slot + command_.layout.lse);
  return ToAbsl(cuda::LaunchMerge(args, memory_->stream()));
}

absl::Status CudaSession::Launch(std::deque<Layer>& layers) {
  for (Layer& layer : layers) TRIBUTARY_RETURN_IF_ERROR(LaunchLayer(layer));
  const auto count = static_cast<int32_t>(layers.size());
  const bool has_results = layers.front().step.plan.query_rows > 0;
  return LaunchGate(GateOf(count, count, has_results), early_launch_, memory_->stream());
}

absl::Status CudaSession::LaunchGraph(std::deque<Layer>& layers) {
  std::vector<uint64_t> signature;
  const DevicePlan* last = nullptr;
  for (const Layer& layer : layers) {
    signature.push_back(static_cast<uint64_t>(layer.step.layer_index) | uint64_t{layer.own_gate}
                                                                            << 32);
    layer.operations->AppendSignature(&signature);
    if (&layer.plan == last) continue;
    last = &layer.plan;
    const std::vector<uint64_t> of_plan = layer.plan.Signature();
    signature.insert(signature.end(), of_plan.begin(), of_plan.end());
  }
  cudaGraphExec_t* graph = memory_->graphs().Seen(std::move(signature));
  if (graph == nullptr) return Launch(layers);
  if (*graph == nullptr) {
    const absl::StatusOr<cudaGraphExec_t> captured = [&] {
      const MutexLock lock(capture_);
      return CaptureGraph(memory_->stream(), [&] { return Launch(layers); });
    }();
    if (absl::IsDataLoss(captured.status())) return captured.status();
    if (!captured.ok()) {
      // Nothing ran. The same launches do without a graph, only more slowly.
      graphs_work_ = false;
      return Launch(layers);
    }
    *graph = *captured;
  }
  const NvtxRange range("launch session graph", 0);
  TRIBUTARY_CUDA_OK(cudaGraphLaunch(*graph, memory_->stream()));
  return absl::OkStatus();
}

// ------------------------------------------------------------------------------------- conflicts

absl::Status CudaSession::ExpectDifferences(uint32_t first_count, std::deque<Layer>* layers) {
  const int32_t entries = layers->front().plan.entries();
  if (entries == 0) return absl::OkStatus();
  Repeat repeat{.first_count = first_count,
                .layers = static_cast<int32_t>(layers->size()),
                .entries = entries,
                .differs = TakeSpare()};
  const size_t words = layers->size() * static_cast<size_t>(entries);
  TRIBUTARY_RETURN_IF_ERROR(repeat.differs->Reserve(words * sizeof(uint32_t)));
  auto* differs = repeat.differs->as<uint32_t>();
  std::fill_n(differs, words, 0);
  for (Layer& layer : *layers) {
    layer.differs = differs;
    differs += entries;
  }
  const MutexLock lock(mutex_);
  repeats_.push_back(std::move(repeat));
  return absl::OkStatus();
}

void CudaSession::AddConflicts(SessionNews* news) {
  const MutexLock lock(mutex_);
  while (!repeats_.empty() && mailbox::Reached(news->ended, repeats_.front().end())) {
    const Repeat& repeat = repeats_.front();
    for (int32_t entry = 0; entry < repeat.entries; ++entry) {
      const auto* differs = repeat.differs->as<uint32_t>() + entry;
      bool any = false;
      for (int32_t layer = 0; layer < repeat.layers; ++layer) {
        any |= differs[static_cast<ptrdiff_t>(layer) * repeat.entries] != 0;
      }
      if (any) news->conflicts.emplace_back(repeat.first_count, entry);
    }
    spare_.push_back(repeat.differs);
    repeats_.pop_front();
  }
}

std::shared_ptr<PinnedMemory> CudaSession::TakeSpare() {
  const MutexLock lock(mutex_);
  if (spare_.empty()) return std::make_shared<PinnedMemory>();
  std::shared_ptr<PinnedMemory> spare = std::move(spare_.back());
  spare_.pop_back();
  return spare;
}

}  // namespace tributary::worker
