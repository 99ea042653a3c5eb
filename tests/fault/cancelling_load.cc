#include "tests/fault/cancelling_load.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>

#include "service/client/shared_region.h"

namespace tributary::test {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using ::testing::AnyOf;
using Clock = std::chrono::steady_clock;

namespace {

constexpr std::chrono::seconds kCallPatience{60};
constexpr int kHosts = 2;
constexpr uint64_t kFirstSequence = 1000;  // of the clients; hosts count from 1
constexpr int64_t kHostTokens = 200;
constexpr uint64_t kRegionBytes = uint64_t{64} << 10;
// Steps of hosts in every phase, however short.
constexpr int64_t kLeastChecked = 10;

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

testing::AssertionResult Succeeded(const grpc::Status& status) {
  if (status.ok()) return testing::AssertionSuccess();
  return testing::AssertionFailure() << status.error_code() << " " << status.error_message();
}

}  // namespace

// A client with a connection of its own that loses interest again and again. A call whose outcome
// it does not know it repeats: the same token at the same position.
class FickleClient {
 public:
  FickleClient(std::string address, uint64_t sequence, uint64_t seed)
      : address_(std::move(address)), sequence_(sequence), random_(seed) {
    Dial();
  }

  void Open() {
    v1::OpenSequenceReply reply;
    Call(&Stub::OpenSequence, v1::OpenSequenceRequest(), &reply);
  }
  void Empty() {
    v1::TruncateSequenceReply reply;
    Call(&Stub::TruncateSequence, v1::TruncateSequenceRequest(), &reply);  // to length 0
    position_ = 0;
  }
  void Close() {
    v1::CloseSequenceReply reply;
    Call(&Stub::CloseSequence, v1::CloseSequenceRequest(), &reply);
  }

  // The service forgets regions without owners when the next one comes.
  void RegisterAndUnregister() {
    v1::UnregisterSharedMemoryRequest request;
    request.set_name(RegisterRegion());
    grpc::ClientContext context;
    Prepare(&context);
    v1::UnregisterSharedMemoryReply reply;
    EXPECT_TRUE(Succeeded(stub_->UnregisterSharedMemory(&context, request, &reply)));
  }

  // One call to its end.
  void Behave() {
    grpc::ClientContext context;
    Prepare(&context);
    v1::AttendReply reply;
    const grpc::Status status = stub_->Attend(&context, OneToken(sequence_, position_), &reply);
    EXPECT_TRUE(Succeeded(status));
    if (status.ok()) Advance();
  }

  void Misbehave() {
    switch (random_() % 5) {
      case 0:
        return Expire();
      case 1:
        return Cancel();
      case 2:
        return CancelStream();
      case 3:
        return AbandonRegion();
      default:
        return HangUp();
    }
  }

 private:
  using Stub = v1::AttentionService::Stub;

  void Dial() {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    stub_ = v1::AttentionService::NewStub(
        grpc::CreateCustomChannel(address_, grpc::InsecureChannelCredentials(), arguments));
  }
  // A socket whose queue of connections is full refuses more; that is not what is tested here.
  static void Prepare(grpc::ClientContext* context) {
    context->set_wait_for_ready(true);
    context->set_deadline(std::chrono::system_clock::now() + kCallPatience);
  }
  template <typename Request, typename Reply>
  void Call(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Reply*),
            Request request, Reply* reply) {
    request.set_cache_id(kCacheId);
    request.set_sequence_id(sequence_);
    grpc::ClientContext context;
    Prepare(&context);
    EXPECT_TRUE(Succeeded(((*stub_).*method)(&context, request, reply)));
  }
  // Registers a region that is gone when this returns; its name.
  std::string RegisterRegion() {
    const auto region = client::SharedRegion::Create(kRegionBytes);
    EXPECT_TRUE(region.ok()) << region.status();
    if (!region.ok()) return "";
    v1::RegisterSharedMemoryRequest request;
    request.set_name((*region)->name());
    request.mutable_system()->set_key((*region)->key());
    request.set_byte_size(kRegionBytes);
    grpc::ClientContext context;
    Prepare(&context);
    v1::RegisterSharedMemoryReply reply;
    EXPECT_TRUE(Succeeded(stub_->RegisterSharedMemory(&context, request, &reply)));
    return request.name();
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

  // What the service sees of a client that dies: its region has no owner any more.
  void AbandonRegion() { RegisterRegion(); }

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
  std::unique_ptr<Stub> stub_;
  int64_t position_ = 0;
};

// When the injections of a phase are due.
class CancellingLoad::Schedule {
 public:
  explicit Schedule(const Phase& phase) : phase_(phase) {}

