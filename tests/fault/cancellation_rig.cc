#include "tests/fault/cancellation_rig.h"

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <stdexcept>
#include <string>

namespace tributary::test {
namespace {

constexpr std::chrono::seconds kPatience{60};

int64_t PagesFor(const v1::CacheInfo& cache, int ranks) {
  const int64_t page_tokens = int64_t{cache.spec().page_size()} * ranks;
  int64_t pages = 0;
  for (const v1::SequenceInfo& sequence : cache.sequence()) {
    pages += (sequence.length() + page_tokens - 1) / page_tokens;
  }
  return pages;
}

}  // namespace

CancellationRig::CancellationRig(int ranks, int clients, uint64_t seed) {
  coordinator_ = StartCoordinator(directory_, ranks, {"--shared_memory_prefixes=/tributary"});
  for (int rank = 0; rank < ranks; ++rank) {
    workers_.push_back(StartWorker(directory_, WorkerAddress(directory_), rank));
  }
  if (!Eventually(kPatience,
                  [&] { return coordinator_->Log().find(" ready") != std::string::npos; })) {
    throw std::runtime_error("the group is not ready: " + coordinator_->Log());
  }
  stub_ = ConnectTo(PublicAddress(directory_));
  v1::CreateCacheRequest request;
  request.set_cache_id(kCacheId);
  *request.mutable_spec() = PublicSpec();
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kPatience);
  v1::CreateCacheReply reply;
  const grpc::Status status = stub_->CreateCache(&context, request, &reply);
  if (!status.ok()) throw std::runtime_error("CreateCache: " + status.error_message());
  load_ = std::make_unique<CancellingLoad>(PublicAddress(directory_), stub_, clients, seed);
}

v1::GetTopologyReply CancellationRig::Topology() {
  v1::GetTopologyRequest request;
  request.set_with_sequences(true);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kPatience);
  v1::GetTopologyReply reply;
  const grpc::Status status = stub_->GetTopology(&context, request, &reply);
  EXPECT_TRUE(status.ok()) << status.error_message();
  if (reply.caches().empty()) reply.add_caches();
  return reply;
}

void CancellationRig::ExpectRest() {
  // The last calls that clients gave up may still be on their way.
  EXPECT_TRUE(Eventually(kPatience, [&] { return Topology().statistics().calls_open() == 0; }));
  const v1::GetTopologyReply topology = Topology();
  EXPECT_EQ(topology.epoch(), 1);
  EXPECT_EQ(topology.state(), v1::GROUP_STATE_READY);
  EXPECT_EQ(topology.statistics().steps_aborted(), 0);
  EXPECT_EQ(topology.caches(0).pages_used(),
            PagesFor(topology.caches(0), static_cast<int>(workers_.size())));
}

void CancellationRig::ExpectEnd() {
  load_->Close();
  EXPECT_TRUE(Eventually(kPatience, [&] {
    const v1::GetTopologyReply now = Topology();
    return now.statistics().calls_open() == 0 && now.caches(0).sequences() == 0;
  }));
  EXPECT_EQ(Topology().caches(0).pages_used(), 0);
  // Worker first: a coordinator that leaves is no reason for them to end. A leak that a sanitizer
  // finds is told by the exit code.
  for (const auto& worker : workers_) worker->Signal(SIGTERM);
  for (const auto& worker : workers_) EXPECT_EQ(worker->Wait(kPatience), 0);
  coordinator_->Signal(SIGTERM);
  EXPECT_EQ(coordinator_->Wait(kPatience), 0);
}

}  // namespace tributary::test
