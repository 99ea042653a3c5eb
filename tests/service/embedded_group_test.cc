// A group of threads with devices that the test makes: slow to form, or lost.
#include "service/workers/embedded_group.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <future>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/cpu/thread_pool.h"
#include "worker/cpu_backend.h"

namespace tributary::service {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

// What happened to the devices, seen from all threads.
struct Devices {
  std::mutex mutex;
  std::condition_variable changed;
  int joining = 0;
  int gone_while_joining = 0;
  std::vector<std::thread::id> made_shards;  // the threads that did, one for each shard
  std::atomic<bool> lost = false;

  void WaitForJoining() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return joining > 0; });
  }
  // The shards that this thread made.
  int64_t MadeHere() {
    const std::lock_guard lock(mutex);
    return std::count(made_shards.begin(), made_shards.end(), std::this_thread::get_id());
  }
};

class TestBackend : public worker::Backend {
 public:
  TestBackend(Devices& devices, std::chrono::milliseconds join)
      : devices_(devices),
        join_(join),
        cpu_(worker::CreateCpuBackend(std::make_shared<cpu::ThreadPool>(1),
                                      collective::Strategy::kAuto)) {}
  ~TestBackend() override {
    const std::lock_guard lock(devices_.mutex);
    if (joining_) ++devices_.gone_while_joining;
  }

  const worker::BackendCapabilities& capabilities() const override { return cpu_->capabilities(); }
  size_t AvailableMemory() const override { return cpu_->AvailableMemory(); }
  absl::StatusOr<std::unique_ptr<collective::Communicator>> Join(
      std::unique_ptr<collective::Communicator> comm, collective::Rendezvous&,
      collective::Deadline) override {
    SetJoining(true);
    std::this_thread::sleep_for(join_);
    SetJoining(false);
    return comm;
  }
  absl::StatusOr<std::unique_ptr<worker::Shard>> CreateShard(const worker::CacheSpec& spec,
                                                             size_t available,
                                                             worker::PageFill fill) override {
    if (devices_.lost) return absl::DataLossError("the GPU fell off the bus");
    {
      const std::lock_guard lock(devices_.mutex);
      devices_.made_shards.push_back(std::this_thread::get_id());
    }
    return cpu_->CreateShard(spec, available, fill);
  }

 private:
  void SetJoining(bool joining) {
    const std::lock_guard lock(devices_.mutex);
    joining_ = joining;
    devices_.joining += joining ? 1 : -1;
    devices_.changed.notify_all();
  }

  Devices& devices_;
  const std::chrono::milliseconds join_;
  const std::unique_ptr<worker::Backend> cpu_;
  bool joining_ = false;
};

class Observed : public GroupObserver {
 public:
  void OnFormed(uint64_t epoch, const std::vector<bool>&) override {
    const std::lock_guard lock(mutex_);
    epoch_ = epoch;
    ++formed_;
    changed_.notify_all();
  }
  void OnBroken(const std::string& reason) override {
    const std::lock_guard lock(mutex_);
    broken_ = reason;
  }
  uint64_t WaitFormed(int times = 1) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return formed_ >= times; });
    return epoch_;
  }
  int formed() {
    const std::lock_guard lock(mutex_);
    return formed_;
  }
  std::string broken() {
    const std::lock_guard lock(mutex_);
    return broken_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t epoch_ = 0;
  int formed_ = 0;
  std::string broken_;
};

EmbeddedGroupOptions OptionsFor(Devices& devices, std::chrono::milliseconds join) {
  return {.workers = 2, .threads = 2, .make_backend = [&devices, join](int) {
            return std::make_unique<TestBackend>(devices, join);
          }};
}

std::shared_ptr<worker::Command> CreateCache(uint64_t epoch, worker::CacheId cache = 1) {
  worker::CacheSpec spec;
  spec.kv_dtype = DType::kBf16;
  spec.num_pages = 4;
  spec.page_size = spec.interleave = 16;
  spec.q_heads = spec.kv_heads = 1;
  spec.head_dim = 64;
  spec.sm_scale = 0.125f;
  spec.layers.resize(1);
  auto command = std::make_shared<worker::Command>();
  command->epoch = epoch;
  command->number = cache;
  command->cache = cache;
  command->deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  command->body = worker::CreateCacheCommand{spec};
  return command;
}

TEST(EmbeddedGroupTest, RanksStayUntilTheGroupThatIsFormingHasFormed) {
  Devices devices;
  Observed observed;
  auto group = CreateEmbeddedGroup(OptionsFor(devices, std::chrono::milliseconds(100)));
  ASSERT_TRUE(group->Start(&observed).ok());
  devices.WaitForJoining();
  group->Stop();
  group.reset();
  EXPECT_EQ(devices.gone_while_joining, 0);
}

