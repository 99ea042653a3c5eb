#include "collective/nccl/nccl.h"

#include <dlfcn.h>
#include <nccl.h>

#include <thread>
#include <utility>

#include "base/sync/mutex.h"
#include "collective/device/cuda_resources.h"
#include "collective/rendezvous/hex.h"

namespace tributary::collective {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// ---------------------------------------------------------------------------------------------
// The library

// The first version whose communicators are created without blocking and abort reliably.
constexpr int kOldestVersion = NCCL_VERSION(2, 18, 1);

struct Library {
  std::string why_not;
  decltype(&ncclGetVersion) get_version = nullptr;
  decltype(&ncclGetUniqueId) get_unique_id = nullptr;
  decltype(&ncclCommInitRankConfig) init = nullptr;
  decltype(&ncclCommGetAsyncError) async_error = nullptr;
  decltype(&ncclCommAbort) abort = nullptr;
  decltype(&ncclGetErrorString) error_string = nullptr;
  decltype(&ncclGetLastError) last_error = nullptr;
  decltype(&ncclAllGather) all_gather = nullptr;
  decltype(&ncclReduceScatter) reduce_scatter = nullptr;
  decltype(&ncclBroadcast) broadcast = nullptr;
  decltype(&ncclSend) send = nullptr;
  decltype(&ncclRecv) recv = nullptr;
  decltype(&ncclGroupStart) group_start = nullptr;
  decltype(&ncclGroupEnd) group_end = nullptr;
};

Library Load() {
  Library n;
  void* handle = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    n.why_not = std::string("NCCL is not installed here: ") + dlerror();
    return n;
  }
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
    if (function == nullptr && n.why_not.empty()) {
      n.why_not = std::string("libnccl.so.2 has no ") + name;
    }
  };
  find(n.get_version, "ncclGetVersion");
  find(n.get_unique_id, "ncclGetUniqueId");
  find(n.init, "ncclCommInitRankConfig");
  find(n.async_error, "ncclCommGetAsyncError");
  find(n.abort, "ncclCommAbort");
  find(n.error_string, "ncclGetErrorString");
  find(n.last_error, "ncclGetLastError");
  find(n.all_gather, "ncclAllGather");
  find(n.reduce_scatter, "ncclReduceScatter");
  find(n.broadcast, "ncclBroadcast");
  find(n.send, "ncclSend");
  find(n.recv, "ncclRecv");
  find(n.group_start, "ncclGroupStart");
  find(n.group_end, "ncclGroupEnd");
  int version = 0;
  if (n.why_not.empty() && (n.get_version(&version) != ncclSuccess || version < kOldestVersion)) {
    n.why_not = "NCCL " + std::to_string(version) + " is older than 2.18.1";
  }
  return n;
}

const Library& Nccl() {
  static const Library library = Load();
  return library;
}

Status NcclStatus(ncclResult_t result, ncclComm_t comm, const char* what) {
  if (result == ncclSuccess || result == ncclInProgress) return Status::Ok();
  const StatusCode code = result == ncclRemoteError || result == ncclSystemError
                              ? StatusCode::kUnavailable
                              : StatusCode::kInternal;
  return {code,
          std::string(what) + ": " + Nccl().error_string(result) + ": " + Nccl().last_error(comm)};
}

// ---------------------------------------------------------------------------------------------
// A communicator of NCCL's and the thread that watches it

// Connections are set up by the first operation that needs them, which waits for the peers.
constexpr seconds kEnqueueBound(60);
// NCCL's abort waits for its kernels to end, and for graphs that captured its operations to be
// destroyed. Longer than this nobody waits for it.
constexpr seconds kAbortBound(3);
constexpr milliseconds kPoll(1);

// Shared by the communicator and its thread, which may outlive it.
class Connection {
 public:
  Connection(ncclComm_t comm, int device) : comm_(comm), device_(device) {}

  Status Health() const {
    const MutexLock lock(mutex_);
    return status_;
  }

  // The first error stays. Wakes the thread, which aborts.
  Status Break(Status error) {
    const MutexLock lock(mutex_);
    if (status_.ok()) status_ = std::move(error);
    changed_.NotifyAll();
    return status_;
  }

