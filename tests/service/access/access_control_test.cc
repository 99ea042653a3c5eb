// Tokens, names, roles and limits, as functions.
#include "service/access/access_control.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <limits>
#include <vector>

#include "base/rpc/channel_security.h"
#include "base/rpc/tls.h"
#include "base/rpc/watched_file.h"
#include "base/status/errors.h"
#include "service/access/join_secret.h"
#include "service/access/peer.h"
#include "service/api/call_quota.h"
#include "tests/support/process.h"

namespace tributary::service {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kTokens[] =
    "# who may do what\n"
    "model-a client     0123456789abcdef-a\n"
    "\n"
    "rank    worker     0123456789abcdef-w\n"
    "ops     admin,client\t0123456789abcdef-o\n";

TEST(ParseTokens, ReadsNamesRolesAndTokens) {
  const auto tokens = ParseTokens(kTokens);
  ASSERT_TRUE(tokens.ok()) << tokens.status();
  ASSERT_EQ(tokens->size(), 3u);
  EXPECT_EQ((*tokens)[0].name, "model-a");
  EXPECT_TRUE((*tokens)[0].roles.Has(Role::kClient));
  EXPECT_FALSE((*tokens)[0].roles.Has(Role::kWorker));
  EXPECT_EQ((*tokens)[1].token, "0123456789abcdef-w");
  EXPECT_TRUE((*tokens)[2].roles.Has(Role::kAdmin));
  EXPECT_TRUE((*tokens)[2].roles.Has(Role::kClient));
}

TEST(ParseTokens, NamesTheLineAndNeverShowsAToken) {
  const std::pair<const char*, const char*> cases[] = {
      {"a client\n", "line 1"},
      {"\na client short\n", "line 2"},
      {"a king 0123456789abcdef\n", "king"},
      {"a client 0123456789abcdef\nb admin 0123456789abcdef\n", "line 2"},
      {"# nothing\n", "no token"},
      {"a client 0123456789abcdef more\n", "line 1"},
  };
  for (const auto& [text, why] : cases) {
    const absl::Status status = ParseTokens(text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_EQ(FieldOf(status), "token_file");
    EXPECT_THAT(std::string(status.message()), HasSubstr(why));
    EXPECT_THAT(std::string(status.message()), Not(HasSubstr("0123456789abcdef")));
  }
}

TEST(MatchesName, AStarStandsForOneLabel) {
  EXPECT_TRUE(MatchesName("worker-0.tributary", "worker-0.tributary"));
  EXPECT_TRUE(MatchesName("*.tributary", "worker-0.tributary"));
  EXPECT_FALSE(MatchesName("*.tributary", "a.b.tributary"));
  EXPECT_FALSE(MatchesName("*.tributary", "tributary"));
  EXPECT_FALSE(MatchesName("*.tributary", ".tributary"));
  EXPECT_FALSE(MatchesName("worker", "worker-0"));
}

class Access : public ::testing::Test {
 protected:
  void Write(const std::string& text) { std::ofstream(file_) << text; }
  std::shared_ptr<AccessControl> Make(AccessOptions options) {
    auto access = AccessControl::Create(options);
    EXPECT_TRUE(access.ok()) << access.status();
    return *access;
  }

  const test::TemporaryDirectory directory_;
  const std::string file_ = directory_.File("tokens");
};

TEST(Peer, IsOnThisMachineBehindASocketOrOverLoopback) {
  for (const char* here :
       {"unix:/run/tributary.sock", "unix:", "ipv4:127.0.0.1:41000", "ipv4:127.8.0.1:1",
        "ipv6:%5B::1%5D:41000", "ipv6:[::1]:1", "ipv6:%5B::ffff:127.0.0.1%5D:41000"}) {
    EXPECT_TRUE(IsOnThisMachine(here)) << here;
  }
  for (const char* elsewhere :
       {"ipv4:10.0.0.1:41000", "ipv4:128.0.0.1:1", "ipv6:%5B2001:db8::1%5D:1",
        "ipv6:%5B::ffff:10.0.0.1%5D:41000", "", "unknown"}) {
    EXPECT_FALSE(IsOnThisMachine(elsewhere)) << elsewhere;
  }
}

TEST_F(Access, AJoinSecretIsTheFirstLineOfItsFile) {
  EXPECT_EQ(FieldOf(JoinSecret::Create(directory_.File("none")).status()), "join_secret_file");
  Write("too short\n");
  EXPECT_EQ(FieldOf(JoinSecret::Create(file_).status()), "join_secret_file");
  Write("0123456789abcdef\nsomething else\n");
  const auto secret = JoinSecret::Create(file_);
  ASSERT_TRUE(secret.ok()) << secret.status();
  EXPECT_TRUE((*secret)->CheckShown("0123456789abcdef").ok());
  for (const char* wrong : {"", "0123456789abcdeg", "0123456789abcdef0", "something else"}) {
    EXPECT_EQ((*secret)->CheckShown(wrong).code(), absl::StatusCode::kUnauthenticated) << wrong;
  }
}

TEST_F(Access, WithoutSettingsEverybodyMayDoEverything) {
  const auto access = Make({});
  EXPECT_EQ(access->Authorize(Presented{}, {Role::kClient})->name, "anonymous");
  EXPECT_EQ(access->Authorize(Presented{.token = "", .names = {"host"}}, {Role::kAdmin})->name,
            "host");
}

TEST_F(Access, ATokenHasItsRolesAndNoOthers) {
  Write(kTokens);
  const auto access = Make({.token_file = file_});
  EXPECT_EQ(access->Authorize({.token = "0123456789abcdef-a", .names = {}}, {Role::kClient})->name,
            "model-a");
  EXPECT_EQ(access->Authorize({.token = "0123456789abcdef-a", .names = {}}, {Role::kWorker})
                .status()
                .code(),
            absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(
      access->Authorize({.token = "0123456789abcdef-o", .names = {}}, {Role::kWorker, Role::kAdmin})
          ->name,
      "ops");
  for (const char* token : {"", "0123456789abcdef-x", "0123456789abcdef-"}) {
    EXPECT_EQ(access->Authorize({.token = token, .names = {}}, {Role::kClient}).status().code(),
              absl::StatusCode::kUnauthenticated)
        << token;
  }
}

TEST_F(Access, ANameInACertificateHasItsRole) {
  const auto access = Make({.token_file = "",
                            .client_names = {"model.example"},
                            .worker_names = {"*.workers.example"},
                            .admin_names = {}});
  EXPECT_EQ(
      access->Authorize({.token = "", .names = {"x", "model.example"}}, {Role::kClient})->name,
      "model.example");
  EXPECT_EQ(
      access->Authorize({.token = "", .names = {"w1.workers.example"}}, {Role::kWorker})->name,
      "w1.workers.example");
  EXPECT_EQ(access->Authorize({.token = "", .names = {"w1.workers.example"}}, {Role::kClient})
                .status()
                .code(),
            absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(access->Authorize({.token = "", .names = {"other"}}, {Role::kClient}).status().code(),
            absl::StatusCode::kUnauthenticated);
}

TEST_F(Access, TokensAreRotatedWithoutARestartAndABrokenFileChangesNothing) {
  Write("a client 0123456789abcdef-1\n");
  const auto access = Make({.token_file = file_});
  const auto works = [&](const char* token) {
    return access->Authorize({.token = token, .names = {}}, {Role::kClient}).ok();
  };
  ASSERT_TRUE(works("0123456789abcdef-1"));
  Write("a client 0123456789abcdef-2\n");
  EXPECT_TRUE(test::Eventually(std::chrono::seconds(20), [&] {
    return works("0123456789abcdef-2") && !works("0123456789abcdef-1");
  }));
  // Looked at and refused: at least once per interval, and the tokens stay.
  Write("nonsense\n");
  WatchedFile file(file_, std::chrono::milliseconds(0));
  ASSERT_EQ(*file.Read(), "nonsense\n");
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(1'500);
  while (std::chrono::steady_clock::now() < until) ASSERT_TRUE(works("0123456789abcdef-2"));
}

TEST_F(Access, AFileThatCannotBeUsedIsRefusedAtTheStart) {
  EXPECT_EQ(FieldOf(AccessControl::Create({.token_file = file_ + "-none"}).status()), "token_file");
  Write("nonsense\n");
  EXPECT_EQ(FieldOf(AccessControl::Create({.token_file = file_}).status()), "token_file");
}

TEST(WatchedFile, KeepsWhatItKnewWhenTheFileGoes) {
  const test::TemporaryDirectory directory;
  const std::string path = directory.File("file");
  WatchedFile file(path, std::chrono::milliseconds(0));
  EXPECT_FALSE(file.Read().ok());
  std::ofstream(path) << "one";
  bool changed = false;
  EXPECT_EQ(*file.Read(&changed), "one");
  EXPECT_TRUE(changed);
  EXPECT_EQ(*file.Read(&changed), "one");
  EXPECT_FALSE(changed);
  std::filesystem::remove(path);
  EXPECT_EQ(*file.Read(&changed), "one");
  EXPECT_FALSE(changed);
}

TEST(CallQuota, CountsEachCallerByItself) {
  const auto quota = CallQuota::Create(2);
  auto first = quota->Admit("a");
  auto second = quota->Admit("a");
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(quota->Admit("a").status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(quota->Admit("b").ok());
  *first = nullptr;
  EXPECT_TRUE(quota->Admit("a").ok());  // given back at once
  const auto unlimited = CallQuota::Create(0);
  std::vector<CallQuota::Admission> many;
  for (int i = 0; i < 1'000; ++i) many.push_back(*unlimited->Admit("a"));
}

TEST(IsLocalAddress, KnowsWhatOnlyThisMachineReaches) {
  for (const char* local : {"unix:/run/t.sock", "127.0.0.1:7400", "127.8.9.1:1", "localhost:7400",
                            "[::1]:7400", "dns:///localhost:1", "ipv4:127.0.0.1:1"}) {
    EXPECT_TRUE(IsLocalAddress(local)) << local;
  }
  for (const char* remote : {"0.0.0.0:7400", "[::]:7400", "10.0.0.1:7400", "tributary:7400",
                             "localhost.example:7400", "*:7400"}) {
    EXPECT_FALSE(IsLocalAddress(remote)) << remote;
  }
}

TEST(DialSecurely, NamesWhatCannotBeUsed) {
  const test::TemporaryDirectory directory;
  const auto field = [](const std::string& target, const ChannelSecurity& security) {
    return FieldOf(DialSecurely(target, security, {}).status());
  };
  const std::string token = directory.File("token");
  EXPECT_EQ(field("unix:/x", {.tls = {}, .token_file = token}), "token_file");
  std::ofstream(token) << "\n";
  EXPECT_EQ(field("unix:/x", {.tls = {}, .token_file = token}), "token_file");
  std::ofstream(token) << "0123456789abcdef\n";
  EXPECT_EQ(field("unix:/x", {.tls = {}, .token_file = token}), "");
  EXPECT_EQ(field("10.0.0.1:1", {.tls = {}, .token_file = token}), "token_file");  // plain text
  EXPECT_EQ(field("unix:/x",
                  {.tls = {.certificate = token, .key = "", .authorities = ""}, .token_file = ""}),
            "tls_key");
  EXPECT_EQ(field("unix:/x", {.tls = {.certificate = token, .key = token, .authorities = ""},
                              .token_file = ""}),
            "tls_cert");
  EXPECT_EQ(field("unix:/x",
                  {.tls = {.certificate = "", .key = "", .authorities = token}, .token_file = ""}),
            "tls_ca");
}

}  // namespace
}  // namespace tributary::service
