// Clients that cancel, run out of time or hang up in the middle of calls, many times over, beside
// hosts that do not: the group never breaks, the hosts' answers stay right, and when the clients
// are gone nothing of theirs is left.
//
// TRIBUTARY_SOAK="CLIENTS SECONDS INJECTIONS" runs the same for longer.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <random>
#include <regex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "tests/fault/load.h"
#include "tests/fault/programs.h"

namespace tributary::test {
namespace {

using std::chrono::microseconds;
using std::chrono::seconds;
using ::testing::AnyOf;

constexpr seconds kPatience{60};
constexpr int kRanks = 2;
constexpr int kHosts = 2;
constexpr uint64_t kSeed = 20240607;

struct Size {
  int clients = 8;
  int seconds = 0;  // at least so long
  int injections = 1000;
};

Size SizeOfRun() {
  Size size;
  if (const char* asked = std::getenv("TRIBUTARY_SOAK")) {
    std::istringstream(asked) >> size.clients >> size.seconds >> size.injections;
  }
  return size;
}

v1::Tensor Zeros(int heads, int head_dim) {
  v1::Tensor tensor;
  tensor.set_dtype(v1::DTYPE_F32);
  for (const int extent : {1, heads, head_dim}) tensor.add_shape(extent);
  tensor.set_inline_(std::string(size_t{4} * heads * head_dim, '\0'));
  return tensor;
}

v1::AttendRequest OneToken(uint64_t sequence, int64_t position) {
  const v1::CacheSpec spec = PublicSpec();
  v1::AttendRequest request;
  request.set_request_id(static_cast<uint64_t>(position) + 1);
  request.set_cache_id(kCacheId);
  request.set_mode(v1::ATTEND_MODE_CAUSAL);
  v1::AttendEntry* entry = request.add_entries();
  entry->set_sequence_id(sequence);
  entry->set_first_position(position);
  entry->set_query_rows(1);
  entry->set_new_tokens(1);
  *request.mutable_q() = Zeros(spec.q_heads(), spec.head_dim());
  *request.mutable_k() = Zeros(spec.kv_heads(), spec.head_dim());
  *request.mutable_v() = Zeros(spec.kv_heads(), spec.head_dim());
  return request;
}

// A client with a connection of its own that loses interest again and again. A call whose outcome
// it does not know it repeats: the same token at the same position.
class FickleClient {
 public:
  FickleClient(const std::string& address, int index)
      : address_(address), sequence_(1000 + index), random_(kSeed + index) {
    Dial();
  }

  bool Open() {
    v1::OpenSequenceRequest request;
    request.set_cache_id(kCacheId);
    request.set_sequence_id(sequence_);
    grpc::ClientContext context;
    Prepare(&context);
    v1::OpenSequenceReply reply;
    return stub_->OpenSequence(&context, request, &reply).ok();
  }
  bool Close() {
    v1::CloseSequenceRequest request;
    request.set_cache_id(kCacheId);
    request.set_sequence_id(sequence_);
    grpc::ClientContext context;
    Prepare(&context);
    v1::CloseSequenceReply reply;
    return stub_->CloseSequence(&context, request, &reply).ok();
  }

  // One call to its end.
  void Behave() {
    grpc::ClientContext context;
    Prepare(&context);
    v1::AttendReply reply;
    const grpc::Status status = stub_->Attend(&context, OneToken(sequence_, position_), &reply);
    EXPECT_TRUE(status.ok()) << status.error_code() << " " << status.error_message();
    if (status.ok()) Advance();
  }

  void Misbehave() {
    switch (random_() % 4) {
      case 0:
        return Expire();
      case 1:
        return Cancel();
      case 2:
        return CancelStream();
      default:
        return HangUp();
    }
  }

