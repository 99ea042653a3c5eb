#include "service/client/describe_options.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>

namespace tributary::client {
namespace {

TEST(DescribeOptions, ShowsEveryOptionWithItsUnit) {
  EXPECT_EQ(OptionsText(Describe(ConnectOptions{
                .target = "unix:/run/tributary.sock",
                .security = {.tls = {.certificate = "/c", .key = "/k", .authorities = "/a"},
                             .server_name = "n",
                             .token_file = "/t"},
                .timeout = std::chrono::seconds(2),
                .shared_memory_bytes = 4096,
                .max_attempts = 3})),
            "target: unix:/run/tributary.sock\n"
            "security.tls.certificate: /c\n"
            "security.tls.key: /k\n"
            "security.tls.authorities: /a\n"
            "security.server_name: n\n"
            "security.token_file: /t\n"
            "security.join_secret_file: \n"
            "timeout: 2000 ms\n"
            "shared_memory_bytes: 4096 bytes\n"
            "max_attempts: 3\n"
            "max_message_bytes: 67108864 bytes\n"
            "lease: \n"
            "wait_for_service: true\n");
}

TEST(DescribeOptions, ShowsThoseOfSessions) {
  EXPECT_EQ(
      OptionsText(Describe(HostSessionOptions{.cache_id = "c", .dtype = v1::DTYPE_BF16})),
      "cache_id: c\nmax_rows: 1\nmax_new_tokens: 1\ndtype: DTYPE_BF16\nreturn_lse: false\n"
      "max_steps: 2\nwait_timeout: 10000 ms\noutput_dtype: DTYPE_UNSPECIFIED\n"
      "memory: SESSION_MEMORY_UNSPECIFIED\nspin: 50000 ns\nendpoints: 1\nkv_replicated: false\n");
  EXPECT_EQ(OptionsText(Describe(DeviceSessionOptions{.cache_id = "c", .max_rows = 8})),
            "cache_id: c\nmax_rows: 8\nmax_new_tokens: 1\ndtype: DTYPE_BF16\nreturn_lse: false\n"
            "max_steps: 2\nwait_timeout: 10000 ms\nendpoints: 1\nkv_replicated: false\n"
            "timed: false\n");
}

TEST(DescribeOptions, TellsNoSecrets) {
  const std::string secret = "only-its-holder-knows";
  const std::string text =
      OptionsText(Describe(ConnectOptions{.target = "t", .lease = secret})) +
      OptionsText(Describe(EndpointOptions{.session_id = 7, .secret = secret}));
  EXPECT_EQ(text.find(secret), std::string::npos) << text;
  EXPECT_NE(text.find("lease: (set)\n"), std::string::npos) << text;
  EXPECT_NE(text.find("secret: (set)\n"), std::string::npos) << text;
}

}  // namespace
}  // namespace tributary::client
