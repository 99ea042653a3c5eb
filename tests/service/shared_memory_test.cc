// Tensors in shared memory regions.
#include "service/data/shared_memory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <fstream>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "base/status/errors.h"
#include "base/sync/mutex.h"
#include "service/workers/embedded_group.h"
#include "service/workers/worker_group.h"
#include "tests/service/fake_group.h"
#include "tests/service/test_service.h"

namespace tributary::service::testing {
namespace {

using ::grpc::StatusCode;

// A POSIX object of the test's own.
class SharedObject {
 public:
  explicit SharedObject(size_t bytes) : bytes_(bytes) {
    const int fd = shm_open(key_.c_str(), O_CREAT | O_EXCL | O_RDWR, 0600);
    EXPECT_GE(fd, 0);
    EXPECT_EQ(ftruncate(fd, bytes), 0);
    data_ = static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
    EXPECT_NE(data_, MAP_FAILED);
    close(fd);
  }
  ~SharedObject() {
    Die();
    munmap(data_, bytes_);
    shm_unlink(key_.c_str());
  }
  // From here on somebody owns it, until he dies.
  void Lock() {
    lock_fd_ = shm_open(key_.c_str(), O_RDWR, 0);
    struct flock lock {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    EXPECT_EQ(fcntl(lock_fd_, F_OFD_SETLK, &lock), 0);
  }
  void Die() {
    if (lock_fd_ >= 0) close(lock_fd_);
    lock_fd_ = -1;
  }
  const std::string& key() const { return key_; }
  char* data() const { return data_; }
  // How much of the machine's memory it has taken.
  size_t BytesHeld() const {
    const int fd = shm_open(key_.c_str(), O_RDONLY, 0);
    struct stat info {};
    EXPECT_EQ(fstat(fd, &info), 0);
    close(fd);
    return static_cast<size_t>(info.st_blocks) * 512;
  }

 private:
  static std::string NextKey() {
    static int next = 0;
    return "/tributary-test-" + std::to_string(getpid()) + "-" + std::to_string(next++);
  }
  const std::string key_ = NextKey();
  const size_t bytes_;
  char* data_ = nullptr;
  int lock_fd_ = -1;
};

// What an object takes of the machine.
int64_t BytesTaken(const SharedObject& object) {
  const int fd = shm_open(object.key().c_str(), O_RDWR, 0);
  struct stat status {};
  EXPECT_EQ(fstat(fd, &status), 0);
  close(fd);
  return int64_t{status.st_blocks} * 512;
}

// An object may be larger than the machine by name; what is missing of it is taken when it is
// registered, which must not be all there is.
TEST(SharedMemoryRegistryTest, ARegionIsNotTakenToTheEndOfTheMachinesMemory) {
  const SharedObject object(size_t{256} << 20);
  size_t available = size_t{200} << 20;
  SharedMemoryRegistry registry({"/"}, [&] { return std::exchange(available, size_t{100} << 20); });
  const absl::Status status = registry.RegisterSystem("r", object.key(), 0, uint64_t{256} << 20);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_EQ(tributary::FieldOf(status), "byte_size");
  EXPECT_LE(BytesTaken(object), 64 << 20) << "the second piece was not taken";
}

// How often this process, which is the service's too, has it mapped.
int MappingsOf(const SharedObject& object) {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.ends_with("/dev/shm" + object.key()) ? 1 : 0;
  }
  return count;
}

// The embedded workers behind a gate, which keeps steps back while it is closed.
class GatedGroup final : public WorkerGroup {
 public:
  GatedGroup() : workers_(CreateEmbeddedGroup({.workers = 2, .threads = 2})) {}

  uint64_t id() const override { return workers_->id(); }
  int size() const override { return workers_->size(); }
  worker::Device device() const override { return workers_->device(); }
  absl::Status CheckRegions() const override { return workers_->CheckRegions(); }
  absl::Status CheckDeviceSessions() const override { return workers_->CheckDeviceSessions(); }
  absl::Status Start(GroupObserver* observer) override { return workers_->Start(observer); }
  void Submit(std::shared_ptr<const worker::Command> command, Done done) override {
    {
      const MutexLock lock(mutex_);
      if (closed_ && std::holds_alternative<worker::StepCommand>(command->body)) {
        held_.emplace_back(std::move(command), std::move(done));
        return;
      }
    }
    workers_->Submit(std::move(command), std::move(done));
  }
  std::vector<Member> members() const override { return workers_->members(); }
  void Stop() override {
    Open();
    workers_->Stop();
  }