 private:
  void Dial() {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    stub_ = v1::AttentionService::NewStub(
        grpc::CreateCustomChannel(address_, grpc::InsecureChannelCredentials(), arguments));
  }
  // A socket whose queue of connections is full refuses more; that is not what is tested here.
  static void Prepare(grpc::ClientContext* context) {
    context->set_wait_for_ready(true);
    context->set_deadline(std::chrono::system_clock::now() + kPatience);
  }
  microseconds Moment() { return microseconds(random_() % 3000); }
  // A short sequence, so that steps stay cheap: rounds over the same positions repeat its tokens.
  void Advance() { position_ = (position_ + 1) % 64; }

  void Expire() {
    grpc::ClientContext context;
    Prepare(&context);
    context.set_deadline(std::chrono::system_clock::now() + Moment());
    v1::AttendReply reply;
    const grpc::Status status = stub_->Attend(&context, OneToken(sequence_, position_), &reply);
    EXPECT_THAT(status.error_code(),
                AnyOf(grpc::StatusCode::OK, grpc::StatusCode::DEADLINE_EXCEEDED))
        << status.error_message();
    if (status.ok()) Advance();
  }

  void Cancel() {
    grpc::ClientContext context;
    Prepare(&context);
    grpc::CompletionQueue queue;
    auto call = stub_->AsyncAttend(&context, OneToken(sequence_, position_), &queue);
    v1::AttendReply reply;
    grpc::Status status;
    call->Finish(&reply, &status, nullptr);
    std::this_thread::sleep_for(Moment());
    context.TryCancel();
    void* tag = nullptr;
    bool ok = false;
    queue.Next(&tag, &ok);
    EXPECT_THAT(status.error_code(), AnyOf(grpc::StatusCode::OK, grpc::StatusCode::CANCELLED))
        << status.error_message();
    if (status.ok()) Advance();
  }

  void CancelStream() {
    grpc::ClientContext context;
    Prepare(&context);
    const auto stream = stub_->AttendStream(&context);
    // Several in flight; each repeats or follows the one before.
    for (int i = 0; i < 3; ++i) stream->Write(OneToken(sequence_, position_ + i));
    v1::AttendReply reply;
    if (random_() % 2 == 0) stream->Read(&reply);
    std::this_thread::sleep_for(Moment());
    context.TryCancel();
    stream->Finish();
  }

  // The connection goes with the call in flight.
  void HangUp() {
    auto context = std::make_unique<grpc::ClientContext>();
    Prepare(context.get());
    auto stream = stub_->AttendStream(context.get());
    stream->Write(OneToken(sequence_, position_));
    std::this_thread::sleep_for(Moment());
    context->TryCancel();
    stream->Finish();
    stream.reset();
    Dial();
  }

  const std::string address_;
  const uint64_t sequence_;
  std::mt19937_64 random_;
  std::unique_ptr<v1::AttentionService::Stub> stub_;
  int64_t position_ = 0;
};

size_t OpenFiles(const ChildProcess& process) {
  const std::filesystem::directory_iterator files("/proc/" + std::to_string(process.pid()) + "/fd");
  return static_cast<size_t>(std::distance(begin(files), end(files)));
}

size_t MemoryInUse(const ChildProcess& process) {
  const std::string status = ReadWholeFile("/proc/" + std::to_string(process.pid()) + "/status");
  std::smatch match;
  if (!std::regex_search(status, match, std::regex("VmRSS:\\s+([0-9]+) kB"))) return 0;
  return std::stoul(match[1]) << 10;
}

class Cancellation : public ::testing::Test {
 protected:
  void SetUp() override {
    coordinator_ = StartCoordinator(directory_, kRanks);
    for (int rank = 0; rank < kRanks; ++rank) {
      workers_.push_back(StartWorker(directory_, WorkerAddress(directory_), rank));
    }
    ASSERT_TRUE(Eventually(
        kPatience, [&] { return coordinator_->Log().find(" ready") != std::string::npos; }));
    stub_ = ConnectTo(PublicAddress(directory_));
    v1::CreateCacheRequest request;
    request.set_cache_id(kCacheId);
    *request.mutable_spec() = PublicSpec();
    grpc::ClientContext context;
    v1::CreateCacheReply reply;
    ASSERT_TRUE(stub_->CreateCache(&context, request, &reply).ok());
  }

