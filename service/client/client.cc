#include "service/client/client.h"

#include <algorithm>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "base/rpc/unix_address.h"
#include "base/status/errors.h"
#include "base/status/grpc_status.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "service/client/attend_message.h"
#include "service/client/attend_pipe.h"
#include "service/client/connect.h"
#include "service/client/device_regions.h"
#include "service/client/groups/groups_client.h"
#include "service/client/groups/one_group.h"
#include "service/client/groups/targets.h"
#include "service/client/host_buffers.h"
#include "service/client/lease.h"
#include "service/client/region_pool.h"
#include "service/client/retry.h"
#include "tributary/v1/attention.grpc.pb.h"

namespace tributary::client {
namespace {

using Stub = v1::AttentionService::Stub;
using Deadline = std::chrono::system_clock::time_point;

uint64_t AnyId() {
  absl::BitGen dice;
  // 0 would ask the service to choose.
  return absl::Uniform<uint64_t>(absl::IntervalClosed, dice, 1, UINT64_MAX);
}

// What a client and those made by its WithTimeout share.
struct Connection {
  Connection(const ConnectOptions& options, std::shared_ptr<grpc::Channel> to,
             std::function<uint64_t()> id_source)
      : new_id(std::move(id_source)),
        channel(std::move(to)),
        stub(v1::AttentionService::NewStub(channel)),
        regions(stub.get(), options.shared_memory_bytes, std::string(UnixPath(options.target))),
        devices(stub.get()),
        buffers(stub.get(), std::string(UnixPath(options.target))),
        pipe(stub.get(), &regions, &devices, &buffers,
             {.max_attempts = options.max_attempts,
              .max_message_bytes = options.max_message_bytes,
              .lease = options.lease}) {
    if (!options.lease.empty()) renewal.emplace(stub.get(), options.lease);
  }

  const std::function<uint64_t()> new_id;  // of sequences
  const std::shared_ptr<grpc::Channel> channel;
  const std::unique_ptr<Stub> stub;
  RegionPool regions;
  DeviceRegions devices;
  HostBuffers buffers;
  AttendPipe pipe;  // its calls end before what they use
  std::optional<LeaseRenewal> renewal;
};

class GrpcClient final : public Client {
 public:
  GrpcClient(const ConnectOptions& options, std::shared_ptr<Connection> connection)
      : options_(options), connection_(std::move(connection)) {}

  absl::Status Start() {
    const Deadline deadline = std::chrono::system_clock::now() + options_.timeout;
    if (absl::Status s = AwaitConnection(*connection_->channel, options_, deadline); !s.ok()) {
      return s;
    }
    return Repeating([&](Deadline until) { return connection_->regions.Start(until); });
  }

  std::unique_ptr<Client> WithTimeout(std::chrono::milliseconds timeout) override {
    ConnectOptions options = options_;
    options.timeout = timeout;
    return std::make_unique<GrpcClient>(options, connection_);
  }

  absl::StatusOr<v1::CreateCacheReply> CreateCache(const std::string& cache_id,
                                                   const v1::CacheSpec& spec) override {
    v1::CreateCacheRequest request;
    request.set_cache_id(cache_id);
    *request.mutable_spec() = spec;
    return Call<v1::CreateCacheReply>(&Stub::CreateCache, request);
  }

  absl::Status DeleteCache(const std::string& cache_id) override {
    v1::DeleteCacheRequest request;
    request.set_cache_id(cache_id);
    int failures = 0;
    absl::Status status =
        Call<v1::DeleteCacheReply>(&Stub::DeleteCache, request, &failures).status();
    return GoneByNow(std::move(status), failures);
  }

  absl::StatusOr<uint64_t> OpenSequence(const std::string& cache_id) override {
    v1::OpenSequenceRequest request;
    request.set_cache_id(cache_id);
    request.set_sequence_id(connection_->new_id());
    const auto reply = Call<v1::OpenSequenceReply>(&Stub::OpenSequence, request);
    if (!reply.ok()) return reply.status();
    return reply->sequence_id();
  }

