// One rank as a process with a GPU: exchanges until it has done what was asked. When an exchange
// fails it leaves the group and joins the next epoch, up to the last one. Says on stdout what
// happens: "ready EPOCH", "failed EPOCH CODE MILLISECONDS", "done EPOCH".
#include <cuda_runtime.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "collective/direct/retired_memory.h"
#include "collective/group/device_group.h"
#include "collective/rendezvous/file_rendezvous.h"
#include "tests/collective/peer_exit.h"

namespace tributary::collective {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr int32_t kHeads = 32;
constexpr int32_t kDim = 128;
// Leaving memory behind, or not being able to say.
constexpr int kExitLeak = 3;

struct Job {
  std::string directory;
  int rank = 0;
  int size = 1;
  int device = 0;
  Strategy strategy = Strategy::kDirect;
  Placement placement = Placement::kGathered;
  int32_t rows = 4;
  milliseconds deadline{2000};
  uint64_t first_epoch = 1;
  uint64_t last_epoch = 1;
  uint32_t operations = 0;  // of the last epoch; of those before, no end
};

void Say(const std::string& text) {
  const std::string line = text + "\n";
  if (write(STDOUT_FILENO, line.data(), line.size()) < 0) std::abort();
}

// What rank r brings to an operation, small whole numbers: with equal LSEs the merge is their mean,
// which f32 holds exactly for 2, 4 and 8 ranks.
float ValueOf(uint32_t operation, int rank, int32_t pair) {
  return static_cast<float>((operation * 7 + rank * 3 + pair) % 64);
}

class Peer {
 public:
  explicit Peer(const Job& job)
      : job_(job),
        o_(static_cast<size_t>(job.rows) * kHeads * kDim),
        lse_(static_cast<size_t>(job.rows) * kHeads, 0.0f),
        out_(o_.size()) {}

  int Run() {
    if (cudaSetDevice(job_.device) != cudaSuccess ||
        cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking) != cudaSuccess ||
        cudaMalloc(&device_o_, Bytes()) != cudaSuccess ||
        cudaMalloc(&device_out_, Bytes()) != cudaSuccess ||
        cudaMalloc(&device_lse_, lse_.size() * sizeof(float)) != cudaSuccess ||
        cudaMemset(device_lse_, 0, lse_.size() * sizeof(float)) != cudaSuccess) {
      std::fprintf(stderr, "rank %d: no GPU %d\n", job_.rank, job_.device);
      return kExitUsage;
    }
    FileRendezvous rendezvous(job_.directory);
    for (uint64_t epoch = job_.first_epoch;; ++epoch) {
      DeviceGroupOptions options{.rank = job_.rank,
                                 .size = job_.size,
                                 .epoch = epoch,
                                 .device = job_.device,
                                 .limits = {.rows = job_.rows, .heads = kHeads, .value_dim = kDim}};
      const bool direct = job_.strategy == Strategy::kDirect;
      options.direct = direct ? Wanted::kYes : Wanted::kNo;
      options.nccl = direct ? Wanted::kNo : Wanted::kYes;
      options.direct_bound = job_.deadline / 2;
      options.retired = retired_;
      std::unique_ptr<DeviceGroup> group;
      const Status formed =
          CreateDeviceGroup(options, rendezvous, Clock::now() + std::chrono::minutes(1), &group);
      if (!formed.ok()) return Fail(formed);
      const bool last = epoch == job_.last_epoch;
      Clock::time_point began;
      const Status s = Exchange(*group, epoch, last ? job_.operations : 0, &began);
      if (s.ok()) {
        group.reset();
        Say("done " + std::to_string(epoch));
        return job_.first_epoch == job_.last_epoch ? CheckMemory() : kExitDone;
      }
      if (wrong_) return kExitWrongData;
      const auto took = std::chrono::duration_cast<milliseconds>(Clock::now() - began);
      std::fprintf(stderr, "rank %d, epoch %d: %s\n", job_.rank, static_cast<int>(epoch),
                   s.message().c_str());
      if (cudaStreamSynchronize(stream_) != cudaSuccess) {
        std::fprintf(stderr, "rank %d: the GPU is not usable any more\n", job_.rank);
        return kExitUsage;
      }
      Say("failed " + std::to_string(epoch) + " " + std::to_string(ExitCodeOf(s.code())) + " " +
          std::to_string(took.count()));
      if (last) return ExitCodeOf(s.code());
    }
  }

 private:
  size_t Bytes() const { return o_.size() * sizeof(float); }

  int Fail(const Status& s) const {
    std::fprintf(stderr, "rank %d: %s\n", job_.rank, s.message().c_str());
    return ExitCodeOf(s.code());
  }

  // No peer may still hold a buffer of this rank's once all have left; they leave one after
  // another.
  int CheckMemory() const {
    const auto patience = Clock::now() + std::chrono::seconds(20);
    while (retired_->Sweep() != 0) {
      if (Clock::now() > patience) return kExitLeak;
    }
    return kExitDone;
  }

