// A rank whose steps go through a session: what the coordinator and a host's GPU do, in one
// process.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/sync/mutex.h"
#include "kernels/cuda/buffer.h"
#include "service/client/cuda/session_kernels.h"
#include "tests/worker/cuda/gpu_ranks.h"
#include "worker/cuda/memory.h"

namespace tributary::worker::testing {

// What the backends told of sessions.
class SessionLog {
 public:
  explicit SessionLog(int ranks) : ranks_(ranks) {}

  void Add(const SessionNews& news);
  // Waits until the first `count` layers of the session are over on all ranks, or it has failed on
  // one.
  SessionNews AwaitEnd(SessionId session, uint32_t count);
  // What a rank has told so far of the step whose first layer has this number.
  std::vector<int32_t> ConflictsOf(SessionId session, int32_t rank, uint32_t first_count);

 private:
  Mutex mutex_;
  CondVar changed_;
  const int ranks_;
  std::map<std::pair<SessionId, int32_t>, SessionNews> newest_ TRIBUTARY_GUARDED_BY(mutex_);
};

// One layer of a step, with the tensors of all heads.
struct HostLayer {
  const LayerGeometry& geometry;
  TensorView q;
  TensorView k;
  TensorView v;
  int32_t rows = 0;
  int32_t tokens = 0;
};

// The host's end of a session, or an endpoint of it, with launches on a stream of its own. Of
// several endpoints each has its part of the query heads; KV heads are split alike where that goes
// evenly, and endpoint 0's where it does not.
class HostSession {
 public:
  HostSession(const OpenSessionCommand& command, const DeviceMailbox& mailbox,
              Waiting waiting = Waiting::kSpinningWarp, int32_t endpoint = 0);
  ~HostSession();

  struct Results {
    std::vector<float> o;  // of the endpoint's heads
    std::vector<float> lse;
    uint32_t failure = 0;  // google.rpc.Code
  };
  // Puts the launches of a layer into the stream: it is handed over, and its results are taken back
  // unless there are no rows.
  void Launch(const HostLayer& layer);
  // Waits for them.
  Results Finish();
  Results Layer(const HostLayer& layer) {
    Launch(layer);
    return Finish();
  }

  const client::MailboxView& view() const { return view_; }
  cudaStream_t stream() const { return stream_; }

 private:
  const int32_t endpoint_;
  const int32_t endpoints_;
  client::MailboxView view_;
  cudaStream_t stream_ = nullptr;
  // Of the layer under way; made and given back in the order of the stream.
  std::vector<std::unique_ptr<DeviceMemory>> memory_;
  size_t elements_ = 0;  // of its results
  size_t heads_ = 0;
  cuda::DeviceBuffer counter_;
  cuda::PinnedBuffer failure_;
};

class SessionRanks final : public Ranks {
 public:
  explicit SessionRanks(const CudaBackendOptions& options = {}, DType output = DType::kF32,
                        Waiting waiting = Waiting::kSpinningWarp, int size = 1,
                        int32_t endpoints = 1);

  int size() const override { return ranks_.size(); }
  uint64_t epoch() const override { return ranks_.epoch(); }
  // A step goes through the session of its types: layer 0 submits all layers at once, unless tokens
  // are repeated; then every layer is a step. All else goes as it is.
  std::map<int, Reply> Execute(const Command& command) override;

  // Opens a session; steps are then submitted by hand.
  OpenSessionCommand Open(const CacheSpec& spec, int32_t max_rows, DType q, DType kv,
                          std::chrono::nanoseconds wait_timeout, DeviceMailbox* mailbox,
                          bool measures = false);
  // To all ranks; rank 0's reply, or an error of another.
  Reply Send(decltype(Command::body) body, CacheId cache = 1);
  Waiting waiting() const { return waiting_; }
  SessionLog& log() { return *log_; }
  GpuRanks& ranks() { return ranks_; }

 private:
  struct Session {
    OpenSessionCommand command;
    std::vector<std::unique_ptr<HostSession>> hosts;  // by endpoint
    uint32_t count = 0;                               // layers submitted
    int32_t layers_left = 0;                          // of the step, to be handed over
  };
  std::map<int, Reply> Step(const Command& command, const StepCommand& step);
  // Hands a layer over by all endpoints; the results of all heads.
  static HostSession::Results RunLayer(Session& session, const HostLayer& layer);
  Session& SessionFor(const StepCommand& step);

  const std::shared_ptr<SessionLog> log_;
  GpuRanks ranks_;
  const DType output_;
  const Waiting waiting_;
  const int32_t endpoints_;
  uint64_t number_ = 0;
  SessionId last_session_ = 0;
  CacheSpec spec_;
  std::map<std::pair<DType, DType>, Session> sessions_;
};

}  // namespace tributary::worker::testing