  // True, to one caller, when the next injection is due.
  bool Take() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (taken_ == phase_.injections) return false;
    if (Clock::now() < begin_ + phase_.duration * taken_ / phase_.injections) return false;
    ++taken_;
    return true;
  }
  bool over() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return taken_ == phase_.injections && Clock::now() >= begin_ + phase_.duration;
  }

 private:
  const Phase phase_;
  const Clock::time_point begin_ = Clock::now();
  mutable std::mutex mutex_;
  int taken_ = 0;
};

CancellingLoad::CancellingLoad(const std::string& address,
                               std::shared_ptr<v1::AttentionService::Stub> stub, int clients,
                               uint64_t seed)
    : stub_(std::move(stub)) {
  for (int i = 0; i < clients; ++i) {
    clients_.push_back(std::make_unique<FickleClient>(address, kFirstSequence + i, seed + i));
    clients_.back()->Open();
  }
}

CancellingLoad::~CancellingLoad() = default;

void CancellingLoad::Run(const Phase& phase, const std::function<void()>& sample) {
  Schedule schedule(phase);
  std::mutex mutex;
  std::condition_variable changed;
  size_t running = clients_.size();
  std::vector<std::thread> clients;
  for (const auto& client : clients_) {
    clients.emplace_back([&, &client = *client] {
      RunClient(client, phase, schedule);
      std::lock_guard<std::mutex> lock(mutex);
      --running;
      changed.notify_all();
    });
  }
  std::atomic<bool> stop{false};
  std::vector<std::thread> hosts;
  for (uint64_t id = 1; id <= kHosts; ++id) {
    hosts.emplace_back([&, id] { RunHost(id, phase, stop); });
  }
  {
    std::unique_lock<std::mutex> lock(mutex);
    while (!changed.wait_for(lock, phase.sample_every, [&] { return running == 0; })) {
      lock.unlock();
      sample();
      lock.lock();
    }
  }
  stop = true;
  for (std::thread& thread : clients) thread.join();
  for (std::thread& thread : hosts) thread.join();
  for (const auto& client : clients_) client->Empty();
  clients_.front()->RegisterAndUnregister();
}

void CancellingLoad::RunClient(FickleClient& client, const Phase& phase, Schedule& schedule) {
  while (!schedule.over()) {
    if (schedule.Take()) {
      client.Misbehave();
      ++injections_;
    }
    client.Behave();
    ++calls_;
    std::this_thread::sleep_for(phase.pause);
  }
}

void CancellingLoad::RunHost(uint64_t sequence, const Phase& phase, const std::atomic<bool>& stop) {
  SequenceHost host(stub_, sequence);
  ASSERT_TRUE(Succeeded(host.Open()));
  for (int64_t steps = 0; !stop || steps < kLeastChecked; ++steps) {
    ASSERT_TRUE(Succeeded(host.length() < kHostTokens ? host.Step(1) : host.Look(4)));
    ++checked_;
    std::this_thread::sleep_for(phase.pause);
  }
  EXPECT_TRUE(Succeeded(host.Close()));
}

void CancellingLoad::Close() {
  for (const auto& client : clients_) client->Close();
}

}  // namespace tributary::test