  DeviceExchangeParams Params() const {
    return {.o = device_o_,
            .o_dtype = DType::kF32,
            .lse = static_cast<const float*>(device_lse_),
            .rows = job_.rows,
            .heads = kHeads,
            .value_dim = kDim,
            .placement = job_.placement,
            .strategy = job_.strategy,
            .wire = DType::kBf16,
            .out = device_out_,
            .out_dtype = DType::kF32};
  }

  // Every other operation replays a graph, until one fails or `operations` are done (0: no end).
  Status Exchange(DeviceGroup& group, uint64_t epoch, uint32_t operations,
                  Clock::time_point* began) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    *began = Clock::now();
    if (cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal) != cudaSuccess) {
      return {StatusCode::kInternal, "capture"};
    }
    Status s = group.Exchange(Params(), stream_);
    const bool captured = cudaStreamEndCapture(stream_, &graph) == cudaSuccess &&
                          cudaGraphInstantiate(&executable, graph, 0) == cudaSuccess;
    if (s.ok() && !captured) s = {StatusCode::kInternal, "capture"};
    for (uint32_t op = 0; s.ok() && (operations == 0 || op < operations); ++op) {
      *began = Clock::now();
      s = Operate(group, op, op % 2 == 0 ? executable : nullptr);
      if (op == 2) Say("ready " + std::to_string(epoch));
    }
    if (executable != nullptr) (void)cudaGraphExecDestroy(executable);
    if (graph != nullptr) (void)cudaGraphDestroy(graph);
    return s;
  }

  Status Operate(DeviceGroup& group, uint32_t op, cudaGraphExec_t graph) {
    for (size_t i = 0; i < o_.size(); ++i)
      o_[i] = ValueOf(op, job_.rank, static_cast<int32_t>(i / kDim));
    (void)cudaMemcpyAsync(device_o_, o_.data(), Bytes(), cudaMemcpyHostToDevice, stream_);
    if (graph != nullptr) {
      if (cudaGraphLaunch(graph, stream_) != cudaSuccess) {
        return {StatusCode::kInternal, "graph launch"};
      }
    } else if (Status s = group.Exchange(Params(), stream_); !s.ok()) {
      return s;
    }
    if (Status s = group.Await(stream_, Clock::now() + job_.deadline); !s.ok()) return s;
    const bool gathered = job_.placement == Placement::kGathered;
    const HeadSlice slice = gathered ? HeadSlice{0, job_.rank == 0 ? kHeads : 0}
                                     : SliceOfRank(kHeads, job_.size, job_.rank);
    const size_t floats = static_cast<size_t>(job_.rows) * slice.count * kDim;
    if (cudaMemcpy(out_.data(), device_out_, floats * sizeof(float), cudaMemcpyDeviceToHost) !=
        cudaSuccess) {
      return {StatusCode::kInternal, "reading the result"};
    }
    for (size_t i = 0; i < floats; ++i) {
      const size_t unit = i / kDim;
      const int32_t pair =
          static_cast<int32_t>(unit / slice.count * kHeads + slice.begin + unit % slice.count);
      float sum = 0;
      for (int r = 0; r < job_.size; ++r) sum += ValueOf(op, r, pair);
      if (out_[i] != sum / static_cast<float>(job_.size)) {
        std::fprintf(stderr, "rank %d, operation %u: %f at %zu instead of %f\n", job_.rank, op,
                     out_[i], i, sum / static_cast<float>(job_.size));
        wrong_ = true;
        return {StatusCode::kInternal, "wrong data"};
      }
    }
    return Status::Ok();
  }

  const Job job_;
  std::shared_ptr<RetiredMemory> retired_ = std::make_shared<RetiredMemory>();
  std::vector<float> o_, lse_, out_;
  cudaStream_t stream_ = nullptr;
  void* device_o_ = nullptr;
  void* device_lse_ = nullptr;
  void* device_out_ = nullptr;
  bool wrong_ = false;
};

int Main(int argc, char** argv) {
  if (argc != 12) {
    std::fprintf(stderr,
                 "usage: %s <directory> <rank> <size> <device> <strategy> <placement> <rows> "
                 "<deadline ms> <first epoch> <last epoch> <operations, 0: no end>\n",
                 argv[0]);
    return kExitUsage;
  }
  Job job;
  job.directory = argv[1];
  job.rank = std::atoi(argv[2]);
  job.size = std::atoi(argv[3]);
  job.device = std::atoi(argv[4]);
  if (!Parse(argv[5], &job.strategy)) return kExitUsage;
  job.placement = argv[6] == std::string(Name(Placement::kGathered)) ? Placement::kGathered
                                                                     : Placement::kScattered;
  job.rows = std::atoi(argv[7]);
  job.deadline = milliseconds(std::atoll(argv[8]));
  job.first_epoch = std::strtoull(argv[9], nullptr, 10);
  job.last_epoch = std::strtoull(argv[10], nullptr, 10);
  job.operations = static_cast<uint32_t>(std::strtoul(argv[11], nullptr, 10));
  return Peer(job).Run();
}

}  // namespace
}  // namespace tributary::collective

int main(int argc, char** argv) { return tributary::collective::Main(argc, argv); }
