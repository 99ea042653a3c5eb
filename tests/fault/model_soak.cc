#include "tests/fault/model_soak.h"

#include <grpcpp/create_channel.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <utility>

#include "tests/support/usage.h"
#include "tributary/v1/operations.grpc.pb.h"
#include "worker/rpc/protocol.h"

namespace tributary::test {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// For the service to become whole, on a busy machine.
constexpr std::chrono::minutes kRecovery{2};
// Of each host, between two faults.
constexpr int64_t kOperationsBetween = 10;
// Descriptors that libraries may have opened since the first count.
constexpr size_t kMoreFiles = 16;
// What a worker's shards may take: the soak's cache has room, another large one has none.
constexpr char kMemoryLimit[] = "--memory_limit=50331648";
constexpr int64_t kLargeCache = 1 << 20;  // tokens

milliseconds Since(Clock::time_point begin) {
  return std::chrono::duration_cast<milliseconds>(Clock::now() - begin);
}

}  // namespace

JournalDirectory::JournalDirectory() {
  // A small file system is mounted here before anything is written.
  std::filesystem::create_directory(state_.File("disk"));
}

JournalDirectory::~JournalDirectory() {
  if (mounted_) umount2(state_.File("disk").c_str(), MNT_DETACH);
}

std::string JournalDirectory::MakeSmallDisk() {
  if (mount("tmpfs", state_.File("disk").c_str(), "tmpfs", 0, "size=1m") != 0) {
    return std::string("no small file system can be mounted: ") + std::strerror(errno);
  }
  mounted_ = true;
  return "";
}

