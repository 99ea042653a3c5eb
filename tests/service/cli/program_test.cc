// The program as a person or a script runs it: output piped, exit codes.
#include <sys/wait.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "service/client/client.h"
#include "service/embedded/embedded_service.h"
#include "tests/support/process.h"
#include "tests/support/usage.h"

namespace tributary::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;
using ::testing::StartsWith;
using ::tributary::test::kInstrumented;

struct Outcome {
  int code = -1;
  std::string out;  // stdout and stderr
};

Outcome RunProgram(const std::string& arguments) {
  const std::string line = std::string(TRIBUTARY_CLI) + " " + arguments + " 2>&1";
  std::FILE* pipe = popen(line.c_str(), "r");
  if (pipe == nullptr) return {};
  Outcome outcome;
  std::array<char, 4096> buffer;
  size_t got = 0;
  while ((got = std::fread(buffer.data(), 1, buffer.size(), pipe)) > 0) {
    outcome.out.append(buffer.data(), got);
  }
  const int status = pclose(pipe);
  if (WIFEXITED(status)) outcome.code = WEXITSTATUS(status);
  EXPECT_THAT(outcome.out, Not(HasSubstr("\x1b"))) << "colours in a pipe";
  return outcome;
}

TEST(Program, ExplainsItself) {
  const Outcome overview = RunProgram("help");
  EXPECT_EQ(overview.code, 0);
  for (const std::string command : {"bench", "check", "demo", "flight", "health", "limits",
                                    "resize", "stat", "top", "topology", "trace"}) {
    EXPECT_THAT(overview.out, HasSubstr("  " + command));
    const Outcome help = RunProgram("help " + command);
    EXPECT_EQ(help.code, 0);
    EXPECT_THAT(help.out, StartsWith("usage: tributary " + command));
    if (command != "demo") {
      EXPECT_EQ(RunProgram(command + " --help").out, help.out);
    }
  }
  EXPECT_THAT(RunProgram("help bench").out, HasSubstr("--context=4096"));
}

TEST(Program, ResizeIsToldHowManyAndSaysWhyNot) {
  EXPECT_EQ(RunProgram("resize").code, 2);
  EXPECT_THAT(RunProgram("resize --workers=0").out, HasSubstr("--workers: must be >= 1"));
  const Outcome nobody = RunProgram("resize --workers=2 --target=unix:/tmp/tributary-nobody");
  EXPECT_EQ(nobody.code, 1);
  EXPECT_THAT(nobody.out, HasSubstr("/tmp/tributary-nobody"));
}

TEST(Program, WrongUsageIsTwo) {
  EXPECT_EQ(RunProgram("").code, 2);
  EXPECT_EQ(RunProgram("fly").code, 2);
  EXPECT_EQ(RunProgram("help fly").code, 2);
  EXPECT_EQ(RunProgram("topology --colour").code, 2);
  EXPECT_EQ(RunProgram("top --interval=0").code, 2);
  EXPECT_EQ(RunProgram("bench --sequences=3 --batch=2").code, 2);
  EXPECT_EQ(RunProgram("bench --kv_dtype=int4").code, 2);
}

TEST(Program, NobodyThereIsOne) {
  const std::string nowhere = "--target=unix:/tmp/tributary-nobody --timeout=100ms";
  for (const std::string command :
       {"limits", "topology", "stat", "top", "flight", "trace", "health", "check", "bench"}) {
    const Outcome outcome = RunProgram(command + " " + nowhere);
    EXPECT_EQ(outcome.code, 1) << command;
    EXPECT_THAT(outcome.out, HasSubstr("/tmp/tributary-nobody"));
  }
  const Outcome admin = RunProgram("health --admin=unix:/tmp/tributary-nobody --timeout=100ms");
  EXPECT_EQ(admin.code, 1);
  EXPECT_THAT(admin.out, HasSubstr("NOT_SERVING"));
}

// The reason, at once: scripts and people wait for nothing else.
TEST(Program, ADeadAddressFailsAtOnceWithTheReason) {
  const auto begin = std::chrono::steady_clock::now();
  for (const std::string command :
       {"limits", "topology", "stat", "top", "flight", "trace", "health", "check", "bench"}) {
    const Outcome socket = RunProgram(command + " --target=unix:/tmp/tributary-nobody");
    EXPECT_EQ(socket.code, 1) << command;
    EXPECT_THAT(socket.out,
                HasSubstr("nobody listens at unix:/tmp/tributary-nobody (no such socket)"));
    const Outcome port = RunProgram(command + " --target=127.0.0.1:1");
    EXPECT_EQ(port.code, 1) << command;
    EXPECT_THAT(port.out, HasSubstr("nobody listens at 127.0.0.1:1 (connection refused)"));
  }
  EXPECT_THAT(RunProgram("health --admin=127.0.0.1:1").out, HasSubstr("connection refused"));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(kInstrumented ? 60 : 20))
      << "19 commands, whose own limits are 3 to 30 s each";
}

TEST(Program, AFlagByWhichTheServiceIsReachedIsWrongUsage) {
  for (const std::string command :
       {"limits", "topology", "stat", "top", "flight", "trace", "check", "bench"}) {
    const Outcome outcome =
        RunProgram(command + " --target=127.0.0.1:1 --tls_server_name=a.example");
    EXPECT_EQ(outcome.code, 2) << command;
    EXPECT_THAT(outcome.out, HasSubstr("--tls_ca: is missing; tls_server_name is given"));
  }
}

