// Memory of GPUs that clients register: what is refused, what workers are told and when. The
// workers are fakes that say they have GPUs; tests/multi_gpu has real ones.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <future>
#include <string>
#include <thread>
#include <vector>

#include "base/status/errors.h"
#include "service/client/client.h"
#include "tests/service/fake_group.h"
#include "tests/service/test_service.h"

namespace tributary::service::testing {
namespace {

using ::grpc::StatusCode;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

v1::RegisterSharedMemoryRequest Registration(const std::string& name) {
  v1::RegisterSharedMemoryRequest request;
  request.set_name(name);
  request.set_byte_size(1 << 20);
  request.mutable_cuda_ipc()->set_raw_handle(std::string(64, 'h'));
  request.mutable_cuda_ipc()->set_device_uuid("GPU-01234567-89ab-cdef-0123-456789abcdef");
  request.mutable_cuda_ipc()->set_offset(512);
  return request;
}

grpc::Status Register(v1::AttentionService::Stub& stub,
                      const v1::RegisterSharedMemoryRequest& request) {
  v1::RegisterSharedMemoryReply reply;
  grpc::ClientContext context;
  return stub.RegisterSharedMemory(&context, request, &reply);
}

grpc::Status Unregister(v1::AttentionService::Stub& stub, const std::string& name) {
  v1::UnregisterSharedMemoryRequest request;
  request.set_name(name);
  v1::UnregisterSharedMemoryReply reply;
  grpc::ClientContext context;
  return stub.UnregisterSharedMemory(&context, request, &reply);
}

void ExpectRefused(StatusCode code, const std::string& field, const grpc::Status& status) {
  EXPECT_EQ(status.error_code(), code) << status.error_message();
  EXPECT_EQ(FieldOf(status), field) << status.error_message();
}

TEST(DeviceRegionRefusalTest, WorkersOnTheCpuTakeNone) {
  TestService service({.workers = 1});
  const grpc::Status status = Register(service.stub(), Registration("r"));
  ExpectRefused(StatusCode::FAILED_PRECONDITION, "cuda_ipc", status);
  EXPECT_THAT(status.error_message(), HasSubstr("the workers compute on the cpu"));
  ExpectRefused(StatusCode::NOT_FOUND, "name", Unregister(service.stub(), "r"));
}

class DeviceRegionTest : public ::testing::Test {
 protected:
  explicit DeviceRegionTest(std::vector<std::string> prefixes = {})
      : service_({.coordinator = {.shared_memory_prefixes = std::move(prefixes)}},
                 std::unique_ptr<WorkerGroup>(group_)) {
    spec_ = SmallSpec();
    EXPECT_TRUE(CreateCache(stub(), "m", spec_).ok());
    for (uint64_t id = 1; id <= 2; ++id) EXPECT_TRUE(Open(stub(), "m", id).ok());
  }

  v1::AttentionService::Stub& stub() { return service_.stub(); }

  v1::Tensor InRegion(const v1::Tensor& tensor, uint64_t offset, const std::string& region = "r") {
    v1::Tensor moved = tensor;
    moved.mutable_shared_memory()->set_region(region);
    moved.mutable_shared_memory()->set_offset(offset);
    return moved;
  }
  // One token with its row; everything in region r, at `offset` of it.
  v1::AttendRequest Everything(uint64_t sequence, uint64_t offset = 0) {
    v1::AttendRequest request = AttendOf(spec_, "m", sequence, 0, 1);
    *request.mutable_q() = InRegion(request.q(), offset);
    *request.mutable_k() = InRegion(request.k(), offset + 1024);
    *request.mutable_v() = InRegion(request.v(), offset + 2048);
    *request.mutable_output() = InRegion(request.q(), offset + 3072);
    request.mutable_output()->set_dtype(v1::DTYPE_BF16);
    request.set_return_lse(true);
    v1::Tensor lse;
    lse.set_dtype(v1::DTYPE_F32);
    lse.add_shape(1);
    lse.add_shape(4);
    *request.mutable_lse() = InRegion(lse, offset + 4096);
    return request;
  }
  std::future<grpc::Status> AttendLater(const v1::AttendRequest& request) {
    return std::async(std::launch::async, [this, request] {
      v1::AttendReply reply;
      return Attend(stub(), request, &reply);
    });
  }

  // Until no call finds region r.
  void WaitForgotten() {
    v1::AttendRequest request = Everything(2);
    request.mutable_q()->mutable_shared_memory()->set_offset(1);  // refused either way
    v1::AttendReply reply;
    while (Attend(stub(), request, &reply).error_code() != StatusCode::NOT_FOUND) {
      std::this_thread::yield();
    }
  }