  void Close() {
    const MutexLock lock(mutex_);
    closed_ = true;
  }
  size_t held() const {
    const MutexLock lock(mutex_);
    return held_.size();
  }
  void Open() {
    std::vector<std::pair<std::shared_ptr<const worker::Command>, Done>> held;
    {
      const MutexLock lock(mutex_);
      closed_ = false;
      held.swap(held_);
    }
    for (auto& [command, done] : held) workers_->Submit(std::move(command), std::move(done));
  }

 private:
  const std::unique_ptr<WorkerGroup> workers_;
  mutable Mutex mutex_;
  bool closed_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  std::vector<std::pair<std::shared_ptr<const worker::Command>, Done>> held_
      TRIBUTARY_GUARDED_BY(mutex_);
};

// Workers that get their tensors in messages.
class SendingGroup final : public FakeGroup {
 public:
  SendingGroup() : FakeGroup(2) {}
  bool sends_tensors() const override { return true; }
};

class SharedMemoryTest : public ::testing::Test {
 protected:
  explicit SharedMemoryTest(std::vector<std::string> prefixes = {"/"})
      : service_({.workers = 2, .coordinator = {.shared_memory_prefixes = std::move(prefixes)}}) {}
  // Steps follow each other one by one, so that calls gather while one is kept back.
  explicit SharedMemoryTest(std::unique_ptr<WorkerGroup> group)
      : service_({.coordinator = {.pipeline_depth = 1, .shared_memory_prefixes = {"/"}}},
                 std::move(group)) {}

  grpc::Status Register(const std::string& name, const std::string& key, uint64_t offset,
                        uint64_t bytes) {
    v1::RegisterSharedMemoryRequest request;
    request.set_name(name);
    request.mutable_system()->set_key(key);
    request.mutable_system()->set_offset(offset);
    request.set_byte_size(bytes);
    v1::RegisterSharedMemoryReply reply;
    grpc::ClientContext context;
    return service_.stub().RegisterSharedMemory(&context, request, &reply);
  }
  grpc::Status Unregister(const std::string& name) {
    v1::UnregisterSharedMemoryRequest request;
    request.set_name(name);
    v1::UnregisterSharedMemoryReply reply;
    grpc::ClientContext context;
    return service_.stub().UnregisterSharedMemory(&context, request, &reply);
  }
  // The same tensor by reference; its bytes go to the object.
  v1::Tensor Moved(const v1::Tensor& tensor, const SharedObject& object, const std::string& region,
                   uint64_t offset, uint64_t region_offset) {
    std::memcpy(object.data() + region_offset + offset, tensor.inline_().data(),
                tensor.inline_().size());
    v1::Tensor moved = tensor;
    moved.mutable_shared_memory()->set_region(region);
    moved.mutable_shared_memory()->set_offset(offset);
    return moved;
  }

  const v1::CacheSpec spec_ = SmallSpec();
  TestService service_;
};

// A host cuts its object short after its call was checked, and before the workers read it.
class CutShortTest : public SharedMemoryTest {
 protected:
  CutShortTest() : CutShortTest(new GatedGroup) {}
  ~CutShortTest() override { gate_.Open(); }

