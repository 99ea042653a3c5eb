// What the coordinator tells every worker, in one order, the same for all ranks.
//
// Commands carry everything a worker needs to stay in step: page tables are not planned by workers,
// they are told. A worker that executed the same commands in the same order holds the same tables.
// Applying a command that was the last to be applied changes nothing, so a step may be repeated
// after a failure.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "base/mailbox/layout.h"
#include "base/telemetry/trace.h"
#include "kernels/dtype.h"
#include "kernels/output_format.h"
#include "worker/cache_spec.h"
#include "worker/redeal.h"

namespace tributary::worker {

using CacheId = uint32_t;
using SequenceId = uint64_t;
using RegionId = uint64_t;   // names memory of a GPU that a host shares; never used again
using SessionId = uint64_t;  // never used again

// Bytes [offset, offset + bytes) of an open region.
struct RegionPart {
  RegionId region = 0;  // 0: none
  uint64_t offset = 0;
  uint64_t bytes = 0;
  friend bool operator==(const RegionPart&, const RegionPart&) = default;
};

// Borrowed bytes, of host memory (Command::owner keeps them alive) or of regions.
struct TensorView {
  const std::byte* data = nullptr;
  DType dtype = DType::kBf16;
  size_t bytes = 0;
  // Where this is not empty, the bytes are those of the parts in turn, and `data` is null.
  std::vector<RegionPart> parts;
  // Whether the memory at `data` is pinned: GPUs of this process then copy from it themselves.
  bool pinned = false;