  template <typename Body>
  std::vector<Body> Told() const {
    std::vector<Body> told;
    for (const auto& command : group_->commands()) {
      if (const auto* body = std::get_if<Body>(&command->body)) told.push_back(*body);
    }
    return told;
  }

  FakeGroup* group_ = new FakeGroup(2, /*record=*/true, worker::Device::kCuda);
  v1::CacheSpec spec_;
  TestService service_;
};

TEST_F(DeviceRegionTest, RegistrationIsRepeatableCheckedAndUndone) {
  ASSERT_TRUE(Register(stub(), Registration("r")).ok());
  ASSERT_TRUE(Register(stub(), Registration("r")).ok());
  const auto opened = Told<worker::OpenRegionCommand>();
  ASSERT_THAT(opened, SizeIs(1)) << "the repetition needs no worker";
  EXPECT_EQ(opened[0].memory.handle, std::string(64, 'h'));
  EXPECT_EQ(opened[0].memory.offset, 512u);
  EXPECT_EQ(opened[0].memory.bytes, 1u << 20);

  const auto spoiled = [](const auto& spoil) {
    v1::RegisterSharedMemoryRequest request = Registration("s");
    spoil(request);
    return request;
  };
  using Request = v1::RegisterSharedMemoryRequest&;
  const auto refused = [&](StatusCode code, const std::string& field, const auto& spoil) {
    ExpectRefused(code, field, Register(stub(), spoiled(spoil)));
  };
  refused(StatusCode::INVALID_ARGUMENT, "cuda_ipc.raw_handle",
          [](Request r) { r.mutable_cuda_ipc()->set_raw_handle("x"); });
  refused(StatusCode::INVALID_ARGUMENT, "cuda_ipc.device_uuid",
          [](Request r) { r.mutable_cuda_ipc()->set_device_uuid("0"); });
  refused(StatusCode::INVALID_ARGUMENT, "cuda_ipc.offset",
          [](Request r) { r.mutable_cuda_ipc()->set_offset(8); });
  refused(StatusCode::INVALID_ARGUMENT, "cuda_ipc.offset",
          [](Request r) { r.mutable_cuda_ipc()->set_offset(UINT64_MAX - 15); });
  refused(StatusCode::INVALID_ARGUMENT, "byte_size", [](Request r) { r.set_byte_size(0); });
  refused(StatusCode::INVALID_ARGUMENT, "name", [](Request r) { r.set_name("no/slash"); });
  refused(StatusCode::ALREADY_EXISTS, "name", [](Request r) {
    r.set_name("r");
    r.set_byte_size(4096);
  });
  refused(StatusCode::INVALID_ARGUMENT, "cuda_ipc.owner_key",
          [](Request r) { r.mutable_cuda_ipc()->set_owner_key("no-slash"); });
  refused(StatusCode::NOT_FOUND, "cuda_ipc.owner_key",
          [](Request r) { r.mutable_cuda_ipc()->set_owner_key("/tributary-no-such-object"); });
  EXPECT_THAT(Told<worker::OpenRegionCommand>(), SizeIs(1));

  EXPECT_TRUE(Unregister(stub(), "r").ok());
  ASSERT_THAT(Told<worker::CloseRegionCommand>(), SizeIs(1));
  EXPECT_EQ(Told<worker::CloseRegionCommand>()[0].region, opened[0].region);
  ExpectRefused(StatusCode::NOT_FOUND, "name", Unregister(stub(), "r"));
  // Again is another region.
  ASSERT_TRUE(Register(stub(), Registration("r")).ok());
  EXPECT_NE(Told<worker::OpenRegionCommand>().back().region, opened[0].region);
}

TEST_F(DeviceRegionTest, WhatAWorkerRefusesIsNotThere) {
  group_->AnswerOpenRegion(InvalidField("cuda_ipc.raw_handle", "of nobody"));
  ExpectRefused(StatusCode::INVALID_ARGUMENT, "cuda_ipc.raw_handle",
                Register(stub(), Registration("r")));
  EXPECT_THAT(Told<worker::CloseRegionCommand>(), SizeIs(1)) << "the other rank has opened it";
  v1::AttendReply reply;
  ExpectRefused(StatusCode::NOT_FOUND, "q.shared_memory.region",
                Attend(stub(), Everything(1), &reply));
  group_->AnswerOpenRegion(absl::OkStatus());
  EXPECT_TRUE(Register(stub(), Registration("r")).ok());
}

TEST_F(DeviceRegionTest, StepsSayWhereTensorsLie) {
  ASSERT_TRUE(Register(stub(), Registration("r")).ok());
  const worker::RegionId region = Told<worker::OpenRegionCommand>()[0].region;
  v1::AttendReply reply;
  const grpc::Status status = Attend(stub(), Everything(1, 16), &reply);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(reply.output().shared_memory().offset(), 16u + 3072);
  EXPECT_EQ(reply.output().dtype(), v1::DTYPE_BF16);
  EXPECT_EQ(reply.lse().shared_memory().offset(), 16u + 4096);

  const worker::StepCommand step = Told<worker::StepCommand>().back();
  using Part = worker::RegionPart;
  EXPECT_THAT(step.q.parts, ElementsAre(Part{region, 16, 1024}));
  EXPECT_THAT(step.k.parts, ElementsAre(Part{region, 16 + 1024, 512}));
  EXPECT_THAT(step.v.parts, ElementsAre(Part{region, 16 + 2048, 512}));
  EXPECT_EQ(step.q.data, nullptr);
  ASSERT_THAT(step.outputs, SizeIs(1));
  EXPECT_EQ(step.outputs[0].rows, 1);
  EXPECT_EQ(step.outputs[0].format.dtype, DType::kBf16);
  EXPECT_EQ(step.outputs[0].o.part, (Part{region, 16 + 3072, 512}));
  EXPECT_EQ(step.outputs[0].lse.part, (Part{region, 16 + 4096, 16}));
  EXPECT_FALSE(step.outputs[0].o.on_host());
  EXPECT_FALSE(step.outputs[0].lse.on_host());

  // In a quantised type, with its scale.
  v1::AttendRequest quantised = Everything(2, 32);
  quantised.mutable_output()->set_dtype(v1::DTYPE_NVFP4);
  quantised.set_o_scale(0.5f);
  ASSERT_TRUE(Attend(stub(), quantised, &reply).ok());
  const worker::StepOutput output = Told<worker::StepCommand>().back().outputs[0];
  EXPECT_EQ(output.format.dtype, DType::kNvfp4);
  EXPECT_EQ(output.format.scale, 0.5f);
  EXPECT_EQ(output.o.part.bytes, 144u);

  // The output there, the LSE in the reply.
  v1::AttendRequest request = Everything(2);
  request.clear_lse();
  ASSERT_TRUE(Attend(stub(), request, &reply).ok());
  EXPECT_FALSE(Told<worker::StepCommand>().back().outputs[0].o.in_reply);
  EXPECT_TRUE(Told<worker::StepCommand>().back().outputs[0].lse.in_reply);
  EXPECT_FALSE(Told<worker::StepCommand>().back().outputs[0].lse.in_region());
  EXPECT_EQ(reply.lse().inline_().size(), 16u);
}

TEST_F(DeviceRegionTest, ReferencesOutsideTheRegionAreRefused) {
  ASSERT_TRUE(Register(stub(), Registration("r")).ok());
  const auto refused = [&](const auto& spoil) {
    v1::AttendRequest request = Everything(1);
    spoil(request);
    v1::AttendReply reply;
    const grpc::Status status = Attend(stub(), request, &reply);
    EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT) << status.error_message();
    return FieldOf(status);
  };
  using Request = v1::AttendRequest&;
  const auto at = [](v1::Tensor* tensor, uint64_t offset) {
    tensor->mutable_shared_memory()->set_offset(offset);
  };
  EXPECT_EQ(refused([&](Request r) { at(r.mutable_q(), (1 << 20) - 1008); }),
            "q.shared_memory.offset");
  EXPECT_EQ(refused([&](Request r) { at(r.mutable_k(), 8); }), "k.shared_memory.offset");
  EXPECT_EQ(refused([&](Request r) { at(r.mutable_output(), UINT64_MAX - 15); }),
            "output.shared_memory.offset");
  EXPECT_EQ(refused([&](Request r) { at(r.mutable_lse(), 1 << 20); }), "lse.shared_memory.offset");
  EXPECT_THAT(Told<worker::StepCommand>(), IsEmpty());
}

TEST_F(DeviceRegionTest, CallsThatShareAStepKeepTheirPlaces) {
  ASSERT_TRUE(Register(stub(), Registration("r")).ok());
  ASSERT_TRUE(Open(stub(), "m", 3).ok());
  ASSERT_TRUE(Open(stub(), "m", 4).ok());
  group_->Hold();
  // Two steps fill the pipeline, so that the others wait and are batched.
  auto first = AttendLater(Everything(1));
  group_->WaitForHeld(1);
  auto second = AttendLater(Everything(2, 8192));
  group_->WaitForHeld(2);
  auto third = AttendLater(Everything(3, 16384));
  auto fourth = AttendLater(Everything(4, 32768));
  while (service_.coordinator().TakeSnapshot().calls_queued < 2) std::this_thread::yield();
  group_->Release();
  for (auto* call : {&first, &second, &third, &fourth}) EXPECT_TRUE(call->get().ok());
  const worker::StepCommand both = Told<worker::StepCommand>().back();
  ASSERT_THAT(both.outputs, SizeIs(2));
  ASSERT_THAT(both.q.parts, SizeIs(2));
  EXPECT_EQ(both.q.bytes, 2048u);
  for (int i = 0; i < 2; ++i) {
    const uint64_t base = both.entries[i].sequence == 3 ? 16384 : 32768;
    EXPECT_EQ(both.q.parts[i].offset, base);
    EXPECT_EQ(both.v.parts[i].offset, base + 2048);
    EXPECT_EQ(both.outputs[i].o.part.offset, base + 3072);
  }
}

TEST_F(DeviceRegionTest, WhoWantsItsLseInTheReplyGetsItFromAStepOfOthersToo) {
  ASSERT_TRUE(Register(stub(), Registration("r")).ok());
  ASSERT_TRUE(Open(stub(), "m", 3).ok());
  ASSERT_TRUE(Open(stub(), "m", 4).ok());
  const auto queued = [&](uint64_t count) {
    while (service_.coordinator().TakeSnapshot().calls_queued < count) std::this_thread::yield();
  };
  group_->Hold();
  auto first = AttendLater(Everything(1));
  group_->WaitForHeld(1);
  auto second = AttendLater(Everything(2, 8192));
  group_->WaitForHeld(2);
  v1::AttendRequest without = Everything(3, 16384);
  without.clear_lse();
  without.set_return_lse(false);
  auto third = AttendLater(without);
  queued(1);
  v1::AttendRequest inline_lse = Everything(4, 32768);
  inline_lse.clear_lse();
  v1::AttendReply reply;
  auto fourth = std::async(std::launch::async, [&] { return Attend(stub(), inline_lse, &reply); });
  queued(2);
  group_->Release();
  for (auto* call : {&first, &second, &third, &fourth}) EXPECT_TRUE(call->get().ok());
  EXPECT_EQ(Told<worker::StepCommand>().back().entries.size(), 2u);
  EXPECT_EQ(reply.lse().inline_().size(), 16u);
}

TEST_F(DeviceRegionTest, ARegionInUseIsClosedWhenItsLastCallIsThrough) {
  ASSERT_TRUE(Register(stub(), Registration("r")).ok());
  group_->Hold();
  auto attended = AttendLater(Everything(1));
  group_->WaitForHeld(1);
  auto unregistered = std::async(std::launch::async, [&] { return Unregister(stub(), "r"); });
  WaitForgotten();
  // It stays open as long as the call needs it.
  EXPECT_THAT(Told<worker::CloseRegionCommand>(), IsEmpty());
  group_->Release();
  EXPECT_TRUE(attended.get().ok());
  EXPECT_TRUE(unregistered.get().ok());
  EXPECT_THAT(Told<worker::CloseRegionCommand>(), SizeIs(1));
}

TEST_F(DeviceRegionTest, WhatABrokenGroupDidNotCloseIsClosedWhenItFormsAgain) {
  ASSERT_TRUE(Register(stub(), Registration("r")).ok());
  group_->Hold();
  auto attended = AttendLater(Everything(1));
  group_->WaitForHeld(1);
  auto unregistered = std::async(std::launch::async, [&] { return Unregister(stub(), "r"); });
  WaitForgotten();
  group_->Break("a rank died");
  EXPECT_EQ(attended.get().error_code(), StatusCode::ABORTED);
  service_.WaitNotReady();
  ExpectRefused(StatusCode::UNAVAILABLE, "", Register(stub(), Registration("s")));
  group_->Form({false, false});
  EXPECT_TRUE(unregistered.get().ok());
  service_.WaitReady();
  EXPECT_TRUE(Register(stub(), Registration("s")).ok()) << "nothing is left of the one refused";
}

// An object that somebody holds a lock on, until he dies.
class Owner {
 public:
  explicit Owner(std::string key) : key_(std::move(key)) {
    fd_ = shm_open(key_.c_str(), O_CREAT | O_EXCL | O_RDWR, 0600);
    EXPECT_GE(fd_, 0);
  }
  ~Owner() {
    Die();
    shm_unlink(key_.c_str());
  }
  void Lock() {
    struct flock lock {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    EXPECT_EQ(fcntl(fd_, F_OFD_SETLK, &lock), 0);
  }
  void Die() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
  }
  const std::string& key() const { return key_; }

