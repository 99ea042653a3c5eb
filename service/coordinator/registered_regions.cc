#include "service/coordinator/registered_regions.h"

#include <algorithm>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/status/errors.h"
#include "base/status/rpc_errors.h"
#include "worker/opened_regions.h"

namespace tributary::service {
namespace {

// How a method without results answers.
template <typename Reply>
std::function<void(absl::Status)> Answering(Done<Reply> done) {
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

// Commands about regions concern no cache.
constexpr worker::CacheId kNoCache = 0;

}  // namespace

RegisteredRegions::RegisteredRegions(const CoordinatorOptions& options,
                                     const telemetry::Logger& log, const WorkerGroup& group,
                                     CoordinatorLock& lock, const ServingState& serving,
                                     GroupCommands& commands)
    : options_(options),
      log_(log),
      group_(group),
      lock_(lock),
      serving_(serving),
      commands_(commands),
      registry_(
          options.shared_memory_prefixes, [] { return worker::AvailableHostMemory(); },
          [&group](std::byte* data, size_t bytes) { return group.PinMemory(data, bytes); }) {}

// -------------------------------------------------------------------------------------- the API

void RegisteredRegions::Register(const v1::RegisterSharedMemoryRequest& request,
                                 Done<v1::RegisterSharedMemoryReply> done) {
  ForgetOwnerless();
  switch (request.kind_case()) {
    case v1::RegisterSharedMemoryRequest::kMemfd: {
      const v1::MemfdSharedMemory& memfd = request.memfd();
      const absl::Status registered = registry_.RegisterMemfd(
          request.name(), deposit_.Take(memfd.secret(), CoordinatorLock::Clock::now()),
          memfd.secret(), memfd.offset(), request.byte_size());
      ExpectSweep();
      return Answering<v1::RegisterSharedMemoryReply>(std::move(done))(registered);
    }
    case v1::RegisterSharedMemoryRequest::kSystem: {
      const absl::Status registered = registry_.RegisterSystem(
          request.name(), request.system().key(), request.system().offset(), request.byte_size());
      ExpectSweep();
      return Answering<v1::RegisterSharedMemoryReply>(std::move(done))(registered);
    }
    case v1::RegisterSharedMemoryRequest::kCudaIpc:
      return RegisterDevice(request, std::move(done));
    case v1::RegisterSharedMemoryRequest::KIND_NOT_SET:
      break;
  }
  done(InvalidField("kind", "must be memfd, system or cuda_ipc"));
}

void RegisteredRegions::RegisterDevice(const v1::RegisterSharedMemoryRequest& request,
                                       Done<v1::RegisterSharedMemoryReply> done) {
  if (absl::Status able = group_.CheckRegions(); !able.ok()) return done(std::move(able));
  absl::StatusOr<RegisteredRegionPtr> registered =
      registry_.RegisterDevice(request.name(), MemoryOf(request), request.cuda_ipc().owner_key());
  if (!registered.ok()) return done(registered.status());
  const RegisteredRegionPtr region = *std::move(registered);
  ExpectSweep();
  const CriticalSection section(lock_);
  lock_.AcceptCall();
  region->waiting.push_back(Answering<v1::RegisterSharedMemoryReply>(std::move(done)));
  switch (region->state) {
    case RegisteredRegion::State::kNew:
      return Open(region);
    case RegisteredRegion::State::kOpening:
      return;  // answered with the others
    case RegisteredRegion::State::kOpen:
      return AnswerWaiting(region.get(), absl::OkStatus());
    case RegisteredRegion::State::kClosing:
      break;  // unregistered just now
  }
  // Those who wait for its end are not to be told of this.
  auto last = std::move(region->waiting.back());
  region->waiting.pop_back();
  lock_.Answer([last = std::move(last), delay = options_.retry_delay] {
    last(Unavailable("REGION_CLOSING", "a region of this name is being unregistered", delay));
  });
}

void RegisteredRegions::Unregister(const v1::UnregisterSharedMemoryRequest& request,
                                   Done<v1::UnregisterSharedMemoryReply> done) {
  const auto answer = Answering<v1::UnregisterSharedMemoryReply>(std::move(done));
  const RegisteredRegionPtr region = registry_.FindDevice(request.name());
  if (region == nullptr) return answer(registry_.Unregister(request.name()).status());
  const CriticalSection section(lock_);
  lock_.AcceptCall();
  absl::Status refused = serving_.Check();
  // While it is being opened nobody knows it yet.
  if (refused.ok() && region->state != RegisteredRegion::State::kOpen) {
    refused = NotFound("shared memory region", request.name(), "name");
  }
  if (!refused.ok()) return lock_.Answer([answer, refused] { answer(refused); });
  region->waiting.push_back(answer);
  Retire(region);
}

void RegisteredRegions::ExpectSweep() {
  if (!registry_.HasOwners()) return;
  const CriticalSection section(lock_);
  next_sweep_ = std::min(next_sweep_, CoordinatorLock::Clock::now() + options_.region_sweep);
}

void RegisteredRegions::SweepIfDue(std::chrono::steady_clock::time_point now) {
  if (now < next_sweep_) return;
  next_sweep_ = std::chrono::steady_clock::time_point::max();
  lock_.Defer([this] {
    ForgetOwnerless();
    ExpectSweep();
  });
}

void RegisteredRegions::ForgetOwnerless() {
  const std::vector<RegisteredRegionPtr> ownerless = registry_.ForgetOwnerless();
  if (ownerless.empty()) return;
  const CriticalSection section(lock_);
  for (const RegisteredRegionPtr& region : ownerless) {
    log_.Info("region of a dead client closed", {{"region", region->name}});
    Retire(region);
  }
}

// ------------------------------------------------------------------------------------------- users

absl::Status RegisteredRegions::Use(const StepRequest& request) {
  const auto tensors = request.RegionTensors();
  absl::Status usable;
  for (const auto& [region, field] : tensors) {
    if (region->state == RegisteredRegion::State::kOpen) continue;
    usable.Update(NotFound("shared memory region", region->name,
                           absl::StrCat(field, ".shared_memory.region")));
  }
  if (!usable.ok()) return usable;
  for (const auto& [region, field] : tensors) ++region->users;
  return absl::OkStatus();
}

void RegisteredRegions::Release(const StepRequest& request) {
  for (const auto& [region, field] : request.RegionTensors()) {
    const bool last = --region->users == 0;
    if (last && region->state == RegisteredRegion::State::kClosing) Close(region);
  }
}

// ------------------------------------------------------------------------------ opened and closed

void RegisteredRegions::Open(const RegisteredRegionPtr& region) {
  if (absl::Status serving = serving_.Check(); !serving.ok()) {
    registry_.Forget(region);
    region->state = RegisteredRegion::State::kClosing;
    return AnswerWaiting(region.get(), serving);
  }
  region->state = RegisteredRegion::State::kOpening;
  commands_.SendBody(kNoCache, worker::OpenRegionCommand{region->id, region->memory},
                     [this, region](const Outcome& outcome) { OnOpened(region, outcome.status); });
}

void RegisteredRegions::OnOpened(const RegisteredRegionPtr& region, const absl::Status& status) {
  const CriticalSection section(lock_);
  absl::Status opened = FromOutcome(status, options_.retry_delay);
  if (opened.ok() && region->state == RegisteredRegion::State::kOpening) {
    region->state = RegisteredRegion::State::kOpen;
    return AnswerWaiting(region.get(), opened);
  }
  if (opened.ok()) opened = NotFound("owner of the region", region->name, "cuda_ipc.owner_key");
  registry_.Forget(region);
  region->state = RegisteredRegion::State::kClosing;
  AnswerWaiting(region.get(), opened);
  Close(region);  // some ranks may have opened it
}

void RegisteredRegions::Retire(const RegisteredRegionPtr& region) {
  registry_.Forget(region);
  const bool open = region->state == RegisteredRegion::State::kOpen;
  region->state = RegisteredRegion::State::kClosing;
  if (open && region->users == 0) Close(region);
}

void RegisteredRegions::Close(const RegisteredRegionPtr& region) {
  commands_.SendBody(kNoCache, worker::CloseRegionCommand{region->id},
                     [this, region, epoch = serving_.epoch()](const Outcome& outcome) {
                       OnClosed(region, epoch, outcome.status);
                     });
}

void RegisteredRegions::OnClosed(const RegisteredRegionPtr& region, uint64_t epoch,
                                 const absl::Status& status) {
  const CriticalSection section(lock_);
  if (status.ok()) return AnswerWaiting(region.get(), absl::OkStatus());
  if (epoch != serving_.epoch()) return Close(region);  // the group has formed since
  unclosed_.push_back(region);
}

void RegisteredRegions::CloseAgain() {
  for (const RegisteredRegionPtr& region : std::exchange(unclosed_, {})) Close(region);
}

void RegisteredRegions::OnWorkersGone() {
  for (const RegisteredRegionPtr& region : std::exchange(unclosed_, {})) {
    AnswerWaiting(region.get(), absl::OkStatus());
  }
}

void RegisteredRegions::AnswerWaiting(RegisteredRegion* region, const absl::Status& status) {
  for (auto& waiting : std::exchange(region->waiting, {})) {
    lock_.Answer([waiting = std::move(waiting), status] { waiting(status); });
  }
}

}  // namespace tributary::service