  bool in_regions() const { return !parts.empty(); }
};

// table[first_index + i] = pages[i]; the table grows as needed and is made if it does not exist.
struct PageUpdate {
  SequenceId sequence = 0;
  int32_t first_index = 0;
  std::vector<int32_t> pages;
};

// Copies a whole page, all layers (copy on write after a fork). It comes with the step that first
// writes to the destination. It is the one thing in a command that may not be repeated at will:
// once another step wrote to the destination, copying again would undo that.
struct PageCopy {
  int32_t source = 0;
  int32_t destination = 0;
};

// What has become of a sequence by other means than steps: it was truncated, forked, put back, or
// gave up old tokens. Workers keep it for a coordinator that restarts (worker/holdings.h).
struct Standing {
  SequenceId sequence = 0;
  int32_t given_up = 0;  // leading entries of its table that are not its own any more
  // Tokens held: [layers of the cache], or one for all layers, or none where nothing changed.
  std::vector<int64_t> lengths;
};

// It is repeated until no rank has more memory to take (Reply::more_memory). Until then no other
// command than DropCacheCommand may name the cache.
struct CreateCacheCommand {
  CacheSpec spec;
  // Whether the cache has sequences already. Then a rank that does not have the cache yet lacks
  // pages until it is told otherwise (TransferPagesCommand::complete).
  bool existing = false;
  // Over how many ranks its tokens are dealt; 0: over all of the group. The ranks from this one on
  // hold nothing of it, and other commands about it do nothing there.
  int32_t ranks = 0;
};

struct DropCacheCommand {};

// Memory of a GPU of this machine that another process shares by CUDA IPC.
struct SharedDeviceMemory {
  std::string handle;   // the bytes of a cudaIpcMemHandle_t, of a whole allocation
  uint64_t offset = 0;  // of the region in the allocation
  uint64_t bytes = 0;
  std::string gpu;  // its UUID, "GPU-" and 8-4-4-4-12 hexadecimal digits
  friend bool operator==(const SharedDeviceMemory&, const SharedDeviceMemory&) = default;
};

// Makes a region usable in steps. This command and the next concern no cache.
struct OpenRegionCommand {
  RegionId region = 0;
  SharedDeviceMemory memory;
};

// Closes a region. It changes nothing where the region is not open.
struct CloseRegionCommand {
  RegionId region = 0;
};

// Opens a session whose mailbox lies in the memory of rank 0's GPU
// (proto/tributary/v1/session.proto says what that is). The reply of rank 0 has the mailbox. The
// command concerns no cache: a session's steps name the caches of their layers.
struct OpenSessionCommand {
  SessionId session = 0;
  int32_t max_rows = 0;        // query rows of a step
  int32_t max_new_tokens = 0;  // new tokens of a step
  int32_t max_steps = 2;       // step commands in flight at once
  DType q_dtype = DType::kBf16;
  DType kv_dtype = DType::kBf16;
  DType output_dtype = DType::kF32;
  bool return_lse = false;
  mailbox::Layout layout;
  std::chrono::nanoseconds wait_timeout{0};  // how long a wait for a doorbell may take
  std::string host_gpu;                      // UUID of the GPU from which the host rings
  // Whether the host times round trips of both ways of waiting ahead of its steps (SessionProbe).
  bool measures = false;
  // How many endpoints share the mailbox and hand each layer over together (session.proto,
  // JoinSession). `layout` has the control words of endpoint 0.
  int32_t endpoints = 1;
};

// How the two sides of a session wait for each other's doorbells.
enum class Waiting : uint8_t {
  kSpinningWarp,     // one warp polls the doorbell
  kStreamMemoryOps,  // the front end of the GPU polls a word of the mailbox
};

// How many round trips a host times of each way of waiting.
inline constexpr int32_t kProbeRounds = 8;

// Ends a session: its waits end, the rest of its steps computes nothing that anybody reads, and the
// mailbox is given back. It changes nothing where the session is not open.
struct CloseSessionCommand {
  SessionId session = 0;
  int32_t status = 0;  // google.rpc.Code for the host to find
};

// Sets tables outright (after a fork, and for all sequences when a group re-forms).
struct SetTablesCommand {
  std::vector<PageUpdate> tables;
  std::vector<Standing> standings = {};
};

// Forgets tables. Their pages are the coordinator's business.
struct DropTablesCommand {
  std::vector<SequenceId> sequences;
};

// Brings pages of one rank's share from where they are to where they are missing: from the replica
// (worker/replica.h) to the rank, or from the rank to its replica. Other ranks have nothing to do.
//
// In a cache without replicas, rank + 1 keeps the pages of a rank that is about to leave. It takes
// the memory for them at such a command without pages, which is repeated while a rank has more to
// take (Reply::more_memory), and keeps them until they have been restored and are complete.
struct TransferPagesCommand {
  int32_t rank = 0;      // whose share it is
  bool restore = false;  // true: from the replica to the rank
  std::vector<int32_t> pages;
  // Whether nothing is missing at the destination any more.
  bool complete = false;
};

// Brings tokens from a cache to another one, Command::cache, whose tokens are dealt over another
// number of ranks. Both have the same layers and page size. The bytes stay as they are.
struct MoveTokensCommand {
  CacheId from_cache = 0;
  RankChange ranks;
  // Where this is more than 0, the tokens of each rank are not brought to it, but to the rank that
  // keeps them for it (KeeperOf, worker/replica.h).
  int32_t keeper_stride = 0;
  std::vector<MovedPage> pages;
};

enum class StepKind : uint8_t {
  kAppend,   // K/V only
  kDecode,   // few rows: K/V are written first, rows see [.., position] of the cache
  kPrefill,  // entries with many rows see new tokens in full precision; others as in kDecode
  kDflash,   // a draft's block: as a prefill, but under the layer's DFlash mask; K/V are not kept
};
inline constexpr int kStepKinds = 4;

struct StepEntry {
  SequenceId sequence = 0;
  // Global position of the first row and of the first new token. New tokens and query rows of an
  // entry start at the same position; their counts differ only when one of them is 0 or the entry's
  // rows are carried out in several steps (first_row), and never in a kDflash step, where both are
  // the block.
  int64_t first_position = 0;
  int32_t query_rows = 0;
  int32_t new_tokens = 0;
  // Whether the K/V were accepted before. Ranks then compare them with the cache instead of writing
  // them, and report a difference as a conflict.
  bool replay = false;
  // Whether the entry goes on in a later step of its call. Its tokens count when the last of these
  // steps has been carried out (worker/holdings.h).
  bool more_follows = false;
  // The tokens lie before the layer's end, where they were lost with a worker: they are written,
  // and the layer's length stays as it is.
  bool brings_back = false;
  // Rows of the entry that earlier steps of its call carry out: its rows here begin so many
  // positions later. Every one of these steps has all new tokens of the entry, for its rows to see
  // as they came, and writes those at its rows' positions. Of entries of a kPrefill step whose rows
  // see tokens as they came (SeesTokensAsTheyCame), on CPU workers of the coordinator's own
  // process.
  int32_t first_row = 0;