 private:
  const std::string key_;
  int fd_ = -1;
};

TEST_F(DeviceRegionTest, RegionsOfTheDeadAreClosedWhenTheNextOneRegisters) {
  Owner owner("/tributary-test-owner-" + std::to_string(getpid()));
  v1::RegisterSharedMemoryRequest owned = Registration("owned");
  owned.mutable_cuda_ipc()->set_owner_key(owner.key());
  ExpectRefused(StatusCode::INVALID_ARGUMENT, "cuda_ipc.owner_key", Register(stub(), owned));
  owner.Lock();
  ASSERT_TRUE(Register(stub(), owned).ok());
  ASSERT_TRUE(Register(stub(), Registration("free")).ok());
  EXPECT_THAT(Told<worker::CloseRegionCommand>(), IsEmpty());
  owner.Die();
  ASSERT_TRUE(Register(stub(), Registration("next")).ok());
  EXPECT_THAT(Told<worker::CloseRegionCommand>(), SizeIs(1));
  ExpectRefused(StatusCode::NOT_FOUND, "name", Unregister(stub(), "owned"));
  for (const char* kept : {"free", "next"}) EXPECT_TRUE(Unregister(stub(), kept).ok()) << kept;
}

TEST_F(DeviceRegionTest, TheCppClientSharesAndNamesIt) {
  auto client = client::Client::Connect({.target = service_.address()});
  ASSERT_TRUE(client.ok()) << client.status();
  const auto at = [](uintptr_t offset) { return reinterpret_cast<void*>(0x7000'0000 + offset); };
  const auto region =
      (*client)->ShareDeviceMemory({.data = at(0),
                                    .bytes = 65536,
                                    .ipc_handle = std::string(64, 'c'),
                                    .offset = 4096,
                                    .gpu = "GPU-01234567-89ab-cdef-0123-456789abcdef"});
  ASSERT_TRUE(region.ok()) << region.status();
  EXPECT_EQ(Told<worker::OpenRegionCommand>().back().memory.offset, 4096u);
  client::AttendCall call;
  call.cache_id = "m";
  call.entries = {{1, 0, 1, 1}};
  call.q_heads = 4;
  call.kv_heads = 2;
  call.head_dim = 64;
  call.device = *region;
  call.q = at(0);
  call.k = at(1024);
  call.v = at(2048);
  call.output = at(4096);
  EXPECT_EQ((*client)->Attend(call), absl::OkStatus());
  const worker::StepCommand step = Told<worker::StepCommand>().back();
  EXPECT_EQ(step.v.parts.at(0).offset, 2048u);
  EXPECT_EQ(step.outputs.at(0).o.part.offset, 4096u);
  EXPECT_FALSE(step.outputs.at(0).lse.in_reply);
  EXPECT_EQ((*client)->UnshareDeviceMemory(**region), absl::OkStatus());
  const absl::Status unknown = (*client)->Attend(call);
  EXPECT_EQ(client::FieldOf(unknown), "q.shared_memory.region") << unknown;
  // Of a client that goes without a word.
  ASSERT_TRUE((*client)
                  ->ShareDeviceMemory({.data = at(0),
                                       .bytes = 65536,
                                       .ipc_handle = std::string(64, 'd'),
                                       .gpu = "GPU-01234567-89ab-cdef-0123-456789abcdef"})
                  .ok());
  EXPECT_THAT(Told<worker::CloseRegionCommand>(), SizeIs(1));
  client->reset();
  ASSERT_TRUE(Register(stub(), Registration("next")).ok());
  EXPECT_THAT(Told<worker::CloseRegionCommand>(), SizeIs(2));
}

class PrefixedDeviceRegionTest : public DeviceRegionTest {
 protected:
  PrefixedDeviceRegionTest() : DeviceRegionTest({"/tributary-allowed"}) {}
};

TEST_F(PrefixedDeviceRegionTest, OwnersKeysBeginAsKeysOfRegionsDo) {
  v1::RegisterSharedMemoryRequest owned = Registration("owned");
  owned.mutable_cuda_ipc()->set_owner_key("/somebody-elses");
  ExpectRefused(StatusCode::PERMISSION_DENIED, "cuda_ipc.owner_key", Register(stub(), owned));
  EXPECT_TRUE(Register(stub(), Registration("r")).ok());
}

}  // namespace
}  // namespace tributary::service::testing
