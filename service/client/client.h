// The C++ client: caches, sequences and attention over one channel.
//
// clang-format off
//   auto client = Client::Connect({.target = "unix:/run/tributary.sock",
//                                  .shared_memory_bytes = 64 << 20});
//   auto cache = (*client)->CreateCache("my-model", spec);
//   auto sequence = (*client)->OpenSequence("my-model");
//   AttendCall call{.cache_id = "my-model", .layer = 0,
//                   .entries = {{*sequence, 0, rows, rows}}, ...};
//   absl::Status done = (*client)->Attend(call);
// clang-format on
//
// A Client may be used from many threads at once. It is destroyed from outside its own callbacks,
// when no other thread is in a call; calls of AttendAsync that are still in flight then end with
// CANCELLED. Errors keep the service's code and message; FieldOf() and RetryDelayOf() read their
// details. This header stands alone: it includes Abseil, the generated messages and base/.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/rpc/security_options.h"
#include "base/status/errors.h"
#include "base/status/rpc_errors.h"
#include "tributary/v1/attention.pb.h"

namespace tributary::client {

struct ConnectOptions {
  // "host:port" or "unix:/path". A service with several groups of workers has several addresses,
  // one for each group: "host:port,host:port", or "groups:name:port", where each address of the
  // name (of a headless service, for example) is a group. A sequence then lives in the group that
  // had the most free pages when it was opened, a fork in its parent's, and its id leads every
  // client of the same groups there.
  std::string target;
  // How the service is known and how this client proves itself; plain text by default.
  ChannelSecurity security;
  // Every call's deadline, retries included.
  std::chrono::milliseconds timeout{30'000};
  // > 0: tensors travel through a shared memory region of this size, registered with the service.
  // Only where both run on one machine, as one user. A call that finds no room in the region
  // travels inside its message. 0: all do.
  size_t shared_memory_bytes = 0;
  // How often a call that is safe to repeat (all but those the caller must decide on) is repeated
  // on UNAVAILABLE and ABORTED, after the delay the service asks for. 1: never. 0: as often as the
  // timeout allows, so that calls outlast a group that forms anew and a service that restarts.
  int max_attempts = 0;
  // The service's limit for one message. A larger call is refused before it is sent; tensors in
  // shared memory do not count.
  size_t max_message_bytes = size_t{64} << 20;
  // The lease that sequences belong to which this client opens: 1 to 128 of [A-Za-z0-9._-], drawn
  // at random and kept by the host. The client presents it, and renews it for as long as it lives.
  // When nobody has presented it for as long as the service's --lease_timeout, the service closes
  // the sequences. A client that presents it before that has adopted them (LeasedSequences). Empty:
  // sequences stay until they are closed.
  std::string lease;
  // Whether Connect waits for a service that does not answer yet, up to the timeout. Otherwise the
  // first attempt that fails ends it, with the reason.
  bool wait_for_service = true;
};

// Memory of a GPU, allocated with cudaMalloc. cuda_memory.h fills this in.
struct DeviceMemory {
  const void* data = nullptr;  // a device pointer of this process, aligned to 16 bytes
  uint64_t bytes = 0;
  std::string ipc_handle;  // the bytes of the allocation's cudaIpcMemHandle_t
  uint64_t offset = 0;     // of `data` in the allocation
  std::string gpu;         // its UUID, "GPU-..."
};

// Memory of a GPU that the service reads and writes: Client::ShareDeviceMemory.
class DeviceRegion {
 public:
  virtual ~DeviceRegion() = default;
  virtual const std::string& name() const = 0;  // as registered
  virtual const DeviceMemory& memory() const = 0;
};

// Host memory that the service reads and writes in place (Client::AllocateShared). It is released
// with the last copy of the pointer, which must outlive calls in flight whose tensors lie in it.
class SharedBuffer {
 public:
  virtual ~SharedBuffer() = default;
  virtual std::byte* data() const = 0;
  virtual uint64_t bytes() const = 0;
};

struct AttendEntry {
  uint64_t sequence_id = 0;
  int64_t first_position = 0;
  int32_t query_rows = 0;
  int32_t new_tokens = 0;  // 0 or query_rows
};

// One call of one layer. Inputs are borrowed until the call is done. Tensors that lie in a
// SharedBuffer of the client are read and written there; align each to 64 bytes. They belong to the
// service until the call, or its repetition, has been answered, also after a deadline or a
// cancellation. All other tensors are copied.
struct AttendCall {
  std::string cache_id;
  int32_t layer = 0;
  v1::AttendMode mode = v1::ATTEND_MODE_CAUSAL;
  std::vector<AttendEntry> entries;
  v1::DType dtype = v1::DTYPE_F32;  // of q, k and v: F32, BF16 or F16
  const void* q = nullptr;          // [rows, q_heads, head_dim]
  const void* k = nullptr;          // [new tokens, kv_heads, head_dim], or nullptr
  const void* v = nullptr;          // [new tokens, kv_heads, value_head_dim], or nullptr
  int32_t q_heads = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;        // of queries and keys
  int32_t value_head_dim = 0;  // of values and outputs; 0: head_dim
  void* output = nullptr;      // [rows, q_heads, value_head_dim]; NVFP4: see DTYPE_NVFP4
  // Of the output: `dtype` by default, or one of the other types of numbers, or FP8_E4M3 or NVFP4
  // with one scale for the call (default: the layer's). OutputBytes says how large it is.
  v1::DType output_dtype = v1::DTYPE_UNSPECIFIED;
  std::optional<float> o_scale;
  float* lse = nullptr;  // [rows, q_heads], or nullptr when not wanted
  // How long the call lets later calls go first, for work that nobody waits for. At most 1 s.
  std::chrono::milliseconds yield{0};
  // Not null: all of the above are device pointers into this memory, each aligned to 16 bytes. What
  // they hold must have been written before the call, and they are the service's until a call with
  // these results has been answered: after a deadline or a cancellation too.
  std::shared_ptr<const DeviceRegion> device;
};

// Bytes of a call's output, of so many elements: rows * q_heads * value_head_dim. 0 for a type that
// no output has.
uint64_t OutputBytes(v1::DType dtype, uint64_t elements);

// One of many changes in Client::UpdateSequences. It does what the function of that name does.
struct SequenceUpdate {
  enum class Kind : uint8_t { kOpen, kFork, kTruncate, kClose };
  Kind kind = Kind::kOpen;
  // The sequence that is opened, made by a fork, truncated or closed. With 0 the client chooses the
  // id of one that is opened or forked.
  uint64_t sequence_id = 0;
  uint64_t parent_id = 0;         // for a fork
  std::optional<int64_t> length;  // for a truncation, and a fork shorter than its parent
};

struct AppendCall {
  std::string cache_id;
  int32_t layer = 0;
  struct Entry {
    uint64_t sequence_id = 0;
    int64_t first_position = 0;
    int32_t tokens = 0;
  };
  // A sequence at most once, but for lost tokens that are brought again: one entry for each range,
  // in order.
  std::vector<Entry> entries;
  v1::DType dtype = v1::DTYPE_F32;
  const void* k = nullptr;  // [tokens, kv_heads, head_dim]
  const void* v = nullptr;  // [tokens, kv_heads, value_head_dim]
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  int32_t value_head_dim = 0;                  // 0: head_dim
  std::shared_ptr<const DeviceRegion> device;  // as in AttendCall
};

class Client {
 public:
  // Fails with UNAVAILABLE when nobody answers within the timeout (also when one side does not
  // believe the other's certificate), with INVALID_ARGUMENT naming a field of the options.
  static absl::StatusOr<std::unique_ptr<Client>> Connect(const ConnectOptions& options);
  virtual ~Client() = default;

