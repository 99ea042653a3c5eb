// A coordinator and workers as processes, and hosts that load them. Every reply is checked against
// float64 attention by the hosts themselves (load.h).
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/fault/load.h"
#include "tests/fault/programs.h"
#include "tests/support/compare.h"
#include "tests/support/process.h"

namespace tributary::test {

// For anything to come about on a busy machine; nothing waits so long when all is well.
inline constexpr std::chrono::seconds kPatience{45};

struct FleetOptions {
  int workers = 4;
  std::vector<std::string> coordinator_flags;
  std::vector<std::string> worker_flags;
  Tolerance tolerance = kAttentionTolerance;  // of hosts
};

class Load;

// A coordinator and its workers as processes of their own, a cache, and ways to wait for them.
class Fleet : public ::testing::Test {
 protected:
  explicit Fleet(FleetOptions options = {}) : options_(std::move(options)) {}

  void SetUp() override {
    Coordinate();
    for (int rank = 0; rank < options_.workers; ++rank) workers_.push_back(Worker(rank));
    ASSERT_TRUE(WaitReady(1));
    ASSERT_TRUE(CreateCache().ok());
  }

  // Starts a coordinator, and dials it once it listens: a channel that failed once waits for
  // seconds.
  void Coordinate(const std::vector<std::string>& more_flags = {}) {
    std::vector<std::string> flags = options_.coordinator_flags;
    flags.insert(flags.end(), more_flags.begin(), more_flags.end());
    coordinator_ =
        StartCoordinator(directory_, options_.workers, std::move(flags), CoordinatorLauncher());
    stub_ = nullptr;
    ASSERT_TRUE(Eventually(kPatience, [&] {
      stub_ = ConnectTo(PublicAddress(directory_));
      return Topology().state() != v1::GROUP_STATE_UNSPECIFIED;
    }));
  }

  std::unique_ptr<ChildProcess> Worker(int rank, const std::vector<std::string>& more_flags = {},
                                       Build build = Build::kThis) {
    std::vector<std::string> flags = options_.worker_flags;
    const std::string host = WorkerHost(rank);
    if (!host.empty()) flags.push_back("--host=" + host);
    flags.insert(flags.end(), more_flags.begin(), more_flags.end());
    return StartWorker(directory_, CoordinatorAddress(rank), rank, std::move(flags), build,
                       WorkerLauncher(rank));
  }
  // What programs are started by.
  virtual Launcher CoordinatorLauncher() const { return {}; }
  virtual Launcher WorkerLauncher(int /*rank*/) const { return {}; }
  // Where a worker's peers reach it; empty: on this machine.
  virtual std::string WorkerHost(int /*rank*/) const { return ""; }

  // Where a worker finds the coordinator.
  virtual std::string CoordinatorAddress(int /*rank*/) const { return WorkerAddress(directory_); }

  grpc::Status CreateCache() {
    v1::CreateCacheRequest request;
    request.set_cache_id(kCacheId);
    *request.mutable_spec() = PublicSpec();
    v1::CreateCacheReply reply;
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    return stub_->CreateCache(&context, request, &reply);
  }

  // Empty when the coordinator does not answer.
  v1::GetTopologyReply Topology() {
    v1::GetTopologyRequest request;
    request.set_with_sequences(true);
    v1::GetTopologyReply reply;
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(5));
    if (!stub_->GetTopology(&context, request, &reply).ok()) return {};
    return reply;
  }

  // Until the group serves under this very epoch: no attempt to form it may have been wasted.
  bool WaitReady(uint64_t epoch) {
    uint64_t reached = 0;
    const bool ready = Eventually(kPatience, [&] {
      const v1::GetTopologyReply topology = Topology();
      reached = topology.epoch();
      return topology.state() == v1::GROUP_STATE_READY && topology.epoch() >= epoch;
    });
    EXPECT_EQ(reached, epoch);
    return ready && reached == epoch;
  }

  bool WaitForming() {
    return Eventually(kPatience, [&] { return Topology().state() == v1::GROUP_STATE_FORMING; });
  }

  // A rank of a fleet that nothing has happened to is killed, and started anew, while hosts go on.
  void KillUnderLoad(Load& load, int rank);
  // The same, but it is stopped and continued: it holds its shard all along.
  void PauseUnderLoad(Load& load, int rank);

  // Rank 0 is asked to leave while the group forms, at moments `apart`, and comes back. A rank that
  // waits for it meanwhile may do so for the whole --form_timeout.
  void LeaveWhileForming(int times, std::chrono::milliseconds apart) {
    for (int time = 0; time < times; ++time) {
      workers_[1]->Signal(SIGKILL);
      ASSERT_EQ(workers_[1]->Wait(kPatience), -SIGKILL);
      workers_[1] = Worker(1);
      std::this_thread::sleep_for(time * apart);
      workers_[0]->Signal(SIGTERM);
      EXPECT_EQ(workers_[0]->Wait(kPatience), 0) << "after " << time << " times";
      workers_[0] = Worker(0);
      ASSERT_TRUE(
          Eventually(kPatience, [&] { return Topology().state() == v1::GROUP_STATE_READY; }));
    }
  }

  // Every page is held by a sequence that is there, and all are free when none is.
  void ExpectPagesAccountedFor(std::vector<std::unique_ptr<SequenceHost>>& hosts) {
    const v1::GetTopologyReply topology = Topology();
    ASSERT_EQ(topology.caches_size(), 1);
    int64_t pages = 0;
    for (const v1::SequenceInfo& sequence : topology.caches(0).sequence())
      pages += sequence.pages();
    EXPECT_EQ(topology.caches(0).pages_used(), pages);  // nothing is forked here
    EXPECT_EQ(topology.caches(0).sequences(), static_cast<int64_t>(hosts.size()));
    for (const auto& host : hosts) EXPECT_TRUE(host->Close().ok());
    const v1::GetTopologyReply closed = Topology();
    EXPECT_EQ(closed.caches(0).pages_used(), 0);
    EXPECT_EQ(closed.caches(0).sequences_lost(), 0);
  }

