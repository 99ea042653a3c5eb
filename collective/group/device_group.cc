#include "collective/group/device_group.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/sync/mutex.h"
#include "collective/device/cuda_resources.h"
#include "collective/device/device_communicator.h"
#include "collective/device/device_strategies.h"
#include "collective/device/pack.h"
#include "collective/direct/direct.h"
#include "collective/direct/peer_access.h"
#include "collective/direct/retired_memory.h"
#include "collective/nccl/nccl.h"
#include "kernels/cuda/buffer.h"
#include "kernels/cuda/merge/merge.h"

namespace tributary::collective {
namespace {

using std::chrono::seconds;

// For work that has been told to stop.
constexpr seconds kGrace(3);

class Group final : public DeviceGroup {
 public:
  Group(const DeviceGroupOptions& options, DeviceExchangeCapability capability,
        std::unique_ptr<DeviceCommunicator> comm, std::unique_ptr<DirectExchange> direct,
        cuda::DeviceBuffer workspace, size_t workspace_bytes)
      : options_(options),
        capability_(std::move(capability)),
        comm_(std::move(comm)),
        direct_(std::move(direct)),
        workspace_(std::move(workspace)),
        workspace_bytes_(workspace_bytes) {}

  ~Group() override {
    const ScopedDevice device(options_.device);
    direct_.reset();
    comm_.reset();
    workspace_ = cuda::DeviceBuffer();
  }

  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }
  uint64_t epoch() const override { return options_.epoch; }
  const DeviceExchangeCapability& capability() const override { return capability_; }
  DeviceCommunicator* communicator() override { return comm_.get(); }

  Status Exchange(const DeviceExchangeParams& p, cudaStream_t stream) override {
    if (Status s = CheckDeviceExchange(p, rank(), size()); !s.ok()) return s;
    if (p.rows == 0 || p.heads == 0) return Status::Ok();
    Strategy strategy = Strategy::kAuto;
    if (Status s = ChooseDeviceStrategy(p, capability_, &strategy); !s.ok()) return s;
    if (Status s = Health(); !s.ok()) return s;
    if (p.partial_arrives && (size() == 1 || strategy != Strategy::kDirect)) {
      return {StatusCode::kFailedPrecondition,
              "partial_arrives: only direct exchanges rows as they come"};
    }
    const ScopedDevice device(options_.device);
    if (size() == 1) return EnqueueAlone(p, stream);
    if (strategy == Strategy::kDirect) {
      DirectPlan plan;
      if (!PlanDirect(DirectShapeOf(p), Layout(), options_.direct_tuning, &plan)) {
        return {StatusCode::kFailedPrecondition, "direct: the call does not fit"};
      }
      return Broken(direct_->Exchange(p, plan, options_.direct_tuning.overlap_launch, stream));
    }
    if (Status s = CheckWorkspace(DeviceWorkspaceBytes(p, size(), strategy)); !s.ok()) return s;
    return Broken(EnqueueExchange(p, strategy, *comm_, workspace_.data(), stream));
  }

  Status GatherSlices(const DeviceGatherParams& p, cudaStream_t stream) override {
    if (Status s = CheckDeviceGather(p, rank(), size()); !s.ok()) return s;
    if (p.rows == 0 || p.heads == 0) return Status::Ok();
    if (Status s = Health(); !s.ok()) return s;
    const ScopedDevice device(options_.device);
    if (size() == 1) return CopyWhole(p, stream);
    DirectPlan plan;
    if (direct_ != nullptr &&
        PlanDirect(DirectShapeOf(p), Layout(), options_.direct_tuning, &plan)) {
      return Broken(direct_->Gather(p, plan, options_.direct_tuning.overlap_launch, stream));
    }
    if (comm_ == nullptr) {
      return {StatusCode::kFailedPrecondition,
              "gather: direct: " + Why(capability_.no_direct) + "; NCCL: " + capability_.no_nccl};
    }
    if (Status s = CheckWorkspace(DeviceWorkspaceBytes(p, size())); !s.ok()) return s;
    return Broken(EnqueueGather(p, *comm_, workspace_.data(), stream));
  }

  Status Await(cudaStream_t stream, Deadline deadline) override {
    const ScopedDevice device(options_.device);
    Status s = AwaitStream(stream, deadline, [this] { return Health(); });
    if (s.ok()) s = Health();
    if (s.ok()) return s;
    if (s.code() == StatusCode::kDeadlineExceeded && Health().ok()) {
      s = {s.code(), "rank " + std::to_string(rank()) + ": the step did not end in time"};
    }
    s = Break(std::move(s));
    if (!AwaitStream(stream, std::chrono::steady_clock::now() + kGrace).ok()) {
      s = {s.code(), s.message() + "; the GPU is still busy"};
    }
    return s;
  }

  const uint32_t* failure_word() const override {
    return direct_ == nullptr ? nullptr : direct_->failure_word();
  }