  // Another client over the same connection, whose calls end by another timeout (> 0): for one call
  // or for many. It costs an allocation. Calls in flight of one are not ended by the end of the
  // other; the connection ends with the last of them.
  virtual std::unique_ptr<Client> WithTimeout(std::chrono::milliseconds timeout) = 0;

  virtual absl::StatusOr<v1::CreateCacheReply> CreateCache(const std::string& cache_id,
                                                           const v1::CacheSpec& spec) = 0;
  virtual absl::Status DeleteCache(const std::string& cache_id) = 0;

  // Ids are chosen by the client (random), so that opening may be repeated.
  virtual absl::StatusOr<uint64_t> OpenSequence(const std::string& cache_id) = 0;
  // Re-opens a sequence that said DATA_LOSS, empty. (If MissingTokensOf says what it has lost, an
  // Append of that makes it whole as well.)
  virtual absl::Status ReopenSequence(const std::string& cache_id, uint64_t sequence_id) = 0;
  virtual absl::StatusOr<uint64_t> ForkSequence(const std::string& cache_id, uint64_t parent_id,
                                                std::optional<int64_t> length) = 0;
  virtual absl::StatusOr<int64_t> TruncateSequence(const std::string& cache_id,
                                                   uint64_t sequence_id, int64_t length) = 0;
  virtual absl::Status CloseSequence(const std::string& cache_id, uint64_t sequence_id) = 0;