  absl::Status ReopenSequence(const std::string& cache_id, uint64_t sequence_id) override {
    v1::OpenSequenceRequest request;
    request.set_cache_id(cache_id);
    request.set_sequence_id(sequence_id);
    return Call<v1::OpenSequenceReply>(&Stub::OpenSequence, request).status();
  }

  absl::StatusOr<uint64_t> ForkSequence(const std::string& cache_id, uint64_t parent_id,
                                        std::optional<int64_t> length) override {
    v1::ForkSequenceRequest request;
    request.set_cache_id(cache_id);
    request.set_parent_id(parent_id);
    request.set_sequence_id(connection_->new_id());
    if (length.has_value()) request.set_length(*length);
    int failures = 0;
    const auto reply = Call<v1::ForkSequenceReply>(&Stub::ForkSequence, request, &failures);
    // The child's id is ours alone: if it exists, an attempt whose answer was lost has made it.
    if (failures > 0 && absl::IsAlreadyExists(reply.status())) return request.sequence_id();
    if (!reply.ok()) return reply.status();
    return reply->sequence_id();
  }

  absl::StatusOr<int64_t> TruncateSequence(const std::string& cache_id, uint64_t sequence_id,
                                           int64_t length) override {
    v1::TruncateSequenceRequest request;
    request.set_cache_id(cache_id);
    request.set_sequence_id(sequence_id);
    request.set_length(length);
    const auto reply = Call<v1::TruncateSequenceReply>(&Stub::TruncateSequence, request);
    if (!reply.ok()) return reply.status();
    return reply->length();
  }

  absl::Status CloseSequence(const std::string& cache_id, uint64_t sequence_id) override {
    v1::CloseSequenceRequest request;
    request.set_cache_id(cache_id);
    request.set_sequence_id(sequence_id);
    int failures = 0;
    absl::Status status =
        Call<v1::CloseSequenceReply>(&Stub::CloseSequence, request, &failures).status();
    return GoneByNow(std::move(status), failures);
  }

  absl::StatusOr<std::vector<uint64_t>> UpdateSequences(
      const std::string& cache_id, const std::vector<SequenceUpdate>& updates) override {
    v1::UpdateSequencesRequest request;
    request.set_cache_id(cache_id);
    std::vector<uint64_t> ids;
    for (const SequenceUpdate& update : updates) {
      const bool makes =
          update.kind == SequenceUpdate::Kind::kOpen || update.kind == SequenceUpdate::Kind::kFork;
      ids.push_back(makes && update.sequence_id == 0 ? connection_->new_id() : update.sequence_id);
      *request.add_updates() = MessageOf(update, ids.back());
    }
    int failures = 0;
    const auto reply = Call<v1::UpdateSequencesReply>(&Stub::UpdateSequences, request, &failures);
    if (reply.ok() || (failures > 0 && WasMadeBefore(reply.status(), updates))) return ids;
    return reply.status();
  }

  absl::StatusOr<std::shared_ptr<SharedBuffer>> AllocateShared(uint64_t bytes) override {
    return connection_->buffers.Allocate(bytes,
                                         std::chrono::system_clock::now() + options_.timeout);
  }

  absl::Status Append(const AppendCall& call) override {
    if (absl::Status status = CheckCall(call); !status.ok()) return status;
    v1::AppendRequest request = DescribeCall(call);
    return Repeating([&](Deadline until) { return AppendOnce(call, request, until); });
  }

  absl::Status Attend(const AttendCall& call) override {
    // Shared, so that the pipe's thread may still be leaving set_value when we return.
    const auto done = std::make_shared<std::promise<absl::Status>>();
    std::future<absl::Status> result = done->get_future();
    connection_->pipe.Submit(call, options_.timeout,
                             [done](absl::Status status) { done->set_value(std::move(status)); });
    return result.get();  // the pipe ends every call by its deadline
  }

  uint64_t AttendAsync(const AttendCall& call, std::function<void(absl::Status)> done) override {
    return connection_->pipe.Submit(call, options_.timeout, std::move(done));
  }