  // Calls call(comm) -> ncclResult_t and waits until NCCL has taken the work.
  template <typename Call>
  Status Enqueue(const char* what, const Call& call) {
    MutexLock lock(mutex_);
    if (!status_.ok()) return status_;
    ncclResult_t result = call(comm_);
    const Deadline deadline = std::chrono::steady_clock::now() + kEnqueueBound;
    while (result == ncclInProgress) {
      if (std::chrono::steady_clock::now() > deadline) {
        status_ = {StatusCode::kDeadlineExceeded, std::string(what) + ": peers did not connect"};
        break;
      }
      const ncclResult_t asked = Nccl().async_error(comm_, &result);
      if (asked != ncclSuccess) result = asked;
      if (result != ncclInProgress) break;
      // Without the lock, so that an abort comes through.
      lock.Unlock();
      std::this_thread::yield();
      lock.Lock();
      if (!status_.ok()) return status_;
    }
    if (Status s = NcclStatus(result, comm_, what); !s.ok() && status_.ok()) status_ = s;
    if (!status_.ok()) changed_.NotifyAll();
    return status_;
  }

  // The thread: until an error, or until the communicator goes.
  void Watch(milliseconds interval) {
    const ScopedDevice device(device_);
    MutexLock lock(mutex_);
    while (status_.ok()) {
      (void)changed_.WaitUntil(mutex_, std::chrono::steady_clock::now() + interval);
      if (!status_.ok()) break;
      ncclResult_t result = ncclSuccess;
      const ncclResult_t asked = Nccl().async_error(comm_, &result);
      status_ = NcclStatus(asked == ncclSuccess ? result : asked, comm_, "NCCL");
    }
    lock.Unlock();
    // Nobody calls NCCL on a broken communicator, so this needs no lock.
    (void)Nccl().abort(comm_);
    lock.Lock();
    aborted_ = true;
    changed_.NotifyAll();
  }

  // False when NCCL takes too long.
  bool AwaitAborted(Deadline deadline) {
    MutexLock lock(mutex_);
    while (!aborted_) {
      if (!changed_.WaitUntil(mutex_, deadline)) break;
    }
    return aborted_;
  }

 private:
  mutable Mutex mutex_;
  CondVar changed_;
  const ncclComm_t comm_;
  const int device_;
  Status status_ TRIBUTARY_GUARDED_BY(mutex_);  // the first error
  bool aborted_ TRIBUTARY_GUARDED_BY(mutex_) = false;
};

ncclDataType_t TypeOf(DType type) {
  return type == DType::kBf16 ? ncclBfloat16 : type == DType::kF16 ? ncclFloat16 : ncclFloat32;
}

std::byte* At(void* base, size_t offset) { return static_cast<std::byte*>(base) + offset; }
const std::byte* At(const void* base, size_t offset) {
  return static_cast<const std::byte*>(base) + offset;
}

class NcclCommunicator final : public DeviceCommunicator {
 public:
  NcclCommunicator(const NcclOptions& options, ncclComm_t comm)
      : options_(options),
        connection_(std::make_shared<Connection>(comm, options.device)),
        watcher_([connection = connection_, interval = options.watch_interval] {
          connection->Watch(interval);
        }) {}