  Status Health() override {
    {
      const MutexLock lock(mutex_);
      if (!status_.ok()) return status_;
    }
    Status s;
    if (direct_ != nullptr) s = direct_->Health();
    if (s.ok() && comm_ != nullptr) s = comm_->Health();
    return Broken(std::move(s));
  }

  void Abort(const std::string& reason) override {
    (void)Break(
        {StatusCode::kAborted, "aborted by rank " + std::to_string(rank()) + ": " + reason});
  }

 private:
  static std::string Why(const std::string& reason) {
    return reason.empty() ? std::string("the call does not fit") : reason;
  }

  DirectLayout Layout() const { return LayoutOf(options_); }

  // The first error stays, and stops what is enqueued: here, and on peers that can be told.
  Status Break(Status error) {
    {
      const MutexLock lock(mutex_);
      if (!status_.ok()) return status_;
      status_ = error;
    }
    if (direct_ != nullptr) direct_->Abort();
    if (comm_ != nullptr) comm_->Abort(error.message());
    return error;
  }
  Status Broken(Status s) { return s.ok() ? s : Break(std::move(s)); }

  Status CheckWorkspace(size_t needed) const {
    if (needed <= workspace_bytes_) return Status::Ok();
    return {StatusCode::kFailedPrecondition,
            "heads are dealt so unevenly that the call needs " + std::to_string(needed) +
                " bytes of workspace, the group has " + std::to_string(workspace_bytes_)};
  }

  static Status CopyWhole(const DeviceGatherParams& p, cudaStream_t stream) {
    const size_t pairs = static_cast<size_t>(p.rows) * p.heads;
    cudaError_t e = cudaMemcpyAsync(p.out, p.slice, pairs * p.value_dim * SizeOf(p.dtype),
                                    cudaMemcpyDeviceToDevice, stream);
    if (e == cudaSuccess && p.lse_out != nullptr) {
      e = cudaMemcpyAsync(p.lse_out, p.slice_lse, pairs * sizeof(float), cudaMemcpyDeviceToDevice,
                          stream);
    }
    return CudaStatus(e, "copying a slice");
  }

 public:
  static DirectLayout LayoutOf(const DeviceGroupOptions& o) {
    return LayOutDirect(o.size, o.limits.rows, o.limits.heads, o.limits.value_dim, o.limits.widest);
  }

 private:
  const DeviceGroupOptions options_;
  const DeviceExchangeCapability capability_;
  std::unique_ptr<DeviceCommunicator> comm_;
  std::unique_ptr<DirectExchange> direct_;
  cuda::DeviceBuffer workspace_;
  const size_t workspace_bytes_;
  Mutex mutex_;
  Status status_ TRIBUTARY_GUARDED_BY(mutex_);  // the first error
};

// The first call of every kind of operation sets its connections up, which cannot be captured, and
// the kernels around it must be there before one of NCCL's waits for a peer.
Status WarmUp(const DeviceGroupOptions& options, DeviceCommunicator& comm, std::byte* workspace,
              size_t bytes, Deadline deadline) {
  if (Status s = LoadPackKernels(); !s.ok()) return s;
  if (Status s = cuda::LoadMergeKernels(); !s.ok()) return s;
  Stream stream;
  if (Status s = stream.Create(); !s.ok()) return s;
  if (cudaMemsetAsync(workspace, 0, bytes, stream.get()) != cudaSuccess) {
    return CudaStatus(cudaGetLastError(), "clearing the workspace");
  }
  // Small and large messages take different ways through NCCL.
  const size_t ranks = options.size;
  const size_t large = bytes / (ranks + 1) / 16 * 16;
  for (const size_t part : {std::min<size_t>(large / ranks, 1024), large / ranks}) {
    std::byte* recv = workspace + ranks * part;
    const Status s[] = {
        comm.AllGather(workspace, recv, part / ranks / 16 * 16, stream.get()),
        comm.AllToAll(workspace, recv, part / ranks / 16 * 16, stream.get()),
        comm.ReduceScatter(workspace, recv, part / ranks / 16, DType::kF32, stream.get()),
        comm.Gather(workspace, recv, part / ranks / 16 * 16, 0, stream.get()),
        comm.Broadcast(workspace, part / 16 * 16, 0, stream.get())};
    for (const Status& status : s) {
      if (!status.ok()) return status;
    }
  }
  return comm.Await(stream.get(), deadline);
}

// Every rank says what it could use; NCCL is used when all can.
Status AgreeOnNccl(const DeviceGroupOptions& options, Rendezvous& rendezvous, Deadline deadline,
                   std::string* why_not) {
  const std::string prefix = "group/" + std::to_string(options.epoch) + "/nccl/";
  PeerIdentity self;
  if (Status s = DescribeSelf(options.device, &self); !s.ok()) return s;
  const std::string own = options.nccl == Wanted::kNo ? "not wanted" : WhyNoNccl();
  const std::string gpu = self.host + self.gpu;
  if (Status s = rendezvous.Set(prefix + std::to_string(options.rank),
                                gpu + "\n" + (own.empty() ? "-" : own));
      !s.ok()) {
    return s;
  }
  std::vector<std::string> gpus;
  for (int r = 0; r < options.size; ++r) {
    std::string word;
    if (Status s = rendezvous.Get(prefix + std::to_string(r), &word, deadline); !s.ok()) {
      return {s.code(), "waiting for rank " + std::to_string(r) + ": " + s.message()};
    }
    const size_t end = word.find('\n');
    if (end == std::string::npos) {
      return {StatusCode::kInternal, "rank " + std::to_string(r) + " speaks another language"};
    }
    const std::string reason = word.substr(end + 1);
    if (why_not->empty() && reason != "-") *why_not = "rank " + std::to_string(r) + ": " + reason;
    if (why_not->empty() &&
        std::find(gpus.begin(), gpus.end(), word.substr(0, end)) != gpus.end()) {
      *why_not = "two ranks share a GPU";
    }
    gpus.push_back(word.substr(0, end));
  }
  return Status::Ok();
}

Status CheckOptions(const DeviceGroupOptions& o) {
  if (o.size < 1) return InvalidArgument("size is below 1: " + std::to_string(o.size));
  if (o.rank < 0 || o.rank >= o.size) {
    return InvalidArgument("rank " + std::to_string(o.rank) + " is not 0.." +
                           std::to_string(o.size - 1));
  }
  if (o.limits.rows < 1) return InvalidArgument("limits.rows is below 1");
  if (o.limits.heads < 1) return InvalidArgument("limits.heads is below 1");
  if (o.limits.value_dim < 8) return InvalidArgument("limits.value_dim is below 8");
  if (o.direct_bound.count() < 1) return InvalidArgument("direct_bound is below 1 ms");
  int devices = 0;
  if (const cudaError_t e = cudaGetDeviceCount(&devices); e != cudaSuccess) {
    (void)cudaGetLastError();
    return {StatusCode::kFailedPrecondition, std::string("no GPU: ") + cudaGetErrorString(e)};
  }
  if (o.device < 0 || o.device >= devices) {
    return InvalidArgument("device " + std::to_string(o.device) + ": this process sees " +
                           std::to_string(devices));
  }
  return Status::Ok();
}

}  // namespace

