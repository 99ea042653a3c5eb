// Memory that hosts register: mapped here, or, where it is a GPU's, opened by the workers.
//
// Workers are told by commands, which are carried out one after the other: a region is open before
// the first step that names it, and is closed when the last one is through. Calls that use a region
// are counted under the lock, from their acceptance on.
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status/errors.h"
#include "base/status/rpc_errors.h"
#include "service/coordinator/coordinator.h"
#include "service/coordinator/operation.h"
#include "worker/device_regions.h"

namespace tributary::service {
namespace {

// What a method without results answers.
template <typename Reply, typename Done>
std::function<void(absl::Status)> Answering(Done done) {
  return [done = std::move(done)](absl::Status status) {
    if (!status.ok()) return done(std::move(status));
    done(Reply());
  };
}

worker::SharedDeviceMemory MemoryOf(const v1::RegisterSharedMemoryRequest& request) {
  const v1::CudaIpcMemory& cuda = request.cuda_ipc();
  return {.handle = cuda.raw_handle(),
          .offset = cuda.offset(),
          .bytes = request.byte_size(),
          .gpu = cuda.device_uuid()};
}

}  // namespace

// -------------------------------------------------------------------------------------- the API

void Coordinator::RegisterSharedMemory(const v1::RegisterSharedMemoryRequest& request,
                                       Done<v1::RegisterSharedMemoryReply> done) {
  ForgetOwnerlessRegions();
  switch (request.kind_case()) {
    case v1::RegisterSharedMemoryRequest::kSystem:
      return Answering<v1::RegisterSharedMemoryReply>(std::move(done))(regions_.RegisterSystem(
          request.name(), request.system().key(), request.system().offset(), request.byte_size()));
    case v1::RegisterSharedMemoryRequest::kCudaIpc:
      return RegisterDevice(request, std::move(done));
    case v1::RegisterSharedMemoryRequest::KIND_NOT_SET:
      break;
  }
  done(InvalidField("kind", "must be system or cuda_ipc"));
}

void Coordinator::RegisterDevice(const v1::RegisterSharedMemoryRequest& request,
                                 Done<v1::RegisterSharedMemoryReply> done) {
  if (absl::Status able = group_->CheckRegions(); !able.ok()) return done(std::move(able));
  absl::StatusOr<DeviceRegionPtr> registered =
      regions_.RegisterDevice(request.name(), MemoryOf(request), request.cuda_ipc().owner_key());
  if (!registered.ok()) return done(registered.status());
  const DeviceRegionPtr region = *std::move(registered);
  Turn turn(this);
  ++open_calls_;
  region->waiting.push_back(Answering<v1::RegisterSharedMemoryReply>(std::move(done)));
  switch (region->state) {
    case DeviceRegion::State::kNew:
      return OpenRegion(region, turn);
    case DeviceRegion::State::kOpening:
      return;  // answered with the others
    case DeviceRegion::State::kOpen:
      return AnswerWaiting(region.get(), absl::OkStatus(), turn);
    case DeviceRegion::State::kClosing:
      break;  // unregistered just now
  }
  // Those who wait for its end are not to be told of this.
  auto last = std::move(region->waiting.back());
  region->waiting.pop_back();
  turn.Answer([last = std::move(last), delay = options_.retry_delay] {
    last(Unavailable("REGION_CLOSING", "a region of this name is being unregistered", delay));
  });
}

void Coordinator::UnregisterSharedMemory(const v1::UnregisterSharedMemoryRequest& request,
                                         Done<v1::UnregisterSharedMemoryReply> done) {
  const auto answer = Answering<v1::UnregisterSharedMemoryReply>(std::move(done));
  const DeviceRegionPtr region = regions_.FindDevice(request.name());
  if (region == nullptr) return answer(regions_.Unregister(request.name()).status());
  Turn turn(this);
  ++open_calls_;
  absl::Status refused = CheckServing();
  // While it is being opened nobody knows it yet.
  if (refused.ok() && region->state != DeviceRegion::State::kOpen) {
    refused = NotFound("shared memory region", request.name(), "name");
  }
  if (!refused.ok()) return turn.Answer([answer, refused] { answer(refused); });
  region->waiting.push_back(answer);
  RetireRegion(region, turn);
}

// A client that died unregisters nothing (shared_memory.cc).
void Coordinator::ForgetOwnerlessRegions() {
  const std::vector<DeviceRegionPtr> ownerless = regions_.ForgetOwnerless();
  if (ownerless.empty()) return;
  Turn turn(this);
  for (const DeviceRegionPtr& region : ownerless) {
    log_->Info("region of a dead client closed", {{"region", region->name}});
    RetireRegion(region, turn);
  }
}

// ---------------------------------------------------------------------------------- of its users

absl::Status Coordinator::UseRegions(const StepRequest& request) {
  absl::Status usable;
  request.ForEachDeviceRegion([&](const DeviceRegionPtr& region, const char* field) {
    if (region->state == DeviceRegion::State::kOpen) return;
    usable.Update(NotFound("shared memory region", region->name,
                           absl::StrCat(field, ".shared_memory.region")));
  });
  if (!usable.ok()) return usable;
  request.ForEachDeviceRegion([](const DeviceRegionPtr& region, const char*) { ++region->users; });
  return absl::OkStatus();
}

void Coordinator::ReleaseRegions(const StepRequest& request, Turn& turn) {
  request.ForEachDeviceRegion([&](const DeviceRegionPtr& region, const char*) {
    const bool last = --region->users == 0;
    if (last && region->state == DeviceRegion::State::kClosing) CloseRegion(region, turn);
  });
}

// ------------------------------------------------------------------------------ opened and closed

void Coordinator::OpenRegion(const DeviceRegionPtr& region, Turn& turn) {
  if (absl::Status serving = CheckServing(); !serving.ok()) {
    regions_.Forget(region);
    region->state = DeviceRegion::State::kClosing;
    return AnswerWaiting(region.get(), serving, turn);
  }
  region->state = DeviceRegion::State::kOpening;
  Send(
      0,
      [region](worker::Command* command) {
        command->body = worker::OpenRegionCommand{region->id, region->memory};
      },
      [this, region](const Outcome& outcome) { OnRegionOpened(region, outcome.status); }, turn);
}

void Coordinator::OnRegionOpened(const DeviceRegionPtr& region, const absl::Status& status) {
  Turn turn(this);
  absl::Status opened = FromOutcome(status, options_.retry_delay);
  if (opened.ok() && region->state == DeviceRegion::State::kOpening) {
    region->state = DeviceRegion::State::kOpen;
    return AnswerWaiting(region.get(), opened, turn);
  }
  if (opened.ok()) opened = NotFound("owner of the region", region->name, "cuda_ipc.owner_key");
  regions_.Forget(region);
  region->state = DeviceRegion::State::kClosing;
  AnswerWaiting(region.get(), opened, turn);
  CloseRegion(region, turn);  // some ranks may have opened it
}

void Coordinator::RetireRegion(const DeviceRegionPtr& region, Turn& turn) {
  regions_.Forget(region);
  const bool open = region->state == DeviceRegion::State::kOpen;
  region->state = DeviceRegion::State::kClosing;
  if (open && region->users == 0) CloseRegion(region, turn);
}

void Coordinator::CloseRegion(const DeviceRegionPtr& region, Turn& turn) {
  Send(
      0,
      [region](worker::Command* command) {
        command->body = worker::CloseRegionCommand{region->id};
      },
      [this, region, epoch = epoch_](const Outcome& outcome) {
        OnRegionClosed(region, epoch, outcome.status);
      },
      turn);
}

void Coordinator::OnRegionClosed(const DeviceRegionPtr& region, uint64_t epoch,
                                 const absl::Status& status) {
  Turn turn(this);
  if (status.ok()) return AnswerWaiting(region.get(), absl::OkStatus(), turn);
  if (epoch != epoch_) return CloseRegion(region, turn);  // the group has formed since
  unclosed_regions_.push_back(region);
}

void Coordinator::AnswerWaiting(DeviceRegion* region, const absl::Status& status, Turn& turn) {
  for (auto& waiting : std::exchange(region->waiting, {})) {
    turn.Answer([waiting = std::move(waiting), status] { waiting(status); });
  }
}

}  // namespace tributary::service