  ~NcclCommunicator() override {
    (void)connection_->Break({StatusCode::kUnavailable, "the communicator was destroyed"});
    if (connection_->AwaitAborted(std::chrono::steady_clock::now() + kAbortBound)) {
      watcher_.join();
    } else {
      watcher_.detach();
    }
  }

  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }
  uint64_t epoch() const override { return options_.epoch; }

  Status AllGather(const void* send, void* recv, size_t bytes, cudaStream_t stream) override {
    return Enqueue("all_gather", [&](ncclComm_t comm) {
      return Nccl().all_gather(send, recv, bytes, ncclInt8, comm, stream);
    });
  }

  Status AllToAll(const void* send, void* recv, size_t bytes, cudaStream_t stream) override {
    return EnqueueGroup("all_to_all", [&](ncclComm_t comm, const auto& add) {
      for (int r = 0; r < options_.size; ++r) {
        add(Nccl().send(At(send, r * bytes), bytes, ncclInt8, r, comm, stream));
        add(Nccl().recv(At(recv, r * bytes), bytes, ncclInt8, r, comm, stream));
      }
    });
  }

  Status ReduceScatter(const void* send, void* recv, size_t count, DType type,
                       cudaStream_t stream) override {
    if (!IsUnscaled(type)) return InvalidArgument("reduce_scatter: type must be f32, bf16 or f16");
    return Enqueue("reduce_scatter", [&](ncclComm_t comm) {
      return Nccl().reduce_scatter(send, recv, count, TypeOf(type), ncclSum, comm, stream);
    });
  }

  Status Gather(const void* send, void* recv, size_t bytes, int root,
                cudaStream_t stream) override {
    if (root < 0 || root >= options_.size) return InvalidArgument("gather: root is not a rank");
    return EnqueueGroup("gather", [&](ncclComm_t comm, const auto& add) {
      add(Nccl().send(send, bytes, ncclInt8, root, comm, stream));
      if (options_.rank != root) return;
      for (int r = 0; r < options_.size; ++r) {
        add(Nccl().recv(At(recv, r * bytes), bytes, ncclInt8, r, comm, stream));
      }
    });
  }

  Status Broadcast(void* buffer, size_t bytes, int root, cudaStream_t stream) override {
    if (root < 0 || root >= options_.size) return InvalidArgument("broadcast: root is not a rank");
    return Enqueue("broadcast", [&](ncclComm_t comm) {
      return Nccl().broadcast(buffer, buffer, bytes, ncclInt8, root, comm, stream);
    });
  }

  Status Await(cudaStream_t stream, Deadline deadline) override {
    const ScopedDevice device(options_.device);
    Status s = AwaitStream(stream, deadline, [&] { return connection_->Health(); });
    if (s.ok()) return connection_->Health();
    s = connection_->Break(std::move(s));
    (void)AwaitStream(stream, std::chrono::steady_clock::now() + kAbortBound);
    return s;
  }

  Status Health() override { return connection_->Health(); }

  void Abort(const std::string& reason) override {
    (void)connection_->Break(
        {StatusCode::kAborted, "aborted by rank " + std::to_string(options_.rank) + ": " + reason});
  }

 private:
  template <typename Call>
  Status Enqueue(const char* what, const Call& call) {
    const ScopedDevice device(options_.device);
    return connection_->Enqueue(what, call);
  }

  // calls(comm, add) makes the calls of one group and adds up their results.
  template <typename Calls>
  Status EnqueueGroup(const char* what, const Calls& calls) {
    return Enqueue(what, [&](ncclComm_t comm) {
      ncclResult_t first = Nccl().group_start();
      calls(comm, [&](ncclResult_t r) {
        if (first == ncclSuccess || first == ncclInProgress) first = r;
      });
      const ncclResult_t end = Nccl().group_end();
      return first == ncclSuccess || first == ncclInProgress ? end : first;
    });
  }

  const NcclOptions options_;
  const std::shared_ptr<Connection> connection_;
  std::thread watcher_;
};

// Rank 0 draws the id that the others join by.
Status AgreeOnId(const NcclOptions& options, Rendezvous& rendezvous, Deadline deadline,
                 ncclUniqueId* id) {
  const std::string key = "nccl/" + std::to_string(options.epoch) + "/id";
  if (options.rank == 0) {
    if (Status s = NcclStatus(Nccl().get_unique_id(id), nullptr, "ncclGetUniqueId"); !s.ok()) {
      return s;
    }
    return rendezvous.Set(key, ToHex(id->internal, sizeof(id->internal)));
  }
  std::string text;
  if (Status s = rendezvous.Get(key, &text, deadline); !s.ok()) return s;
  if (!FromHex(text, id->internal, sizeof(id->internal))) {
    return {StatusCode::kInternal, "rank 0 announced a NCCL id of another form"};
  }
  return Status::Ok();
}

}  // namespace

std::string WhyNoNccl() { return Nccl().why_not; }

Status CreateNcclCommunicator(const NcclOptions& options, Rendezvous& rendezvous, Deadline deadline,
                              std::unique_ptr<DeviceCommunicator>* out) {
  if (options.size < 1) return InvalidArgument("size is below 1");
  if (options.rank < 0 || options.rank >= options.size)
    return InvalidArgument("rank is not 0..size");
  if (const std::string why = WhyNoNccl(); !why.empty()) {
    return {StatusCode::kFailedPrecondition, why};
  }
  const ScopedDevice device(options.device);
  ncclUniqueId id;
  if (Status s = AgreeOnId(options, rendezvous, deadline, &id); !s.ok()) return s;

  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  ncclComm_t comm = nullptr;
  ncclResult_t result = Nccl().init(&comm, options.size, id, options.rank, &config);
  while (result == ncclInProgress) {
    std::this_thread::sleep_for(kPoll);
    const ncclResult_t asked = Nccl().async_error(comm, &result);
    if (asked != ncclSuccess) result = asked;
    if (result == ncclInProgress && std::chrono::steady_clock::now() >= deadline) {
      (void)Nccl().abort(comm);
      return {StatusCode::kDeadlineExceeded, "NCCL: not all ranks came before the deadline"};
    }
  }
  if (Status s = NcclStatus(result, comm, "ncclCommInitRank"); !s.ok()) {
    if (comm != nullptr) (void)Nccl().abort(comm);
    return s;
  }
  *out = std::make_unique<NcclCommunicator>(options, comm);
  return Status::Ok();
}

}  // namespace tributary::collective
