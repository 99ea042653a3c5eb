// Whether workers reach each other under TLS, by what each is told and what its peers can.
#include "worker/rpc/peer_security.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "worker/rpc/protocol.h"

namespace tributary::worker {
namespace {

using collective::Transport;
using ::testing::HasSubstr;

ChannelSecurity Tls() { return {.tls = {.authorities = "ca.crt"}}; }

TEST(PeerSecurity, IsTlsWhereTheCoordinatorIsSpokenToByTls) {
  for (const uint32_t protocol : {kPeerTlsProtocol, kPeerTlsProtocol + 1}) {
    EXPECT_EQ(*ChooseTransport(PeerTls::kAuto, Tls(), protocol), Transport::kTls);
    EXPECT_EQ(*ChooseTransport(PeerTls::kAuto, {}, protocol), Transport::kGloo);
    EXPECT_EQ(*ChooseTransport(PeerTls::kAlways, {}, protocol), Transport::kTls);
    EXPECT_EQ(*ChooseTransport(PeerTls::kNever, Tls(), protocol), Transport::kGloo);
  }
}

TEST(PeerSecurity, ABuildWithoutItIsWaitedForOrRefused) {
  const uint32_t before = kPeerTlsProtocol - 1;
  EXPECT_EQ(*ChooseTransport(PeerTls::kAuto, Tls(), before), Transport::kGloo);
  EXPECT_EQ(*ChooseTransport(PeerTls::kNever, Tls(), before), Transport::kGloo);
  const auto refused = ChooseTransport(PeerTls::kAlways, Tls(), before);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(refused.status().message(), HasSubstr("peer_tls"));
}

TEST(PeerSecurity, WhomToTrustIsNotLearntInPlainText) {
  EXPECT_TRUE(CheckPeerTls(PeerTls::kAlways, "10.0.0.1:7402", Tls()).ok());
  EXPECT_TRUE(CheckPeerTls(PeerTls::kAlways, "unix:/run/workers.sock", {}).ok());
  EXPECT_TRUE(CheckPeerTls(PeerTls::kAuto, "10.0.0.1:7402", {}).ok());
  const absl::Status refused = CheckPeerTls(PeerTls::kAlways, "10.0.0.1:7402", {});
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(refused.message(), HasSubstr("tls_ca"));
}

TEST(PeerSecurity, IsReadFromText) {
  PeerTls read = PeerTls::kNever;
  EXPECT_TRUE(Parse("auto", &read));
  EXPECT_EQ(read, PeerTls::kAuto);
  EXPECT_TRUE(Parse("always", &read));
  EXPECT_EQ(read, PeerTls::kAlways);
  EXPECT_TRUE(Parse("never", &read));
  EXPECT_EQ(read, PeerTls::kNever);
  EXPECT_FALSE(Parse("true", &read));
}

TEST(PeerSecurity, IsSaidOfTheGroup) {
  EXPECT_EQ(DescribeExchange(1, "", Transport::kTls), "");
  EXPECT_EQ(DescribeExchange(4, "", Transport::kTls),
            "partials meet in host memory, by TCP under TLS 1.3");
  EXPECT_EQ(DescribeExchange(2, "partials meet in device memory, by direct", Transport::kGloo),
            "partials meet in device memory, by direct; workers reach each other by Gloo over TCP");
}

}  // namespace
}  // namespace tributary::worker