  // The position of its first row.
  int64_t first_row_position() const { return first_position + first_row; }
  // How many of the new tokens the step writes, or compares: those from number first_row on.
  int32_t kept_tokens() const {
    return query_rows == 0 ? new_tokens : std::min(query_rows, new_tokens);
  }
};

// Where one tensor of a result goes: nowhere, or to one of three places.
struct OutputPlace {
  RegionPart part;  // bytes of a region, or none
  // Host memory of rank 0's own process, as large as the tensor, or null. Command::owner keeps it.
  std::byte* data = nullptr;
  bool pinned = false;  // whether `data` is pinned, so that GPUs of this process copy to it
  bool in_reply = false;

  bool in_region() const { return part.region != 0; }
  // Whether the tensor goes to host memory: to `data`, or into the reply.
  bool on_host() const { return data != nullptr || in_reply; }
};

// Rows of a step's result, as their caller wants them.
struct StepOutput {
  int32_t rows = 0;
  OutputFormat format;  // of o
  OutputPlace o;        // [rows, q_heads, value_dim]
  OutputPlace lse;      // [rows, q_heads] of f32
};

struct StepCommand {
  int32_t layer = 0;
  StepKind kind = StepKind::kDecode;
  std::vector<PageCopy> page_copies;     // applied first
  std::vector<PageUpdate> page_updates;  // applied second
  std::vector<StepEntry> entries;        // a sequence appears once
  // Rows of all entries one after the other.
  TensorView q;  // [query rows, q_heads, key_dim] of f32, bf16 or f16
  TensorView k;  // [new tokens, kv_heads, key_dim]
  TensorView v;  // [new tokens, kv_heads, value_dim]
  // Where rank 0 puts the result: for all query rows, in their order. What lies there when the step
  // fails is undefined. Where this is empty, the reply carries the whole result as numbers
  // (Reply::o), for those who drive an executor themselves.
  std::vector<StepOutput> outputs;
  // Whether o is rounded to bf16 wherever it goes, so that its partials may travel as bf16.
  bool bf16_partials = false;
  std::vector<Standing> standings = {};  // as they are before the step, for any sequences
};

// A layer of a session's step: a cache, and the layer's number there.
struct SessionLayer {
  CacheId cache = 0;
  int32_t layer = 0;
};

// What a session's step changes in the pages of one cache, before its first layer.
struct PageChanges {
  CacheId cache = 0;
  std::vector<PageCopy> page_copies;     // applied first
  std::vector<PageUpdate> page_updates;  // applied second
};

// One submission of a session: entries for a range of layers. The ranks put all layers into the
// session's stream and reply; each layer begins when its doorbell has been rung. What became of
// them is told by the session's progress (Backend::OpenSession), not by the reply.
struct SessionStepCommand {
  SessionId session = 0;
  StepKind kind = StepKind::kDecode;
  uint32_t first_count = 0;  // the session's number of the first layer
  std::vector<SessionLayer> layers;
  std::vector<PageChanges> changes;
  std::vector<StepEntry> entries;            // a sequence appears once
  Waiting waiting = Waiting::kSpinningWarp;  // the same in all steps of a session
};

struct Command {
  uint64_t epoch = 0;   // a worker of another epoch refuses
  uint64_t number = 0;  // rises by one; for logs and matching replies
  // All ranks have carried out the commands of this epoch up to this number. 0 where nobody keeps
  // count, as in a group of embedded workers.
  uint64_t settled = 0;
  CacheId cache = 0;
  telemetry::TraceContext trace;  // what to trace it as; span_id is the coordinator's for the step
  // When the step must be over, by the worker's steady clock. Collectives end at it, too.
  std::chrono::steady_clock::time_point deadline;
  // The thread that waits for the outcome and lends itself to workers of its process meanwhile, if
  // one does (WorkerGroup::Lend). Of no meaning in other processes.
  std::thread::id waiter;
  std::variant<CreateCacheCommand, DropCacheCommand, SetTablesCommand, DropTablesCommand,
               TransferPagesCommand, StepCommand, OpenRegionCommand, CloseRegionCommand,
               OpenSessionCommand, CloseSessionCommand, SessionStepCommand, MoveTokensCommand>
      body;
  // Keeps what the tensor views of the body point to.
  std::shared_ptr<const void> owner;
};

// Where the time of a step went, seconds.
struct StepTimes {
  double plan = 0;
  double append = 0;
  double attend = 0;
  double exchange = 0;
  // Whether partials met in device memory: then attend includes the exchange and waiting for peers.
  bool exchange_in_attend = false;
};

// The mailbox of a session in the memory of a GPU, as another process finds it.
struct DeviceMailbox {
  std::string handle;         // the bytes of a cudaIpcMemHandle_t
  std::string gpu;            // UUID
  uint64_t address = 0;       // in the process that owns it
  std::string process_nonce;  // of that process: random bytes
  std::string machine;        // that process's BootId
  bool several_gpus = false;  // whether GPUs of other ranks read it
};

// Bytes that a reply carries. They are not set to zero before the result is written. Copies of the
// object share them.
class ResultBytes {
 public:
  ResultBytes() = default;
  // Bytes whose values are not set yet.
  explicit ResultBytes(size_t size) : size_(size) {
    std::shared_ptr<std::byte[]> bytes(new std::byte[size]);
    data_ = bytes.get();
    owner_ = std::move(bytes);
  }
  // The bytes of a message.
  explicit ResultBytes(std::string message) : size_(message.size()) {
    auto bytes = std::make_shared<std::string>(std::move(message));
    data_ = reinterpret_cast<std::byte*>(bytes->data());
    owner_ = std::move(bytes);
  }

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }

 private:
  std::shared_ptr<void> owner_;
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

struct Reply {
  uint64_t epoch = 0;
  uint64_t number = 0;
  int32_t rank = 0;
  absl::Status status;
  // Entries (by index) whose replayed K/V differ from what this rank holds.
  std::vector<int32_t> conflicts;
  // From rank 0, of a step that states outputs: those that go into the reply, one after the other,
  // each with its o in its format and then its LSEs, as far as they are wanted there.
  ResultBytes result;
  // From rank 0, of a step with queries that states no outputs: merged output and LSE.
  std::vector<float> o;    // [query rows, q_heads, value_dim]
  std::vector<float> lse;  // [query rows, q_heads]
  // Whether the command (CreateCacheCommand) is to be repeated: the rank has yet to take memory.
  bool more_memory = false;
  StepTimes times;
  DeviceMailbox mailbox;  // from rank 0, of an OpenSessionCommand
  // When a rank of the coordinator's own process began to execute the command, and when the
  // coordinator got the reply; not told over the network.
  std::chrono::steady_clock::time_point begun;
  std::chrono::steady_clock::time_point arrived;
};

}  // namespace tributary::worker