  void Cancel(uint64_t call) override { connection_->pipe.Cancel(call); }

  absl::StatusOr<std::shared_ptr<const DeviceRegion>> ShareDeviceMemory(
      const DeviceMemory& memory) override {
    absl::StatusOr<std::shared_ptr<const DeviceRegion>> region =
        connection_->devices.Describe(memory);
    if (!region.ok()) return region;
    const absl::Status shared =
        Repeating([&](Deadline until) { return connection_->devices.Register(**region, until); });
    if (!shared.ok()) return shared;
    return region;
  }

  absl::Status UnshareDeviceMemory(const DeviceRegion& region) override {
    connection_->devices.Close(region);
    v1::UnregisterSharedMemoryRequest request;
    request.set_name(region.name());
    int failures = 0;
    absl::Status status =
        Call<v1::UnregisterSharedMemoryReply>(&Stub::UnregisterSharedMemory, request, &failures)
            .status();
    return GoneByNow(std::move(status), failures);
  }

  absl::StatusOr<std::vector<v1::LeasedSequence>> LeasedSequences() override {
    if (options_.lease.empty()) {
      return FieldError(absl::StatusCode::kFailedPrecondition, "lease", "the client has none");
    }
    v1::RenewLeaseRequest request;
    request.set_lease(options_.lease);
    request.set_with_sequences(true);
    const auto reply = Call<v1::RenewLeaseReply>(&Stub::RenewLease, request);
    if (!reply.ok()) return reply.status();
    return std::vector<v1::LeasedSequence>(reply->sequences().begin(), reply->sequences().end());
  }

  absl::StatusOr<v1::GetTopologyReply> GetTopology(const v1::GetTopologyRequest& request) override {
    return Call<v1::GetTopologyReply>(&Stub::GetTopology, request);
  }

  absl::StatusOr<v1::GetLimitsReply> GetLimits() override {
    return Call<v1::GetLimitsReply>(&Stub::GetLimits, v1::GetLimitsRequest());
  }

  absl::StatusOr<std::string> TargetOf(uint64_t) const override { return options_.target; }

 private:
  // Calls `attempt` until it succeeds, fails for good, or has no time or attempts left. `failures`,
  // if wanted, is how many attempts failed before the one whose outcome is returned.
  template <typename Attempt>
  absl::Status Repeating(const Attempt& attempt, int* failures = nullptr) {
    const Deadline deadline = std::chrono::system_clock::now() + options_.timeout;
    int forgotten = 0;  // regions
    for (int failed = 0;;) {
      absl::Status status = attempt(deadline);
      if (failures != nullptr) *failures = failed;
      const bool region = IsForgottenRegion(status);
      if (region && ++forgotten >= kRegionAttempts) return status;
      const bool again = IsTransient(status) || region;
      if (!again || !MayAttempt(++failed, options_.max_attempts)) return status;
      absl::BitGen dice;
      const auto delay = RetryDelay(failed, RetryDelayOf(status), absl::Uniform(dice, 0.0, 1.0));
      // An answer now is worth more than a deadline later.
      if (std::chrono::system_clock::now() + delay >= deadline) return status;
      std::this_thread::sleep_for(delay);
    }
  }

  template <typename Reply, typename Request>
  absl::StatusOr<Reply> Call(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&,
                                                          Reply*),
                             const Request& request, int* failures = nullptr) {
    Reply reply;
    absl::Status status = Repeating(
        [&](Deadline deadline) {
          grpc::ClientContext context;
          context.set_deadline(deadline);
          PresentLease(options_.lease, &context);
          return FromGrpcStatus(((*connection_->stub).*method)(&context, request, &reply));
        },
        failures);
    if (!status.ok()) return status;
    return reply;
  }