Status CreateDeviceGroup(const DeviceGroupOptions& options, Rendezvous& rendezvous,
                         Deadline deadline, std::unique_ptr<DeviceGroup>* out) {
  if (Status s = CheckOptions(options); !s.ok()) return s;
  const ScopedDevice device(options.device);
  if (options.retired != nullptr) (void)options.retired->Sweep();

  DeviceExchangeCapability capability{.ranks = options.size, .limits = options.limits};
  std::unique_ptr<DeviceCommunicator> comm;
  std::unique_ptr<DirectExchange> direct;
  cuda::DeviceBuffer workspace;
  size_t workspace_bytes = 0;
  if (options.size > 1) {
    if (Status s = AgreeOnNccl(options, rendezvous, deadline, &capability.no_nccl); !s.ok()) {
      return s;
    }
    capability.no_direct = "not wanted";
    // `direct` of all ranks is alike, or they would wait for each other here.
    if (options.direct != Wanted::kNo) {
      const DirectOptions direct_options{.rank = options.rank,
                                         .size = options.size,
                                         .epoch = options.epoch,
                                         .device = options.device,
                                         .layout = Group::LayoutOf(options),
                                         .bound = options.direct_bound,
                                         .retired = options.retired};
      if (Status s = CreateDirectExchange(direct_options, rendezvous, deadline, &direct,
                                          &capability.no_direct);
          !s.ok()) {
        return s;
      }
    }
    const bool lacks_direct = direct == nullptr && options.direct == Wanted::kYes;
    const bool lacks_nccl = !capability.no_nccl.empty() && options.nccl == Wanted::kYes;
    const bool lacks_both = direct == nullptr && !capability.no_nccl.empty();
    if (lacks_direct || lacks_nccl || lacks_both) {
      return {StatusCode::kFailedPrecondition,
              "direct: " + (direct == nullptr ? capability.no_direct : "available") +
                  "; NCCL: " + (capability.no_nccl.empty() ? "available" : capability.no_nccl)};
    }
    if (capability.no_nccl.empty()) {
      workspace_bytes = DeviceWorkspaceBytes(options.limits, options.size);
      if (Status s = CudaStatus(workspace.Allocate(workspace_bytes), "cudaMalloc"); !s.ok())
        return s;
      const NcclOptions nccl{.rank = options.rank,
                             .size = options.size,
                             .epoch = options.epoch,
                             .device = options.device};
      if (Status s = CreateNcclCommunicator(nccl, rendezvous, deadline, &comm); !s.ok()) return s;
      if (Status s = WarmUp(options, *comm, workspace.data(), workspace_bytes, deadline); !s.ok()) {
        return s;
      }
    }
  }
  *out = std::make_unique<Group>(options, std::move(capability), std::move(comm), std::move(direct),
                                 std::move(workspace), workspace_bytes);
  return Status::Ok();
}

}  // namespace tributary::collective