  void SetUp() override {
    ASSERT_TRUE(Register("r", object_.key(), 0, 1 << 20).ok());
    ASSERT_TRUE(CreateCache(service_.stub(), "m", spec_).ok());
    for (uint64_t id = 1; id <= 3; ++id) ASSERT_TRUE(Open(service_.stub(), "m", id).ok());
    gate_.Close();
  }
  // Five tokens of a sequence, with values that are the same for all of them.
  v1::AttendRequest Inline(uint64_t sequence) { return AttendOf(spec_, "m", sequence, 0, 5); }
  v1::AttendRequest Shared(uint64_t sequence) {
    v1::AttendRequest request = Inline(sequence);
    *request.mutable_q() = Moved(request.q(), object_, "r", 0, 0);
    *request.mutable_k() = Moved(request.k(), object_, "r", 100'000, 0);
    *request.mutable_v() = Moved(request.v(), object_, "r", 200'000, 0);
    return request;
  }
  struct Answer {
    grpc::Status status;
    v1::AttendReply reply;
  };
  std::future<Answer> Send(const v1::AttendRequest& request) {
    return std::async(std::launch::async, [this, request] {
      Answer answer;
      answer.status = Attend(service_.stub(), request, &answer.reply);
      return answer;
    });
  }
  template <typename Condition>
  static void Await(const Condition& condition) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!condition() && std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    ASSERT_TRUE(condition());
  }
  void CutShort() { ASSERT_EQ(truncate(("/dev/shm" + object_.key()).c_str(), 0), 0); }

  SharedObject object_{1 << 20};
  GatedGroup& gate_;

 private:
  explicit CutShortTest(GatedGroup* group)
      : SharedMemoryTest(std::unique_ptr<WorkerGroup>(group)), gate_(*group) {}
};

TEST_F(CutShortTest, WorkersThatReadItGoOnAndTheCallFails) {
  const v1::AttendRequest later = Shared(3);
  auto call = Send(Shared(2));
  Await([&] { return gate_.held() == 1; });
  CutShort();
  gate_.Open();
  const Answer failed = call.get();
  EXPECT_EQ(failed.status.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(FieldOf(failed.status), "q.shared_memory.region");
  // Nothing of it is held, and the region is of no use any more.
  EXPECT_EQ(FieldOf(Send(later).get().status), "q.shared_memory.region");
  const Answer fresh = Send(Inline(3)).get();
  const Answer repeated = Send(Inline(2)).get();
  ASSERT_TRUE(repeated.status.ok()) << repeated.status.error_message();
  EXPECT_EQ(repeated.reply.lengths(0), 5);
  EXPECT_EQ(repeated.reply.output().inline_(), fresh.reply.output().inline_());
}

TEST_F(CutShortTest, ACallThatSharesTheStepIsDone) {
  auto first = Send(Inline(1));
  Await([&] { return gate_.held() == 1; });
  auto hostile = Send(Shared(2));
  auto honest = Send(Inline(3));
  Await([&] { return service_.coordinator().TakeSnapshot().calls_queued == 2; });
  CutShort();
  gate_.Open();
  EXPECT_EQ(FieldOf(hostile.get().status), "q.shared_memory.region");
  const Answer expected = first.get(), answer = honest.get();
  ASSERT_TRUE(answer.status.ok()) << answer.status.error_message();
  EXPECT_EQ(answer.reply.output().inline_(), expected.reply.output().inline_());
}

TEST_F(CutShortTest, AResultThatHasNoPlaceAnyMoreFailsItsCallAlone) {
  v1::AttendRequest request = Inline(2);
  request.mutable_output()->set_dtype(v1::DTYPE_F32);
  for (const int64_t extent : {5, 4, 64}) request.mutable_output()->add_shape(extent);
  request.mutable_output()->mutable_shared_memory()->set_region("r");
  auto call = Send(request);
  Await([&] { return gate_.held() == 1; });
  CutShort();
  gate_.Open();
  EXPECT_EQ(FieldOf(call.get().status), "output.shared_memory.region");
  const Answer repeated = Send(Inline(2)).get();
  ASSERT_TRUE(repeated.status.ok()) << repeated.status.error_message();
  EXPECT_EQ(repeated.reply.output().inline_(), Send(Inline(3)).get().reply.output().inline_());
}

// A system call that meets a missing page fails, and with it the connection to the worker.
TEST(SharedMemoryForWorkerProcessesTest, IsCopiedBeforeItIsSent) {
  auto owned = std::make_unique<SendingGroup>();
  SendingGroup& group = *owned;
  TestService service({.coordinator = {.shared_memory_prefixes = {"/"}}}, std::move(owned));
  SharedObject object(4096);
  v1::RegisterSharedMemoryRequest registration;
  registration.set_name("r");
  registration.mutable_system()->set_key(object.key());
  registration.set_byte_size(4096);
  v1::RegisterSharedMemoryReply registered;
  grpc::ClientContext context;
  ASSERT_TRUE(service.stub().RegisterSharedMemory(&context, registration, &registered).ok());
  ASSERT_TRUE(CreateCache(service.stub(), "m", SmallSpec()).ok());
  ASSERT_TRUE(Open(service.stub(), "m", 1).ok());
  v1::AttendRequest request = AttendOf(SmallSpec(), "m", 1, 0, 1);
  const std::string q = request.q().inline_();
  std::memcpy(object.data(), q.data(), q.size());
  request.mutable_q()->mutable_shared_memory()->set_region("r");
  v1::AttendReply reply;
  ASSERT_TRUE(Attend(service.stub(), request, &reply).ok());
  std::memset(object.data(), 0, 4096);
  const auto commands = group.commands();
  const auto& step = std::get<worker::StepCommand>(commands.back()->body);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(step.q.data), step.q.bytes), q);
}

class AllowedNamesTest : public SharedMemoryTest {
 protected:
  AllowedNamesTest() : SharedMemoryTest({"/of-nobody-", "/tributary-test-"}) {}
};

// An object that was only given a size has no pages yet. When the machine has none left, the
// process that touches one first is killed.
TEST_F(SharedMemoryTest, AnObjectThatTheMachineHasNoMemoryForIsRefused) {
  struct statvfs filesystem {};
  ASSERT_EQ(statvfs("/dev/shm", &filesystem), 0);
  const size_t most = size_t{filesystem.f_blocks} * filesystem.f_frsize;
  if (most == 0) GTEST_SKIP() << "/dev/shm has no limit";
  SharedObject object(2 * most);
  const grpc::Status status = Register("r", object.key(), 0, 2 * most);
  EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
  EXPECT_EQ(FieldOf(status), "byte_size");
  EXPECT_EQ(Unregister("r").error_code(), StatusCode::NOT_FOUND);
  EXPECT_EQ(object.BytesHeld(), 0u) << "a refusal takes nothing";
  EXPECT_TRUE(Register("r", object.key(), 0, 4096).ok()) << "what there is memory for";
}

TEST_F(SharedMemoryTest, ResultsAreTheSameAsInline) {
  SharedObject object(1 << 20);
  ASSERT_TRUE(Register("r", object.key(), 64, (1 << 20) - 64).ok());
  ASSERT_TRUE(CreateCache(service_.stub(), "m", spec_).ok());
  for (uint64_t id = 1; id <= 2; ++id) ASSERT_TRUE(Open(service_.stub(), "m", id).ok());
  v1::AttendRequest request = AttendOf(spec_, "m", 1, 0, 5);
  request.set_return_lse(true);
  v1::AttendReply inline_reply;
  ASSERT_TRUE(Attend(service_.stub(), request, &inline_reply).ok());

  request.mutable_entries(0)->set_sequence_id(2);
  *request.mutable_q() = Moved(request.q(), object, "r", 0, 64);
  *request.mutable_k() = Moved(request.k(), object, "r", 100'000, 64);
  *request.mutable_v() = Moved(request.v(), object, "r", 200'000, 64);
  v1::Tensor* output = request.mutable_output();
  output->set_dtype(v1::DTYPE_F32);
  for (const int64_t extent : {5, 4, 64}) output->add_shape(extent);
  output->mutable_shared_memory()->set_region("r");
  output->mutable_shared_memory()->set_offset(300'000);
  v1::Tensor* lse = request.mutable_lse();
  lse->set_dtype(v1::DTYPE_F32);
  for (const int64_t extent : {5, 4}) lse->add_shape(extent);
  lse->mutable_shared_memory()->set_region("r");
  lse->mutable_shared_memory()->set_offset(400'000);
  v1::AttendReply reply;
  const grpc::Status status = Attend(service_.stub(), request, &reply);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_FALSE(reply.output().has_inline_());
  EXPECT_EQ(reply.output().shared_memory().offset(), 300'000u);
  const auto& expected = inline_reply.output().inline_();
  EXPECT_EQ(std::string(object.data() + 64 + 300'000, expected.size()), expected);
  const auto& expected_lse = inline_reply.lse().inline_();
  EXPECT_EQ(std::string(object.data() + 64 + 400'000, expected_lse.size()), expected_lse);

  // The replay compares what lies in the region now.
  ASSERT_TRUE(Attend(service_.stub(), request, &reply).ok());
  object.data()[64 + 100'003] ^= 0x40;
  EXPECT_EQ(Attend(service_.stub(), request, &reply).error_code(), StatusCode::ALREADY_EXISTS);
}

TEST_F(SharedMemoryTest, ReferencesOutsideTheRegionAreRefused) {
  SharedObject object(1 << 16);
  ASSERT_TRUE(Register("r", object.key(), 0, 1 << 16).ok());
  ASSERT_TRUE(CreateCache(service_.stub(), "m", spec_).ok());
  ASSERT_TRUE(Open(service_.stub(), "m", 1).ok());
  const auto refused = [&](uint64_t offset) {
    v1::AttendRequest request = AttendOf(spec_, "m", 1, 0, 1);
    request.mutable_q()->mutable_shared_memory()->set_region("r");
    request.mutable_q()->mutable_shared_memory()->set_offset(offset);
    v1::AttendReply reply;
    const grpc::Status status = Attend(service_.stub(), request, &reply);
    EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT) << offset;
    return FieldOf(status);
  };
  EXPECT_EQ(refused(65'536), "q.shared_memory.offset");
  EXPECT_EQ(refused(65'536 - 1023), "q.shared_memory.offset");
  EXPECT_EQ(refused(UINT64_MAX - 3), "q.shared_memory.offset");
  EXPECT_EQ(refused(2), "q.shared_memory.offset") << "not a multiple of 4";
}

TEST_F(SharedMemoryTest, RegistrationIsRepeatableCheckedAndUndone) {
  SharedObject object(8192);
  EXPECT_TRUE(Register("r", object.key(), 0, 8192).ok());
  EXPECT_TRUE(Register("r", object.key(), 0, 8192).ok());
  EXPECT_EQ(Register("r", object.key(), 0, 4096).error_code(), StatusCode::ALREADY_EXISTS);
  const auto refused = [&](StatusCode code, const std::string& field, const grpc::Status& status) {
    EXPECT_EQ(status.error_code(), code) << status.error_message();
    EXPECT_EQ(FieldOf(status), field);
  };
  refused(StatusCode::INVALID_ARGUMENT, "byte_size", Register("s", object.key(), 1, 8192));
  refused(StatusCode::INVALID_ARGUMENT, "byte_size", Register("s", object.key(), 0, 0));
  refused(StatusCode::INVALID_ARGUMENT, "system.offset",
          Register("s", object.key(), UINT64_MAX, 2));
  refused(StatusCode::INVALID_ARGUMENT, "byte_size",
          Register("s", object.key(), UINT64_MAX - 1, 1));
  refused(StatusCode::NOT_FOUND, "system.key", Register("s", "/tributary-no-such-object", 0, 1));
  refused(StatusCode::INVALID_ARGUMENT, "system.key", Register("s", "no-slash", 0, 1));
  refused(StatusCode::INVALID_ARGUMENT, "system.key", Register("s", "/../etc/passwd", 0, 1));
  refused(StatusCode::INVALID_ARGUMENT, "name", Register("", object.key(), 0, 1));
  EXPECT_TRUE(Unregister("r").ok());
  refused(StatusCode::NOT_FOUND, "name", Unregister("r"));
}

TEST_F(AllowedNamesTest, OtherObjectsAreNotOpened) {
  SharedObject object(4096);
  EXPECT_TRUE(Register("r", object.key(), 0, 4096).ok());
  const auto refused = [&](StatusCode code, const std::string& key) {
    const grpc::Status status = Register("s", key, 0, 4096);
    EXPECT_EQ(status.error_code(), code) << key << ": " << status.error_message();
    EXPECT_EQ(FieldOf(status), "system.key") << key;
  };
  // It is there, and this process may open it.
  const std::string foreign = "/foreign-" + std::to_string(getpid());
  const int fd = shm_open(foreign.c_str(), O_CREAT | O_EXCL | O_RDWR, 0600);
  ASSERT_GE(fd, 0);
  EXPECT_EQ(ftruncate(fd, 4096), 0);
  close(fd);
  refused(StatusCode::PERMISSION_DENIED, foreign);
  refused(StatusCode::PERMISSION_DENIED, "/no-such-object");  // whether it is there is not told
  refused(StatusCode::PERMISSION_DENIED, "/tributary-tes");
  refused(StatusCode::INVALID_ARGUMENT, "/tributary-test-/../foreign");
  // A link that leads out is not followed.
  const std::string link = "/tributary-test-link-" + std::to_string(getpid());
  ASSERT_EQ(symlink(("/dev/shm" + foreign).c_str(), ("/dev/shm" + link).c_str()), 0);
  refused(StatusCode::INVALID_ARGUMENT, link);
  EXPECT_EQ(shm_unlink(link.c_str()), 0);
  EXPECT_EQ(shm_unlink(foreign.c_str()), 0);
}

// Nobody is asked who owns an object, so hosts name none unless the operator lets them.
TEST(SharedMemoryByNameTest, IsOffUnlessTheOperatorAllowsIt) {
  TestService service({.workers = 1});
  SharedObject object(4096);
  v1::RegisterSharedMemoryRequest request;
  request.set_name("r");
  request.mutable_system()->set_key(object.key());
  request.set_byte_size(4096);
  v1::RegisterSharedMemoryReply reply;
  grpc::ClientContext context;
  const grpc::Status status = service.stub().RegisterSharedMemory(&context, request, &reply);
  EXPECT_EQ(status.error_code(), StatusCode::PERMISSION_DENIED) << status.error_message();
  EXPECT_EQ(FieldOf(status), "system.key");
  EXPECT_NE(status.error_message().find("--shared_memory_prefixes"), std::string::npos);
}

TEST_F(SharedMemoryTest, RegionsOfTheDeadAreForgottenBeforeLong) {
  SharedObject alive(4096), dead(4096), unlocked(4096);
  alive.Lock();
  dead.Lock();
  EXPECT_TRUE(Register("alive", alive.key(), 0, 4096).ok());
  EXPECT_TRUE(Register("dead", dead.key(), 0, 4096).ok());
  EXPECT_TRUE(Register("unlocked", unlocked.key(), 0, 4096).ok());
  EXPECT_EQ(MappingsOf(dead), 2) << "the test's own and the service's";
  dead.Die();
  EXPECT_TRUE(test::Eventually(std::chrono::seconds(60), [&] { return MappingsOf(dead) == 1; }));
  EXPECT_EQ(Unregister("dead").error_code(), StatusCode::NOT_FOUND);
  for (const char* kept : {"alive", "unlocked"}) EXPECT_TRUE(Unregister(kept).ok()) << kept;
}

TEST_F(SharedMemoryTest, AnObjectCutShortIsNoticed) {
  SharedObject object(1 << 16);
  ASSERT_TRUE(Register("r", object.key(), 0, 1 << 16).ok());
  ASSERT_TRUE(CreateCache(service_.stub(), "m", spec_).ok());
  ASSERT_TRUE(Open(service_.stub(), "m", 1).ok());
  ASSERT_EQ(truncate(("/dev/shm" + object.key()).c_str(), 4096), 0);
  v1::AttendRequest request = AttendOf(spec_, "m", 1, 0, 1);
  request.mutable_q()->mutable_shared_memory()->set_region("r");
  request.mutable_q()->mutable_shared_memory()->set_offset(32'768);
  v1::AttendReply reply;
  EXPECT_EQ(FieldOf(Attend(service_.stub(), request, &reply)), "q.shared_memory.region");
}

}  // namespace
}  // namespace tributary::service::testing