void JournalDirectory::FillDisk() {
  std::ofstream filler(state_.File("disk/filler"), std::ios::binary);
  const std::string block(4'096, 'x');
  while (filler.write(block.data(), static_cast<std::streamsize>(block.size())).flush()) {
  }
}

void JournalDirectory::EmptyDisk() { std::filesystem::remove(state_.File("disk/filler")); }

ModelSoak::ModelSoak()
    : Fleet({.workers = kWorkers,
             .coordinator_flags = {"--replicas=1", "--state_dir=" + state_.File("disk")},
             .worker_flags = {kMemoryLimit}}),
      builds_(kMostWorkers, Build::kThis) {}

ModelSoak::~ModelSoak() {
  stop_ = true;
  for (std::thread& thread : threads_) thread.join();
}

void ModelSoak::SetUp() {
  for (int rank = 0; rank < kMostWorkers; ++rank) {
    links_.push_back(std::make_unique<Link>(directory_.File("link" + std::to_string(rank)),
                                            directory_.File("workers.sock")));
  }
}

std::string ModelSoak::CoordinatorAddress(int rank) const {
  return "unix:" + directory_.File("link" + std::to_string(rank));
}

std::vector<FaultKind> ModelSoak::Possible(const std::vector<FaultKind>& kinds) {
  std::vector<FaultKind> possible;
  for (const FaultKind kind : kinds) {
    std::string why_not;
    if (kind == FaultKind::kFullDisk) why_not = MakeSmallDisk();
    if (kind == FaultKind::kPartedPeer) why_not = peers_.Make();
    if (kind == FaultKind::kClockJump) why_not = clock_.Make(directory_);
    if (!why_not.empty()) {
      std::printf("left out: %s: %s\n", Name(kind), why_not.c_str());
      continue;
    }
    possible.push_back(kind);
  }
  return possible;
}

bool ModelSoak::WaitWhole() {
  return Eventually(kRecovery, [&] {
    const v1::GetTopologyReply topology = Topology();
    return topology.state() == v1::GROUP_STATE_READY && topology.caches_size() >= 1 &&
           topology.caches(0).pages_restoring() == 0 &&
           topology.caches(0).pages_without_replica() == 0 &&
           topology.caches(0).not_held_because().empty();
  });
}

bool ModelSoak::WaitForHosts(int64_t more) {
  std::vector<int64_t> goals;
  for (const auto& host : hosts_) goals.push_back(host->operations() + more);
  return Eventually(kRecovery, [&] {
    for (size_t i = 0; i < goals.size(); ++i) {
      if (hosts_[i]->operations() < goals[i] && !HasFailure()) return false;
    }
    return true;
  });
}

void ModelSoak::Soak(const ModelSoakOptions& options) {
  const std::vector<FaultKind> kinds = Possible(options.kinds);
  ASSERT_NO_FATAL_FAILURE(Fleet::SetUp());
  const size_t files_at_first = UsageOf(coordinator_->pid()).files;
  for (int number = 0; number < options.hosts; ++number) {
    hosts_.push_back(std::make_unique<RandomHost>(ConnectTo(PublicAddress(directory_)), number,
                                                  options.seed * 1'000));
    threads_.emplace_back([this, host = hosts_.back().get()] { host->Run(stop_); });
  }
  FaultPlan plan(options.seed, kWorkers, kinds);
  const Clock::time_point begin = Clock::now();
  for (int made = 0;
       options.faults > 0 ? made < options.faults : Clock::now() < begin + options.duration;
       ++made) {
    const Fault fault = plan.Next();
    std::printf("%8.1f s  seed %llu, fault %d: %s\n",
                static_cast<double>(Since(begin).count()) / 1e3,
                static_cast<unsigned long long>(options.seed), made, Describe(fault).c_str());
    std::fflush(stdout);
    SCOPED_TRACE(Describe(fault));
    ASSERT_TRUE(WaitForHosts(kOperationsBetween));
    ASSERT_NO_FATAL_FAILURE(Inject(fault));
    const Clock::time_point injected = Clock::now();
    ASSERT_TRUE(WaitWhole());
    longest_recovery_ = std::max(longest_recovery_, Since(injected));
    ++injected_[static_cast<size_t>(fault.kind)];
    ASSERT_FALSE(HasFailure());
  }
  ASSERT_TRUE(WaitForHosts(kOperationsBetween));
  stop_ = true;
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  EXPECT_EQ(Topology().caches(0).sequences_lost(), 0);
  for (const auto& host : hosts_) host->CheckAndClose();
  const v1::GetTopologyReply topology = Topology();
  ASSERT_EQ(topology.caches_size(), 1);
  EXPECT_EQ(topology.caches(0).sequences(), 0);
  EXPECT_EQ(topology.caches(0).pages_used(), 0);
  EXPECT_LE(UsageOf(coordinator_->pid()).files, files_at_first + kMoreFiles);
}

void ModelSoak::Inject(const Fault& fault) {
  switch (fault.kind) {
    case FaultKind::kKillWorker:
      return KillWorker(fault.rank);
    case FaultKind::kPauseWorker:
      workers_[fault.rank]->Pause();
      std::this_thread::sleep_for(fault.time);
      return workers_[fault.rank]->Resume();
    case FaultKind::kStopWorker:
      return StopWorker(fault.rank, builds_[fault.rank]);
    case FaultKind::kOtherBuild:
      return StopWorker(fault.rank,
                        builds_[fault.rank] == Build::kThis ? Build::kPrevious : Build::kThis);
    case FaultKind::kKillCoordinator:
      return EndCoordinator(SIGKILL);
    case FaultKind::kPauseCoordinator:
      coordinator_->Pause();
      std::this_thread::sleep_for(fault.time);
      return coordinator_->Resume();
    case FaultKind::kStopCoordinator:
      return EndCoordinator(SIGTERM);
    case FaultKind::kRollingRestart:
      return RollingRestart();
    case FaultKind::kTornJournal:
    case FaultKind::kGarbledJournal:
      return SpoilJournal(fault);
    case FaultKind::kSlowLink:
      links_[fault.rank]->SetDelay(fault.time);
      EXPECT_TRUE(WaitForHosts(kOperationsBetween));
      return links_[fault.rank]->SetDelay(milliseconds(0));
    case FaultKind::kCutLink:
      links_[fault.rank]->Cut();
      std::this_thread::sleep_for(fault.time);
      return links_[fault.rank]->Mend();
    case FaultKind::kFullDisk:
      FillDisk();
      ASSERT_NO_FATAL_FAILURE(KillWorker(fault.rank));
      EXPECT_TRUE(WaitWhole());
      return EmptyDisk();
    case FaultKind::kMemoryPressure:
      return PressMemory();
    case FaultKind::kResize:
    case FaultKind::kKilledResize:
      return Resize(fault);
    case FaultKind::kPartedPeer:
      peers_.Cut(fault.rank);
      std::this_thread::sleep_for(fault.time);
      return peers_.Mend(fault.rank);
    case FaultKind::kClockJump:
      return clock_.Jump(fault.jump);
  }
}

void ModelSoak::KillWorker(int rank) {
  workers_[rank]->Signal(SIGKILL);
  ASSERT_EQ(workers_[rank]->Wait(kPatience), -SIGKILL);
  workers_[rank] = Worker(rank, {}, builds_[rank]);
}

void ModelSoak::StopWorker(int rank, Build build) {
  workers_[rank]->Signal(SIGTERM);
  ASSERT_EQ(workers_[rank]->Wait(kPatience), 0);
  builds_[rank] = build;
  workers_[rank] = Worker(rank, {}, build);
}

void ModelSoak::EndCoordinator(int signal) {
  coordinator_->Signal(signal);
  ASSERT_EQ(coordinator_->Wait(kPatience), signal == SIGTERM ? 0 : -signal);
  Coordinate();
}

void ModelSoak::RollingRestart() {
  for (int rank = 0; rank < kWorkers; ++rank) {
    ASSERT_NO_FATAL_FAILURE(StopWorker(rank, builds_[rank]));
    ASSERT_TRUE(WaitWhole());
  }
  EndCoordinator(SIGTERM);
}

// What is spoilt was written since the coordinator came up in order: epochs, who holds which rank,
// and leases. A journal that lost the caches, too, loses them with their sequences, and the log
// says so: that is not to be seen here.
void ModelSoak::SpoilJournal(const Fault& fault) {
  ASSERT_NO_FATAL_FAILURE(EndCoordinator(SIGTERM));
  ASSERT_TRUE(WaitWhole());
  ASSERT_TRUE(WaitForHosts(1));
  coordinator_->Signal(SIGKILL);
  ASSERT_EQ(coordinator_->Wait(kPatience), -SIGKILL);
  // The newest commits are in the WAL.
  const std::string wal = state_.File("disk/journal.db-wal");
  std::error_code missing;
  const uint64_t size = std::filesystem::file_size(wal, missing);
  if (!missing && size > 0) {
    const uint64_t spoilt = std::min<uint64_t>(fault.bytes, size);
    if (fault.kind == FaultKind::kTornJournal) {
      std::filesystem::resize_file(wal, size - spoilt);
    } else {
      std::fstream file(wal, std::ios::binary | std::ios::in | std::ios::out);
      file.seekp(static_cast<std::streamoff>(size - spoilt));
      file.write(std::string(spoilt, '\x5a').data(), static_cast<std::streamsize>(spoilt));
    }
  }
  Coordinate();
}

void ModelSoak::PressMemory() {
  v1::CreateCacheRequest request;
  request.set_cache_id("large");
  *request.mutable_spec() = PublicSpec();
  request.mutable_spec()->set_capacity_tokens(kLargeCache);
  v1::CreateCacheReply reply;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kPatience);
  EXPECT_EQ(stub_->CreateCache(&context, request, &reply).error_code(),
            grpc::StatusCode::RESOURCE_EXHAUSTED);
}

grpc::Status ModelSoak::AskFor(int workers) {
  v1::ChangeWorkersRequest request;
  request.set_workers(workers);
  v1::ChangeWorkersReply reply;
  const auto stub = v1::OperationsService::NewStub(
      grpc::CreateChannel(PublicAddress(directory_), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kRecovery);
  return stub->ChangeWorkers(&context, request, &reply);
}

void ModelSoak::Resize(const Fault& fault) {
  // The build before speaks a version of the protocol that can do it.
  static_assert(worker::kProtocolVersion - 1 >= worker::kRankChangeProtocol);
  for (int rank = kWorkers; rank < fault.workers; ++rank) workers_.push_back(Worker(rank));
  grpc::Status status;
  std::thread asking([&] { status = AskFor(fault.workers); });
  if (fault.kind == FaultKind::kKilledResize) {
    std::this_thread::sleep_for(fault.time);
    KillWorker(fault.rank);
  }
  asking.join();
  EXPECT_TRUE(status.ok() || (fault.kind == FaultKind::kKilledResize &&
                              status.error_code() == grpc::StatusCode::UNAVAILABLE))
      << status.error_code() << ": " << status.error_message();
  ASSERT_TRUE(WaitWhole());
  ASSERT_TRUE(WaitForHosts(kOperationsBetween));
  status = AskFor(kWorkers);
  EXPECT_TRUE(status.ok()) << status.error_code() << ": " << status.error_message();
  while (workers_.size() > kWorkers) {
    workers_.back()->Signal(SIGTERM);
    ASSERT_EQ(workers_.back()->Wait(kPatience), 0);
    workers_.pop_back();
  }
}

void ModelSoak::PrintCounts() const {
  std::printf("faults:");
  for (int kind = 0; kind < kFaultKinds; ++kind) {
    if (injected_[kind] == 0) continue;
    std::printf(" %s %lld", Name(static_cast<FaultKind>(kind)),
                static_cast<long long>(injected_[kind]));
  }
  int64_t all = 0, interrupted = 0;
  std::printf("\noperations:");
  for (int operation = 0; operation < kHostOperations; ++operation) {
    int64_t sum = 0;
    for (const auto& host : hosts_) sum += host->operations(static_cast<HostOperation>(operation));
    std::printf(" %s %lld", Name(static_cast<HostOperation>(operation)),
                static_cast<long long>(sum));
    all += sum;
  }
  for (const auto& host : hosts_) interrupted += host->interrupted();
  std::printf("; all %lld, of which attempts repeated %lld\nlongest recovery: %lld ms\n",
              static_cast<long long>(all), static_cast<long long>(interrupted),
              static_cast<long long>(longest_recovery_.count()));
}

}  // namespace tributary::test
