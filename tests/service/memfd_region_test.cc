// Memory that hosts hand over at the companion socket and register by its secret.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/rpc/descriptor.h"
#include "base/rpc/pass_descriptor.h"
#include "base/rpc/unix_address.h"
#include "service/client/hand_over.h"
#include "service/client/shared_region.h"
#include "service/data/memory_deposit.h"
#include "tests/service/test_service.h"

namespace tributary::service::testing {
namespace {

using client::HandOver;
using client::SharedRegion;
using ::grpc::StatusCode;

std::chrono::steady_clock::time_point Soon() {
  return std::chrono::steady_clock::now() + std::chrono::seconds(60);
}

Descriptor Memfd(size_t bytes, int seals) {
  Descriptor memory(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(ftruncate(memory.get(), static_cast<off_t>(bytes)), 0);
  if (seals != 0) {
    EXPECT_EQ(fcntl(memory.get(), F_ADD_SEALS, seals), 0);
  }
  return memory;
}

class MemfdRegionTest : public ::testing::Test {
 protected:
  std::string Path() const { return std::string(UnixPath(service_.address())); }
  std::string HandedOver(int memory) {
    const auto secret = HandOver(Path(), memory, Soon());
    EXPECT_TRUE(secret.ok()) << secret.status();
    return secret.ok() ? *secret : "";
  }
  grpc::Status Register(const std::string& name, const std::string& secret, uint64_t offset,
                        uint64_t bytes) {
    v1::RegisterSharedMemoryRequest request;
    request.set_name(name);
    request.mutable_memfd()->set_secret(secret);
    request.mutable_memfd()->set_offset(offset);
    request.set_byte_size(bytes);
    v1::RegisterSharedMemoryReply reply;
    grpc::ClientContext context;
    return service_.stub().RegisterSharedMemory(&context, request, &reply);
  }
  void Refused(const grpc::Status& status, StatusCode code, const std::string& field) {
    EXPECT_EQ(status.error_code(), code) << status.error_message();
    EXPECT_EQ(FieldOf(status), field);
  }

  TestService service_{{.workers = 2}};
};

TEST_F(MemfdRegionTest, ResultsAreTheSameAsInline) {
  const auto memory = SharedRegion::CreateSealed(1 << 16);
  ASSERT_TRUE(memory.ok()) << memory.status();
  ASSERT_TRUE(Register("r", HandedOver((*memory)->descriptor()), 64, (1 << 16) - 64).ok());
  const v1::CacheSpec spec = SmallSpec();
  ASSERT_TRUE(CreateCache(service_.stub(), "m", spec).ok());
  for (uint64_t id = 1; id <= 2; ++id) ASSERT_TRUE(Open(service_.stub(), "m", id).ok());
  v1::AttendRequest request = AttendOf(spec, "m", 1, 0, 5);
  v1::AttendReply expected;
  ASSERT_TRUE(Attend(service_.stub(), request, &expected).ok());

  request.mutable_entries(0)->set_sequence_id(2);
  std::memcpy((*memory)->data() + 64, request.q().inline_().data(), request.q().inline_().size());
  request.mutable_q()->mutable_shared_memory()->set_region("r");
  v1::Tensor* output = request.mutable_output();
  output->set_dtype(v1::DTYPE_F32);
  for (const int64_t extent : {5, 4, 64}) output->add_shape(extent);
  output->mutable_shared_memory()->set_region("r");
  output->mutable_shared_memory()->set_offset(32'768);
  v1::AttendReply reply;
  const grpc::Status status = Attend(service_.stub(), request, &reply);
  ASSERT_TRUE(status.ok()) << status.error_message();
  const std::string& bytes = expected.output().inline_();
  EXPECT_EQ(std::memcmp((*memory)->data() + 64 + 32'768, bytes.data(), bytes.size()), 0);
}

TEST_F(MemfdRegionTest, OnlyMemoryThatStaysAsLongAsItIsIsTaken) {
  const Descriptor open = Memfd(4096, 0);
  Refused(Register("r", HandedOver(open.get()), 0, 4096), StatusCode::INVALID_ARGUMENT,
          "memfd.secret");
  const Descriptor grown = Memfd(4096, F_SEAL_GROW);
  Refused(Register("r", HandedOver(grown.get()), 0, 4096), StatusCode::INVALID_ARGUMENT,
          "memfd.secret");
  const Descriptor read_only = Memfd(4096, F_SEAL_SHRINK | F_SEAL_WRITE);
  Refused(Register("r", HandedOver(read_only.get()), 0, 4096), StatusCode::INVALID_ARGUMENT,
          "memfd.secret");
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  Refused(Register("r", HandedOver(ends[0]), 0, 4096), StatusCode::INVALID_ARGUMENT,
          "memfd.secret");
  close(ends[0]);
  close(ends[1]);
  const Descriptor short_memory = Memfd(4096, F_SEAL_SHRINK);
  Refused(Register("r", HandedOver(short_memory.get()), 4095, 2), StatusCode::INVALID_ARGUMENT,
          "byte_size");
  Refused(Register("r", HandedOver(short_memory.get()), UINT64_MAX, 2),
          StatusCode::INVALID_ARGUMENT, "memfd.offset");
  EXPECT_TRUE(Register("r", HandedOver(short_memory.get()), 0, 4096).ok());
  EXPECT_NE(ftruncate(short_memory.get(), 0), 0) << "the seal holds";
}

TEST_F(MemfdRegionTest, ASecretIsGoodOnceAndARegistrationMayBeRepeated) {
  const Descriptor memory = Memfd(4096, F_SEAL_SHRINK);
  const std::string secret = HandedOver(memory.get());
  EXPECT_TRUE(Register("r", secret, 0, 4096).ok());
  EXPECT_TRUE(Register("r", secret, 0, 4096).ok());
  Refused(Register("s", secret, 0, 4096), StatusCode::NOT_FOUND, "memfd.secret");
  Refused(Register("s", "", 0, 4096), StatusCode::NOT_FOUND, "memfd.secret");
  Refused(Register("s", std::string(16, 'x'), 0, 4096), StatusCode::NOT_FOUND, "memfd.secret");
}

TEST_F(MemfdRegionTest, RegionsOfTheDeadAreForgotten) {
  auto memory = SharedRegion::CreateSealed(4096);
  ASSERT_TRUE(memory.ok()) << memory.status();
  const std::string secret = HandedOver((*memory)->descriptor());
  ASSERT_TRUE(Register("r", secret, 0, 4096).ok());
  memory->reset();  // as when the process ends
  // While the region is known, the same registration again is OK.
  EXPECT_TRUE(test::Eventually(std::chrono::seconds(60),
                               [&] { return !Register("r", secret, 0, 4096).ok(); }));
}

// Two descriptors at once, a descriptor with half a secret, and a connection that says nothing.
TEST_F(MemfdRegionTest, WhatIsNoHandingOverLeavesNothingBehind) {
  const Descriptor memory = Memfd(4096, F_SEAL_SHRINK);
  for (int i = 0; i < 300; ++i) {
    const auto connection = ConnectToUnix(CompanionSocketOf(Path()), 0);
    ASSERT_TRUE(connection.ok()) << connection.status();
    const Descriptor held(*connection);
    if (i % 2 == 0) {
      EXPECT_TRUE(SendWithDescriptor(held.get(), "half", memory.get()));
    }
  }
  EXPECT_TRUE(Register("r", HandedOver(memory.get()), 0, 4096).ok());
}

TEST(MemoryDepositTest, HoldsSoMuchOfEachUserAndForSoLong) {
  MemoryDeposit deposit;
  const auto now = MemoryDeposit::Clock::now();
  const auto memory = [] { return Memfd(1, 0); };
  ASSERT_TRUE(deposit.Put("other", memory(), 2, now));
  for (size_t i = 0; i <= MemoryDeposit::kMostOfUser; ++i) {
    EXPECT_TRUE(deposit.Put("mine" + std::to_string(i), memory(), 1, now));
  }
  EXPECT_FALSE(deposit.Take("mine0", now).open()) << "the oldest of the same user went";
  EXPECT_TRUE(deposit.Take("mine1", now).open());
  EXPECT_TRUE(deposit.Take("other", now).open());
  EXPECT_FALSE(deposit.Take("mine2", now + 2 * MemoryDeposit::kGoodFor).open());
  uid_t user = 10;
  size_t taken = 0;
  while (deposit.Put(std::to_string(user), memory(), user, now)) ++user, ++taken;
  EXPECT_LE(taken, MemoryDeposit::kMost);
}

}  // namespace
}  // namespace tributary::service::testing
