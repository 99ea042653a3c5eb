// Callers through a Unix socket are known by the user that they run as.
#include <fcntl.h>
#include <grpcpp/create_channel_posix.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/rpc/descriptor.h"
#include "base/rpc/unix_address.h"
#include "service/access/peer.h"
#include "tests/service/test_service.h"

namespace tributary::service::testing {
namespace {

using ::grpc::StatusCode;

constexpr uid_t kSomebody = 4711;

// Connects on a thread that runs as the user, which no other thread of the process does.
Descriptor ConnectAs(uid_t user, const std::string& path) {
  Descriptor connection;
  std::thread([&] {
    // The system call itself: the library's function changes all threads.
    if (syscall(SYS_setresuid, -1, user, -1) != 0) return;
    const auto connected = ConnectToUnix(path, SOCK_NONBLOCK);
    if (connected.ok()) connection = Descriptor(*connected);
  }).join();
  return connection;
}

std::unique_ptr<v1::AttentionService::Stub> StubOver(Descriptor connection) {
  return v1::AttentionService::NewStub(
      grpc::CreateInsecureChannelFromFd("somebody", connection.Release()));
}

mode_t ModeOf(const std::string& path) {
  struct stat info {};
  EXPECT_EQ(stat(path.c_str(), &info), 0) << path;
  return info.st_mode & 07777;
}

TEST(UnixPeerTest, TheSocketHasTheModeThatIsStated) {
  const TestService service({.workers = 1});
  const std::string path(UnixPath(service.address()));
  EXPECT_EQ(ModeOf(path), 0600u);
  EXPECT_EQ(ModeOf(CompanionSocketOf(path)), 0600u);
  const TestService open({.workers = 1, .server = {.socket_mode = 0660}});
  const std::string shared(UnixPath(open.address()));
  EXPECT_EQ(ModeOf(shared), 0660u);
  EXPECT_EQ(ModeOf(CompanionSocketOf(shared)), 0660u);
}

TEST(UnixPeerTest, OthersSeeAndDeleteWhatTheyAskedForOnly) {
  if (geteuid() != 0) GTEST_SKIP() << "only root may run as somebody else";
  TestService service({.workers = 1, .server = {.socket_mode = 0666}});
  ASSERT_TRUE(CreateCache(service.stub(), "mine", SmallSpec()).ok());
  const std::string path(UnixPath(service.address()));
  ASSERT_EQ(chmod(path.substr(0, path.rfind('/')).c_str(), 0755), 0);
  Descriptor connection = ConnectAs(kSomebody, path);
  ASSERT_TRUE(connection.open());
  const auto other = StubOver(std::move(connection));

  v1::GetTopologyReply topology;
  {
    grpc::ClientContext context;
    const grpc::Status status = other->GetTopology(&context, {}, &topology);
    ASSERT_TRUE(status.ok()) << status.error_message();
  }
  EXPECT_EQ(topology.caches_size(), 0);
  v1::DeleteCacheRequest request;
  request.set_cache_id("mine");
  v1::DeleteCacheReply deleted;
  {
    grpc::ClientContext context;
    EXPECT_EQ(other->DeleteCache(&context, request, &deleted).error_code(), StatusCode::NOT_FOUND);
  }
  ASSERT_TRUE(CreateCache(*other, "theirs", SmallSpec()).ok());
  EXPECT_EQ(service.Topology().caches_size(), 2) << "the service's own user sees all";
  request.set_cache_id("theirs");
  grpc::ClientContext context;
  EXPECT_TRUE(other->DeleteCache(&context, request, &deleted).ok());
}

TEST(UnixPeerTest, WhoeverIsGoneIsNobody) {
  EXPECT_EQ(UserOf("ipv4:127.0.0.1:80"), std::nullopt);
  EXPECT_EQ(UserOf("unix:"), std::nullopt);
  EXPECT_EQ(UserOf("fd:1000000"), kUnknownUser);
  EXPECT_EQ(UserOf("fd:x"), kUnknownUser);
  const Descriptor file(open("/dev/null", O_RDONLY));
  EXPECT_EQ(UserOf("fd:" + std::to_string(file.get())), kUnknownUser);
}

// The highest descriptor of this process, which the service is a part of.
int HighestDescriptor() {
  int highest = -1;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    highest = std::max(highest, std::stoi(entry.path().filename().string()));
  }
  return highest;
}

// A number that another connection has by the time that a call runs would make it somebody else's.
TEST(UnixPeerTest, NumbersOfConnectionsAreNotUsedAgainAtOnce) {
  TestService service({.workers = 1});
  std::vector<int> numbers;
  for (int i = 0; i < 8; ++i) {
    const int before = HighestDescriptor();
    const auto connection = ConnectToUnix(UnixPath(service.address()), 0);
    ASSERT_TRUE(connection.ok()) << connection.status();
    const Descriptor held(*connection);
    ASSERT_TRUE(test::Eventually(std::chrono::seconds(60),
                                 [&] { return HighestDescriptor() > std::max(before, 255); }));
    numbers.push_back(HighestDescriptor());
  }
  EXPECT_EQ(std::adjacent_find(numbers.begin(), numbers.end(), std::greater_equal<>()),
            numbers.end())
      << ::testing::PrintToString(numbers);
}

}  // namespace
}  // namespace tributary::service::testing
