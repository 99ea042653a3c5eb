// The parts of the worker's end that can be looked at alone: settings, pauses, the rendezvous,
// readiness.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <thread>

#include "absl/flags/flag.h"
#include "base/config/config_file.h"
#include "tests/support/process.h"
#include "worker/rpc/readiness.h"
#include "worker/rpc/session_rendezvous.h"
#include "worker/rpc/worker.h"

ABSL_FLAG(std::string, config, "", "");
ABSL_FLAG(int, config_test_number, 1, "");
ABSL_FLAG(std::string, config_test_text, "", "");

namespace tributary::worker {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// ---- settings ----------------------------------------------------------------------------------

class ConfigFile : public ::testing::Test {
 protected:
  absl::StatusOr<std::vector<std::string>> Read(const std::string& text,
                                                std::vector<std::string> more = {}) {
    const std::string path = directory_.File("config.yaml");
    std::ofstream(path) << text;
    arguments_ = {"program", "--config=" + path};
    arguments_.insert(arguments_.end(), more.begin(), more.end());
    std::vector<char*> argv;
    for (std::string& argument : arguments_) argv.push_back(argument.data());
    return ArgumentsWithConfigFile(static_cast<int>(argv.size()), argv.data());
  }

  test::TemporaryDirectory directory_;
  std::vector<std::string> arguments_;
};

TEST_F(ConfigFile, SettingsComeBeforeTheCommandLine) {
  const auto got = Read("config-test-number: 7\nconfig_test_text: [a, b]\n", {"--x=1"});
  ASSERT_EQ(got.status(), absl::OkStatus());
  EXPECT_THAT(*got, ElementsAre("program", "--config_test_number=7", "--config_test_text=a,b",
                                arguments_[1], "--x=1"));
}

TEST_F(ConfigFile, AnEmptyFileSetsNothing) {
  const auto got = Read("");
  ASSERT_EQ(got.status(), absl::OkStatus());
  EXPECT_EQ(got->size(), 2u);
}

TEST_F(ConfigFile, RefusalsNameTheSetting) {
  for (const char* text : {"nonsense_flag: 1\n", "config: x\n", "config_test_text: {a: b}\n",
                           "config_test_text: [[a]]\n", "- 1\n", "a: [\n"}) {
    const absl::Status status = Read(text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr("config.yaml")) << text;
  }
  EXPECT_THAT(std::string(Read("nonsense_flag: 1\n").status().message()),
              HasSubstr("nonsense_flag"));
}

TEST(ConfigFileMissing, IsNotFound) {
  std::string program = "program", flag = "--config", path = "/nowhere/at/all";
  char* argv[] = {program.data(), flag.data(), path.data()};
  const absl::Status status = ArgumentsWithConfigFile(3, argv).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr(path));
}

// ---- pauses ------------------------------------------------------------------------------------

TEST(ReconnectPause, DoublesUpToTheLimitAndVaries) {
  WorkerOptions options;
  options.reconnect_min = std::chrono::milliseconds(100);
  options.reconnect_max = std::chrono::milliseconds(1'000);
  EXPECT_EQ(ReconnectPause(options, 0, 0.0).count(), 50);
  EXPECT_EQ(ReconnectPause(options, 1, 0.5).count(), 150);
  EXPECT_EQ(ReconnectPause(options, 3, 0.0).count(), 400);
  EXPECT_EQ(ReconnectPause(options, 4, 0.0).count(), 500);
  EXPECT_EQ(ReconnectPause(options, 1'000'000, 0.0).count(), 500);
  EXPECT_LE(ReconnectPause(options, 1'000'000, 0.999).count(), 1'000);
}

// ---- rendezvous --------------------------------------------------------------------------------

std::chrono::steady_clock::time_point In(std::chrono::milliseconds time) {
  return std::chrono::steady_clock::now() + time;
}

v1::RendezvousValue Value(const std::string& key, const std::string& value) {
  v1::RendezvousValue message;
  message.set_key(key);
  message.set_value(value);
  return message;
}

TEST(Rendezvous, SpeaksWithTheEpoch) {
  const auto outbox = std::make_shared<Outbox>();
  SessionRendezvous rendezvous(12, outbox);
  ASSERT_TRUE(rendezvous.Set("rank0", std::string("a\0b", 3)).ok());
  rendezvous.Deliver(Value("rank1", "there"));
  std::string value;
  ASSERT_TRUE(rendezvous.Get("rank1", &value, In(std::chrono::seconds(5))).ok());
  EXPECT_EQ(value, "there");

  const auto put = outbox->Pop();
  ASSERT_TRUE(put.has_value());
  EXPECT_EQ(put->epoch(), 12u);
  EXPECT_EQ(put->rendezvous_put().key(), "rank0");
  EXPECT_EQ(put->rendezvous_put().value(), std::string("a\0b", 3));
  const auto get = outbox->Pop();
  ASSERT_TRUE(get.has_value());
  EXPECT_EQ(get->epoch(), 12u);
  EXPECT_EQ(get->rendezvous_get().key(), "rank1");
}

TEST(Rendezvous, WaitsForTheValue) {
  const auto outbox = std::make_shared<Outbox>();
  SessionRendezvous rendezvous(1, outbox);
  std::thread coordinator([&] {
    const auto get = outbox->Pop();  // the question comes first
    rendezvous.Deliver(Value(get->rendezvous_get().key(), "late"));
  });
  std::string value;
  EXPECT_TRUE(rendezvous.Get("key", &value, In(std::chrono::seconds(20))).ok());
  EXPECT_EQ(value, "late");
  coordinator.join();
}

TEST(Rendezvous, EndsAtTheDeadlineOrWhenCancelled) {
  const auto outbox = std::make_shared<Outbox>();
  SessionRendezvous rendezvous(1, outbox);
  std::string value;
  EXPECT_EQ(rendezvous.Get("key", &value, In(std::chrono::milliseconds(1))).code(),
            tributary::StatusCode::kDeadlineExceeded);
  outbox->Pop();
  std::thread session([&] {
    outbox->Pop();
    rendezvous.Cancel("the session ended");
  });
  const tributary::Status cancelled = rendezvous.Get("key", &value, In(std::chrono::seconds(20)));
  EXPECT_EQ(cancelled.code(), tributary::StatusCode::kAborted);
  EXPECT_EQ(cancelled.message(), "the session ended");
  session.join();
  EXPECT_EQ(rendezvous.Get("key", &value, In(std::chrono::seconds(20))).code(),
            tributary::StatusCode::kAborted);
}

// ---- outbox and readiness ----------------------------------------------------------------------

TEST(Outbox, AClosedOneDropsAndEndsTheWriter) {
  Outbox outbox;
  outbox.Push({});
  outbox.Close();
  outbox.Push({});
  EXPECT_FALSE(outbox.Pop().has_value());
}

TEST(Readiness, OnlyTheEpochExpectedCounts) {
  std::vector<bool> told;
  Readiness readiness([&](bool ready) { told.push_back(ready); });
  readiness.Expect(1);
  readiness.Reached(1);
  readiness.Expect(2);
  readiness.Reached(1);  // late
  readiness.Leave();
  readiness.Reached(2);  // later
  readiness.Expect(3);
  readiness.Reached(3);
  EXPECT_THAT(told, ElementsAre(true, false, true));
}

}  // namespace
}  // namespace tributary::worker
