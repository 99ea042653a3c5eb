#include "service/client/shared_region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>

#include "gtest/gtest.h"

namespace tributary::client {
namespace {

// Asked as the service asks.
bool IsLocked(int file) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  EXPECT_EQ(fcntl(file, F_OFD_GETLK, &lock), 0);
  return lock.l_type != F_UNLCK;
}

TEST(SharedRegion, IsLockedForAsLongAsItLives) {
  auto region = SharedRegion::Create(4096);
  ASSERT_TRUE(region.ok()) << region.status();
  const int file = shm_open((*region)->key().c_str(), O_RDWR, 0);
  ASSERT_GE(file, 0);
  EXPECT_TRUE(IsLocked(file));
  (*region)->Unlink();
  EXPECT_TRUE(IsLocked(file)) << "the name is gone, the object is not";
  region->reset();
  EXPECT_FALSE(IsLocked(file));
  close(file);
}

TEST(SharedRegion, SealedMemoryIsLockedButNotByTheDescriptorThatIsHandedOver) {
  auto region = SharedRegion::CreateSealed(4096);
  ASSERT_TRUE(region.ok()) << region.status();
  const int file = dup((*region)->descriptor());  // the service's
  EXPECT_TRUE(IsLocked(file));
  EXPECT_NE(ftruncate(file, 0), 0) << "it is sealed";
  region->reset();
  EXPECT_FALSE(IsLocked(file)) << "the service would keep it alive by itself";
  close(file);
}

TEST(SharedRegion, LeavesNoNameBehind) {
  std::string key;
  {
    const auto region = SharedRegion::Create(4096);
    ASSERT_TRUE(region.ok()) << region.status();
    key = (*region)->key();
  }
  EXPECT_LT(shm_open(key.c_str(), O_RDWR, 0), 0);
}

}  // namespace
}  // namespace tributary::client
