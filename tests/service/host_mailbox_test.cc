// Mailboxes in shared memory, as the service makes them.
#include "service/data/host_mailbox.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstddef>

namespace tributary::service {
namespace {

using ::testing::HasSubstr;

constexpr size_t kMiB = size_t{1} << 20;

mailbox::Layout Of(size_t slot_bytes) { return mailbox::LayOut(/*slots=*/1, {.q = slot_bytes}); }

TEST(HostMailboxTest, IsSealedAndBackedByMemory) {
  const auto mailbox = HostMailbox::Create(Of(kMiB));
  ASSERT_TRUE(mailbox.ok()) << mailbox.status();
  const int file = (*mailbox)->descriptor();
  struct stat status {};
  ASSERT_EQ(fstat(file, &status), 0);
  EXPECT_EQ(status.st_size, (*mailbox)->layout().bytes);
  EXPECT_GE(status.st_blocks * 512, status.st_size);
  EXPECT_EQ(fcntl(file, F_GET_SEALS), F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
}

TEST(HostMailboxTest, TheMachinesMemoryIsAskedForBeforeEachPiece) {
  const auto refused = HostMailbox::Create(Of(300 * kMiB), {}, [] { return 300 * kMiB; });
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(refused.status().message(), HasSubstr("bytes are left on the machine"));
  // Somebody else takes memory meanwhile.
  int asked = 0;
  const auto outrun = HostMailbox::Create(
      Of(300 * kMiB), {}, [&asked] { return ++asked <= 2 ? 1024 * kMiB : 80 * kMiB; });
  EXPECT_EQ(outrun.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(asked, 3) << "in all, for the first piece and for the second";
}

}  // namespace
}  // namespace tributary::service