  const FleetOptions options_;
  TemporaryDirectory directory_;
  std::unique_ptr<ChildProcess> coordinator_;
  std::vector<std::unique_ptr<ChildProcess>> workers_;  // by rank
  std::shared_ptr<v1::AttentionService::Stub> stub_;
};

// Many hosts at once, a sequence and a thread each. A call ends in OK, ABORTED, UNAVAILABLE or,
// where that may be, DATA_LOSS; anything else fails the test.
class Load {
 public:
  struct Counts {
    std::atomic<int> ok = 0;
    std::atomic<int> interrupted = 0;  // ABORTED and UNAVAILABLE
    std::atomic<int> lost = 0;         // DATA_LOSS; the sequence was opened again
  };

  // Long sequences have tokens on every rank; short ones only on ranks 0 to 2.
  Load(const std::shared_ptr<v1::AttentionService::Stub>& stub, int long_hosts, int short_hosts,
       const Tolerance& tolerance = kAttentionTolerance) {
    for (int i = 0; i < long_hosts + short_hosts; ++i) {
      hosts_.push_back(
          std::make_unique<SequenceHost>(stub, static_cast<uint64_t>(i) + 1, tolerance));
      counts_.push_back(std::make_unique<Counts>());
    }
    for (int i = 0; i < long_hosts + short_hosts; ++i) {
      const bool is_long = i < long_hosts;
      EXPECT_TRUE(hosts_[i]->Open().ok());
      EXPECT_TRUE(hosts_[i]->Step(is_long ? 100 : 10).ok());
      threads_.emplace_back([this, i, is_long] { Run(*hosts_[i], *counts_[i], is_long); });
    }
  }
  ~Load() { Stop(); }

  void Stop() {
    stopping_ = true;
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

  // Until every host counts `more` beyond what it counts now.
  bool WaitOk(int more) { return WaitMore(&Counts::ok, more); }
  bool WaitInterrupted(int more) { return WaitMore(&Counts::interrupted, more); }

  std::vector<std::unique_ptr<SequenceHost>>& hosts() { return hosts_; }
  const Counts& counts(int host) const { return *counts_[host]; }

 private:
  bool WaitMore(std::atomic<int> Counts::*count, int more) {
    std::vector<int> goals;
    for (const auto& counts : counts_) goals.push_back((*counts).*count + more);
    return Eventually(kPatience, [&] {
      for (size_t i = 0; i < goals.size(); ++i) {
        if ((*counts_[i]).*count < goals[i]) return false;
      }
      return true;
    });
  }

  void Run(SequenceHost& host, Counts& counts, bool is_long) {
    const int64_t most = is_long ? 160 : 40;
    const int64_t back_to = is_long ? 100 : 8;
    for (int turn = 0; !stopping_; ++turn) {
      grpc::Status status;
      if (host.length() > most) {
        status = host.Truncate(back_to);
      } else if (turn % 4 == 3 && host.length() > 2) {
        status = host.Look(2);
      } else {
        status = host.Step(1 + turn % 4);
      }
      Count(status, host, counts);
    }
  }

  static void Count(const grpc::Status& status, SequenceHost& host, Counts& counts) {
    switch (status.error_code()) {
      case grpc::StatusCode::OK:
        ++counts.ok;
        return;
      case grpc::StatusCode::ABORTED:
      case grpc::StatusCode::UNAVAILABLE:
        ++counts.interrupted;
        std::this_thread::sleep_for(
            std::chrono::milliseconds(50));  // as a host that respects the retry delay
        return;
      case grpc::StatusCode::DATA_LOSS: {
        const grpc::Status opened = host.Open();
        if (opened.ok()) {
          host.Forget();
          ++counts.lost;
        }
        return;
      }
      default:
        ADD_FAILURE() << "sequence " << host.id() << ": code " << status.error_code() << ": "
                      << status.error_message();
    }
  }

  std::vector<std::unique_ptr<SequenceHost>> hosts_;
  std::vector<std::unique_ptr<Counts>> counts_;
  std::atomic<bool> stopping_ = false;
  std::vector<std::thread> threads_;
};

inline void Fleet::KillUnderLoad(Load& load, int rank) {
  ASSERT_TRUE(load.WaitOk(5));
  workers_[rank]->Signal(SIGKILL);
  ASSERT_TRUE(load.WaitInterrupted(1));
  ASSERT_EQ(workers_[rank]->Wait(std::chrono::seconds(10)), -SIGKILL);
  ASSERT_TRUE(WaitForming());
  EXPECT_FALSE(Topology().workers(rank).connected());

  workers_[rank] = Worker(rank);
  ASSERT_TRUE(WaitReady(2));
  ASSERT_TRUE(load.WaitOk(10));
  load.Stop();
}

inline void Fleet::PauseUnderLoad(Load& load, int rank) {
  ASSERT_TRUE(load.WaitOk(5));
  workers_[rank]->Pause();
  ASSERT_TRUE(load.WaitInterrupted(1));
  ASSERT_TRUE(WaitForming());

  workers_[rank]->Resume();
  ASSERT_TRUE(WaitReady(2));
  ASSERT_TRUE(load.WaitOk(10));
  load.Stop();
}

}  // namespace tributary::test