TEST(Program, SaysWhichBuildItIs) {
  for (const char* spelling : {"version", "--version"}) {
    const Outcome outcome = RunProgram(spelling);
    EXPECT_EQ(outcome.code, 0);
    EXPECT_THAT(outcome.out,
                MatchesRegex("tributary [0-9.]+ \\(commit ([0-9a-f]{12}|unknown)\\)\n"));
  }
}

TEST(Program, LooksAtAService) {
  const auto service = service::EmbeddedService::Start({.workers = 3, .threads = 1});
  ASSERT_TRUE(service.ok()) << service.status();
  const std::string target = " --target=" + (*service)->target();
  // Its workers are ready when it answers a bench.
  const Outcome bench = RunProgram(
      "bench --context=64 --warmup=0s --duration=200ms --q_heads=4 --kv_heads=2 --head_dim=64" +
      target);
  EXPECT_EQ(bench.code, 0) << bench.out;
  EXPECT_THAT(bench.out, HasSubstr("tokens/s"));
  const Outcome health = RunProgram("health" + target);
  EXPECT_EQ(health.code, 0) << health.out;
  EXPECT_THAT(health.out, HasSubstr("3 of 3 workers"));
  const Outcome check = RunProgram("check" + target);
  EXPECT_EQ(check.code, 0) << check.out;
  EXPECT_THAT(check.out, HasSubstr("3 ranks, backend cpu"));
  const Outcome topology = RunProgram("topology --sequences" + target);
  EXPECT_EQ(topology.code, 0);
  EXPECT_THAT(topology.out, HasSubstr("3 of 3 workers"));
  EXPECT_THAT(topology.out, HasSubstr("no caches")) << "bench and check have deleted theirs";
  EXPECT_THAT(RunProgram("topology --json" + target).out, StartsWith("{"));
  const Outcome limits = RunProgram("limits" + target);
  EXPECT_EQ(limits.code, 0);
  EXPECT_THAT(limits.out, HasSubstr("BACKEND CPU"));
  EXPECT_THAT(RunProgram("limits --json" + target).out, HasSubstr("f32_output_errors"));
  const Outcome stat = RunProgram("stat" + target);
  EXPECT_EQ(stat.code, 0);
  EXPECT_THAT(stat.out, HasSubstr("tokens appended"));
  EXPECT_EQ(RunProgram("stat --watch=10ms --lines=2" + target).code, 0);
  const Outcome top = RunProgram("top --once --interval=10ms" + target);
  EXPECT_EQ(top.code, 0) << top.out;
  EXPECT_THAT(top.out, HasSubstr("3 of 3 workers"));
  EXPECT_THAT(top.out, HasSubstr("STEPS/S"));
  EXPECT_EQ(RunProgram("top --interval=10ms" + target).code, 0) << "once, when piped";
}

TEST(Program, BenchBringsItsOwnService) {
  const Outcome outcome = RunProgram(
      "bench --workers=2 --context=64 --warmup=0s --duration=100ms --q_heads=4 --kv_heads=2 "
      "--head_dim=64 --noshm --json");
  EXPECT_EQ(outcome.code, 0) << outcome.out;
  EXPECT_THAT(outcome.out, StartsWith("{\"load\": {"));
  EXPECT_THAT(outcome.out, HasSubstr("\"shared_memory\": false"));
}

// A host that is killed in the midst of its steps holds nothing back: its stream ends with it.
TEST(Program, AHostOfASessionThatIsKilledGivesItsSequencesBack) {
  const auto service = service::EmbeddedService::Start({.workers = 2, .threads = 2});
  ASSERT_TRUE(service.ok()) << service.status();
  const test::TemporaryDirectory directory;
  test::ChildProcess host(
      {TRIBUTARY_CLI, "bench", "--session", "--target=" + (*service)->target(), "--context=64",
       "--warmup=0s", "--duration=1h", "--q_heads=4", "--kv_heads=2", "--head_dim=64"},
      directory.File("log"));
  const auto client = client::Client::Connect({.target = (*service)->target()});
  ASSERT_TRUE(client.ok()) << client.status();
  v1::GetTopologyRequest request;
  request.set_with_sequences(true);
  v1::GetTopologyReply topology;
  // Past what it was filled with: its session is at work.
  ASSERT_TRUE(test::Eventually(std::chrono::seconds(60), [&] {
    const auto reply = (*client)->GetTopology(request);
    if (!reply.ok() || reply->caches_size() == 0) return false;
    topology = *reply;
    const auto& sequences = topology.caches(0).sequence();
    return !sequences.empty() && sequences[0].length() > 64;
  }));
  host.Signal(SIGKILL);
  const std::string cache = topology.caches(0).cache_id();
  for (const v1::SequenceInfo& sequence : topology.caches(0).sequence()) {
    const auto length = (*client)->TruncateSequence(cache, sequence.sequence_id(), 10);
    EXPECT_TRUE(length.ok()) << length.status();
  }
  EXPECT_TRUE((*client)->DeleteCache(cache).ok());
}

}  // namespace
}  // namespace tributary::cli
