#include "worker/cuda/session/session_plans.h"

#include "base/status/status_macros.h"
#include "worker/cuda/shard.h"
#include "worker/cuda/status.h"

namespace tributary::worker {
namespace {

constexpr size_t kUsualBytes = size_t{256} << 10;

}  // namespace

SessionPlans::SessionPlans(cudaStream_t stream, int32_t steps)
    : stream_(stream), staging_(static_cast<size_t>(steps)) {}

absl::Status SessionPlans::Reserve() {
  for (PinnedMemory& memory : staging_) TRIBUTARY_RETURN_IF_ERROR(memory.Reserve(kUsualBytes));
  return absl::OkStatus();
}

void SessionPlans::BeginStep() {
  ++step_;
  made_.clear();
}

absl::StatusOr<const SessionPlans::Slot*> SessionPlans::PlanOf(const PlannedStep& layer,
                                                               const DevicePlanOptions& options) {
  const StepTypes types = StepTypesOf(layer);
  for (size_t i = 0; i < made_.size(); ++i) {
    if (made_[i].plan == &layer.plan && made_[i].types == types) return &slots_[i];
  }
  if (made_.size() == slots_.size()) slots_.emplace_back(stream_);
  Slot& slot = slots_[made_.size()];
  slot.plan.Make(layer.spec, layer.plan, types, options);
  // Twice as much, so that a sequence that grows seldom moves it: graphs go on fitting.
  TRIBUTARY_RETURN_IF_ERROR(
      slot.data.Reserve(slot.plan.bytes() > slot.data.bytes() ? slot.plan.bytes() * 2 : 0));
  made_.push_back({&layer.plan, types});
  return &slot;
}

absl::Status SessionPlans::Enqueue() {
  size_t bytes = 0;
  for (size_t i = 0; i < made_.size(); ++i) bytes += slots_[i].plan.bytes();
  PinnedMemory& staged = staging_[step_ % staging_.size()];
  TRIBUTARY_RETURN_IF_ERROR(staged.Reserve(bytes));
  std::byte* from = staged.data();
  for (size_t i = 0; i < made_.size(); ++i) {
    Slot& slot = slots_[i];
    slot.plan.Write(from);
    TRIBUTARY_CUDA_OK(cudaMemcpyAsync(slot.data.data(), from, slot.plan.bytes(),
                                      cudaMemcpyHostToDevice, stream_));
    from += slot.plan.bytes();
  }
  return absl::OkStatus();
}

}  // namespace tributary::worker