  virtual absl::Status Append(const AppendCall& call) = 0;
  virtual absl::Status Attend(const AttendCall& call) = 0;
  // Many in flight over one stream, begun in the order of calls. `done` runs once, on a thread of
  // the client; the buffers of `call` must live until then. Returns a number for Cancel, or 0 when
  // the call is refused, in which case `done` is told why.
  virtual uint64_t AttendAsync(const AttendCall& call, std::function<void(absl::Status)> done) = 0;
  // Ends a call in flight. `done` is told CANCELLED soon, on another thread, unless the answer
  // comes before that. The service drops the call if it has not taken effect. Nothing happens where
  // the call is over.
  virtual void Cancel(uint64_t call) = 0;

  // Allocates memory in which tensors of calls need not be copied. The service maps it. GPU workers
  // that are threads of the service copy from and to it by themselves. Client and service must run
  // on one machine as one user. A service that was started anew does not know the memory; tensors
  // in it are then copied like all others.
  virtual absl::StatusOr<std::shared_ptr<SharedBuffer>> AllocateShared(uint64_t bytes) = 0;

  // Opens, forks, truncates and closes many sequences in one call, in order, all of them or none.
  // Returns the sequence of each update. An error names the update, "updates[i].*".
  virtual absl::StatusOr<std::vector<uint64_t>> UpdateSequences(
      const std::string& cache_id, const std::vector<SequenceUpdate>& updates) = 0;

  // Lets calls name memory of a GPU of this machine instead of carrying tensors.
  // FAILED_PRECONDITION where the service has no GPU workers of its own that reach it. When this
  // process ends the service lets go of it. A service that was started anew knows nothing of it,
  // and is given it again as soon as a call finds out.
  virtual absl::StatusOr<std::shared_ptr<const DeviceRegion>> ShareDeviceMemory(
      const DeviceMemory& memory) = 0;
  // Returns when the service has let go of it: it must not be freed before. Calls in flight that
  // use it finish first. Calls that come later are NOT_FOUND, "q.shared_memory.region".
  virtual absl::Status UnshareDeviceMemory(const DeviceRegion& region) = 0;

  // The sequences that belong to the client's lease, in all caches. FAILED_PRECONDITION without
  // one.
  virtual absl::StatusOr<std::vector<v1::LeasedSequence>> LeasedSequences() = 0;

  // Of several groups: of those that answer, the workers one after the other and the caches with
  // all their pages and sequences; without an epoch.
  virtual absl::StatusOr<v1::GetTopologyReply> GetTopology(
      const v1::GetTopologyRequest& request) = 0;
  // What the service can do, and how much of it this host may ask for. Of several groups, which are
  // taken to be alike: of one of them.
  virtual absl::StatusOr<v1::GetLimitsReply> GetLimits() = 0;
  // The address that leads to the sequence: the target, or one of several groups'. A session is
  // opened there. NOT_FOUND when the id is of no group, UNAVAILABLE when it may be of one that has
  // not answered yet.
  virtual absl::StatusOr<std::string> TargetOf(uint64_t sequence_id) const = 0;
};

// What the details of an error say. FieldOf(status) is the path of the request's field that the
// service or the client refused, "" when the error names none; RetryDelayOf(status) is the delay
// that the service asks for before a retry; LengthOf(status) is how many tokens are held, of a
// position beyond them; MissingTokensOf(status) is what a sequence has lost of a layer, of
// DATA_LOSS, if something of it is left.
using tributary::FieldOf;
using tributary::LengthOf;
using tributary::MissingTokens;
using tributary::MissingTokensOf;
using tributary::PositionRange;
using tributary::RetryDelayOf;

}  // namespace tributary::client