TEST(EmbeddedGroupTest, ALostDeviceIsToldOnceAndEndsTheGroup) {
  Devices devices;
  Observed observed;
  EmbeddedGroupOptions options = OptionsFor(devices, std::chrono::milliseconds(0));
  std::promise<absl::Status> lost;
  options.on_lost = [&](const absl::Status& status) { lost.set_value(status); };
  options.form_pause = std::chrono::milliseconds(1);
  auto group = CreateEmbeddedGroup(options);
  ASSERT_TRUE(group->Start(&observed).ok());
  const auto command = CreateCache(observed.WaitFormed());
  devices.lost = true;
  std::promise<absl::Status> answered;
  group->Submit(command, [&](Outcome outcome) { answered.set_value(outcome.status); });
  // The last rank's answer, or that of the group that broke of the first one's.
  EXPECT_THAT(answered.get_future().get().code(),
              AnyOf(absl::StatusCode::kDataLoss, absl::StatusCode::kAborted));
  const absl::Status told = lost.get_future().get();
  EXPECT_TRUE(absl::IsDataLoss(told)) << told;
  EXPECT_THAT(observed.broken(), HasSubstr("fell off the bus"));
  // It does not go round: nothing could be served.
  EXPECT_EQ(observed.formed(), 1);
  std::promise<absl::Status> refused;
  group->Submit(command, [&](Outcome outcome) { refused.set_value(outcome.status); });
  EXPECT_EQ(refused.get_future().get().code(), absl::StatusCode::kAborted);
  group->Stop();
  EXPECT_EQ(observed.formed(), 1);
}

TEST(EmbeddedGroupTest, AThreadThatWaitsCarriesOutRankZerosCommand) {
  Devices devices;
  Observed observed;
  auto group = CreateEmbeddedGroup(OptionsFor(devices, std::chrono::milliseconds(0)));
  ASSERT_TRUE(group->Start(&observed).ok());
  const uint64_t epoch = observed.WaitFormed();
  devices.made_shards.clear();  // of the test of the device
  // The rank's thread may be awake and be quicker, but not always.
  worker::CacheId cache = 0;
  while (devices.MadeHere() == 0 && cache < 100) {
    const auto command = CreateCache(epoch, ++cache);
    command->waiter = std::this_thread::get_id();
    std::promise<absl::Status> answered;
    std::atomic<bool> over = false;
    group->Submit(command, [&](Outcome outcome) {
      over = true;
      answered.set_value(outcome.status);
    });
    group->Lend([&] { return over.load(); });
    EXPECT_TRUE(answered.get_future().get().ok());
  }
  EXPECT_EQ(devices.MadeHere(), 1);
  EXPECT_EQ(devices.made_shards.size(), 2 * cache) << "each rank makes each cache's shard";
  group->Stop();
}

TEST(EmbeddedGroupTest, AThreadThatDoesNotWaitCarriesOutItsOwnCommandAlone) {
  Devices devices;
  Observed observed;
  auto group = CreateEmbeddedGroup(OptionsFor(devices, std::chrono::milliseconds(0)));
  ASSERT_TRUE(group->Start(&observed).ok());
  const uint64_t epoch = observed.WaitFormed();
  devices.made_shards.clear();  // of the test of the device
  const auto submit = [&](worker::CacheId cache, bool lends) {
    const auto command = CreateCache(epoch, cache);
    if (lends) command->waiter = std::this_thread::get_id();
    auto answered = std::make_shared<std::promise<absl::Status>>();
    group->Submit(command, [answered](Outcome outcome) { answered->set_value(outcome.status); });
    return answered->get_future();
  };
  worker::CacheId cache = 0;
  // The rank's thread may be awake and be quicker, but not always.
  while (devices.MadeHere() == 0 && cache < 100) {
    auto answered = submit(++cache, /*lends=*/true);
    group->LendOnce();
    EXPECT_TRUE(answered.get().ok());
  }
  EXPECT_EQ(devices.MadeHere(), 1);
  // Commands of others are left to the rank's thread, also those before its own.
  for (int i = 0; i < 20; ++i) {
    const int64_t before = devices.MadeHere();
    auto other = submit(++cache, /*lends=*/false);
    auto own = submit(++cache, /*lends=*/true);
    group->LendOnce();
    EXPECT_TRUE(other.get().ok());
    EXPECT_TRUE(own.get().ok());
    EXPECT_LE(devices.MadeHere(), before + 1);
  }
  group->LendOnce();  // nothing is there
  group->Stop();
}

TEST(EmbeddedGroupTest, ACommandThatItsWaiterNeverCarriedOutIsDroppedWithTheGroup) {
  Devices devices;
  Observed observed;
  auto group = CreateEmbeddedGroup(OptionsFor(devices, std::chrono::milliseconds(0)));
  ASSERT_TRUE(group->Start(&observed).ok());
  const uint64_t epoch = observed.WaitFormed();
  absl::Status answer;
  for (worker::CacheId cache = 1; answer.ok() && cache < 100; ++cache) {
    const auto command = CreateCache(epoch, cache);
    command->waiter = std::this_thread::get_id();
    command->deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(20);
    std::promise<absl::Status> answered;
    group->Submit(command, [&](Outcome outcome) { answered.set_value(outcome.status); });
    answer = answered.get_future().get();
    group->Lend([] { return true; });
  }
  ASSERT_EQ(answer.code(), absl::StatusCode::kAborted);
  observed.WaitFormed(2);
  group->Stop();
}

}  // namespace
}  // namespace tributary::service
