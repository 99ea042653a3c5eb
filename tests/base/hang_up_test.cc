#include "base/rpc/hang_up.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "base/rpc/descriptor.h"
#include "base/rpc/unix_address.h"
#include "tests/support/process.h"

namespace tributary {
namespace {

// Somebody who listens, and a peer who has connected.
struct Line {
  Descriptor listener, peer, accepted;
  std::string address;
};

sockaddr_in Loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

int ConnectToPort(int port) {
  const int peer = socket(AF_INET, SOCK_STREAM, 0);
  const sockaddr_in address = Loopback(port);
  if (connect(peer, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) return peer;
  close(peer);
  return -1;
}

Line OverTcp(int* port) {
  Line line;
  line.listener = Descriptor(socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address = Loopback(0);
  socklen_t size = sizeof address;
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  EXPECT_EQ(bind(line.listener.get(), any, size), 0);
  EXPECT_EQ(listen(line.listener.get(), 4), 0);
  EXPECT_EQ(getsockname(line.listener.get(), any, &size), 0);
  *port = ntohs(address.sin_port);
  line.address = "127.0.0.1:" + std::to_string(*port);
  line.peer = Descriptor(ConnectToPort(*port));
  line.accepted = Descriptor(accept(line.listener.get(), nullptr, nullptr));
  return line;
}

Line OverUnixSocket(const std::string& path) {
  Line line;
  line.address = "unix:" + path;
  line.listener = Descriptor(*BindToUnix(path, 0));
  EXPECT_EQ(listen(line.listener.get(), 4), 0);
  line.peer = Descriptor(*ConnectToUnix(path, 0));
  line.accepted = Descriptor(accept(line.listener.get(), nullptr, nullptr));
  return line;
}

bool Sends(const Descriptor& from, const Descriptor& to) {
  char byte = 'x';
  return send(from.get(), &byte, 1, MSG_NOSIGNAL) == 1 && recv(to.get(), &byte, 1, 0) == 1;
}

TEST(HangUp, EndsConnectionsAndRefusesOthers) {
  const test::TemporaryDirectory directory;
  int port = 0;
  int other_port = 0;
  Line tcp = OverTcp(&port);
  Line unix_socket = OverUnixSocket(directory.File("a"));
  Line other_tcp = OverTcp(&other_port);
  Line other_unix_socket = OverUnixSocket(directory.File("b"));
  const char last = 'l';
  ASSERT_EQ(send(tcp.accepted.get(), &last, 1, 0), 1);

  HangUp({tcp.address, unix_socket.address});

  char byte = 0;
  EXPECT_EQ(recv(tcp.peer.get(), &byte, 1, 0), 1) << "what was written before arrives";
  EXPECT_EQ(byte, last);
  EXPECT_EQ(recv(tcp.peer.get(), &byte, 1, 0), 0);
  EXPECT_EQ(recv(unix_socket.peer.get(), &byte, 1, 0), 0);
  EXPECT_LT(ConnectToPort(port), 0);
  EXPECT_FALSE(ConnectToUnix(directory.File("a"), 0).ok());
  // The numbers are still their owners'.
  EXPECT_EQ(fcntl(tcp.listener.get(), F_GETFD), FD_CLOEXEC);
  for (const Line* line : {&other_tcp, &other_unix_socket}) {
    EXPECT_TRUE(Sends(line->accepted, line->peer) && Sends(line->peer, line->accepted));
  }
  EXPECT_TRUE(Descriptor(ConnectToPort(other_port)).open());
}

TEST(HangUp, OfAnAddressThatNobodyListensAtDoesNothing) {
  int port = 0;
  const Line line = OverTcp(&port);
  HangUp({"127.0.0.1:1", "unix:/nowhere", ""});
  EXPECT_TRUE(Sends(line.accepted, line.peer));
}

}  // namespace
}  // namespace tributary