  v1::GetTopologyReply Topology() {
    grpc::ClientContext context;
    v1::GetTopologyReply reply;
    EXPECT_TRUE(stub_->GetTopology(&context, {}, &reply).ok());
    return reply;
  }

  const TemporaryDirectory directory_;
  std::unique_ptr<ChildProcess> coordinator_;
  std::vector<std::unique_ptr<ChildProcess>> workers_;
  std::shared_ptr<v1::AttentionService::Stub> stub_;
};

TEST_F(Cancellation, LostInterestChangesNothingForOthersAndLeavesNothingBehind) {
  const Size size = SizeOfRun();
  std::printf("clients %d, injections %d, seed %llu\n", size.clients, size.injections,
              static_cast<unsigned long long>(kSeed));
  // All that is made once is made before the baseline is taken.
  std::vector<std::unique_ptr<FickleClient>> clients;
  for (int i = 0; i < size.clients; ++i) {
    clients.push_back(std::make_unique<FickleClient>(PublicAddress(directory_), i));
    ASSERT_TRUE(clients.back()->Open());
    clients.back()->Behave();
  }
  const size_t files = OpenFiles(*coordinator_);
  const size_t memory = MemoryInUse(*coordinator_);

  std::atomic<bool> stop{false};
  std::atomic<int> host_steps{0};
  std::vector<std::thread> hosts;
  for (int i = 0; i < kHosts; ++i) {
    auto opened = std::make_shared<SequenceHost>(stub_, 1 + i);
    const grpc::Status status = opened->Open();
    ASSERT_TRUE(status.ok()) << status.error_code() << " " << status.error_message();
    hosts.emplace_back([&, opened] {
      SequenceHost& host = *opened;
      while (!stop) {
        const grpc::Status status = host.length() < 200 ? host.Step(1) : host.Look(4);
        ASSERT_TRUE(status.ok()) << status.error_message();
        ++host_steps;
        if (size.seconds > 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
      EXPECT_TRUE(host.Close().ok());
    });
  }
  const auto end = std::chrono::steady_clock::now() + seconds(size.seconds);
  std::atomic<int> injections_left{size.injections};
  std::vector<std::thread> threads;
  for (auto& client : clients) {
    threads.emplace_back([&, pause = size.seconds] {
      while (injections_left.fetch_sub(1) > 0 || std::chrono::steady_clock::now() < end) {
        if (injections_left >= 0) client->Misbehave();
        client->Behave();
        // A long run spreads its injections over its time.
        if (pause > 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(Eventually(kPatience, [&] { return host_steps > 10; }));
  stop = true;
  for (std::thread& host : hosts) host.join();

  // The group never parted: its first epoch, and no step that was aborted.
  const v1::GetTopologyReply topology = Topology();
  EXPECT_EQ(topology.epoch(), 1);
  EXPECT_EQ(topology.statistics().steps_aborted(), 0);
  EXPECT_EQ(topology.state(), v1::GROUP_STATE_READY);
  EXPECT_TRUE(Eventually(kPatience, [&] { return OpenFiles(*coordinator_) <= files; }))
      << OpenFiles(*coordinator_) << " files open, " << files << " at first";
  EXPECT_LT(MemoryInUse(*coordinator_), memory + (size_t{64} << 20));
  for (auto& client : clients) EXPECT_TRUE(client->Close());
  EXPECT_TRUE(Eventually(kPatience, [&] {
    const v1::GetTopologyReply now = Topology();
    return now.statistics().calls_open() == 0 && now.caches(0).sequences() == 0;
  }));
  EXPECT_EQ(Topology().caches(0).pages_used(), 0);
  std::printf("checked steps beside them: %d; memory %zu -> %zu KiB; files %zu -> %zu\n",
              host_steps.load(), memory >> 10, MemoryInUse(*coordinator_) >> 10, files,
              OpenFiles(*coordinator_));
}

}  // namespace
}  // namespace tributary::test