  absl::Status AppendOnce(const AppendCall& call, v1::AppendRequest& request, Deadline deadline) {
    const bool on_device = call.device != nullptr;
    const auto until =
        std::chrono::steady_clock::now() + (deadline - std::chrono::system_clock::now());
    const int registration =
        on_device ? connection_->devices.AwaitRegistration(*call.device, until) : 0;
    bool coming = false;
    const InPlace in_place = on_device ? InPlace() : FindInPlace(call, connection_->buffers);
    const uint64_t bytes = SharedBytes(call, in_place);
    const auto slot =
        on_device || bytes == 0 ? std::nullopt : connection_->regions.Acquire(bytes, &coming);
    PlaceTensors(call, in_place, slot.has_value() ? &*slot : nullptr, request);
    if (absl::Status s = CheckSize(request, options_.max_message_bytes); !s.ok()) {
      if (!coming || bytes > connection_->regions.region_bytes()) return s;
      return absl::UnavailableError("the shared memory that the call needs is not registered yet");
    }
    grpc::ClientContext context;
    context.set_deadline(deadline);
    PresentLease(options_.lease, &context);
    v1::AppendReply reply;
    absl::Status status = FromGrpcStatus(connection_->stub->Append(&context, request, &reply));
    const bool region_unusable = IsOutcomeUnknown(status) || IsForgottenRegion(status);
    if (slot.has_value() && region_unusable) connection_->regions.Retire(*slot);
    if (IsForgottenRegion(status)) in_place.Forget();
    if (on_device && IsForgottenRegion(status)) {
      connection_->devices.Renew(*call.device, registration);
    }
    return status;
  }

  static v1::SequenceUpdate MessageOf(const SequenceUpdate& update, uint64_t id) {
    v1::SequenceUpdate message;
    switch (update.kind) {
      case SequenceUpdate::Kind::kOpen:
        message.set_open(id);
        break;
      case SequenceUpdate::Kind::kFork:
        message.mutable_fork()->set_parent_id(update.parent_id);
        message.mutable_fork()->set_sequence_id(id);
        if (update.length.has_value()) message.mutable_fork()->set_length(*update.length);
        break;
      case SequenceUpdate::Kind::kTruncate:
        message.mutable_truncate()->set_sequence_id(id);
        message.mutable_truncate()->set_length(update.length.value_or(0));
        break;
      case SequenceUpdate::Kind::kClose:
        message.set_close(id);
        break;
    }
    return message;
  }

  // Whether an attempt whose answer was lost has made the updates, all of which are made or none: a
  // fork exists whose id is ours alone.
  static bool WasMadeBefore(const absl::Status& status,
                            const std::vector<SequenceUpdate>& updates) {
    return absl::IsAlreadyExists(status) &&
           std::any_of(updates.begin(), updates.end(), [](const SequenceUpdate& update) {
             return update.kind == SequenceUpdate::Kind::kFork && update.sequence_id == 0;
           });
  }

  // What was to be removed is gone, maybe by an attempt whose answer was lost.
  static absl::Status GoneByNow(absl::Status status, int failures) {
    if (failures > 0 && absl::IsNotFound(status)) return absl::OkStatus();
    return status;
  }

  const ConnectOptions options_;
  const std::shared_ptr<Connection> connection_;
};

}  // namespace

std::unique_ptr<Client> MakeClient(const ConnectOptions& options,
                                   std::shared_ptr<grpc::Channel> channel,
                                   std::function<uint64_t()> new_id) {
  return std::make_unique<GrpcClient>(
      options, std::make_shared<Connection>(options, std::move(channel), std::move(new_id)));
}

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(const ConnectOptions& options) {
  if (NamesGroups(options.target)) return ConnectToGroups({.connect = options});
  if (absl::Status status = CheckConnectOptions(options); !status.ok()) return status;
  absl::StatusOr<std::shared_ptr<grpc::Channel>> channel = MakeChannel(options);
  if (!channel.ok()) return channel.status();
  auto client = std::make_unique<GrpcClient>(
      options, std::make_shared<Connection>(options, *std::move(channel), AnyId));
  if (absl::Status status = client->Start(); !status.ok()) return status;
  return client;
}

}  // namespace tributary::client
