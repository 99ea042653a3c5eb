// The real binary: settings, addresses, health, and how it ends.
#include "tests/support/process.h"

#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>

#include <atomic>
#include <fstream>
#include <thread>

#include "service/journal/sqlite.h"
#include "tests/service/raw_call.h"
#include "tests/service/test_service.h"
#include "worker/cuda_backend.h"

namespace tributary::service::testing {
namespace {

using ::grpc::StatusCode;
using test::ChildProcess;
using ::testing::HasSubstr;

constexpr std::chrono::seconds kPatience{60};

class ProcessTest : public ::testing::Test {
 protected:
  std::unique_ptr<ChildProcess> Start(std::vector<std::string> flags) {
    flags.insert(flags.begin(), TRIBUTARY_COORDINATOR);
    return std::make_unique<ChildProcess>(std::move(flags), directory_.File("log"));
  }
  // Listening on Unix sockets of the test's, with a few more flags.
  std::unique_ptr<ChildProcess> StartServing(std::vector<std::string> flags = {}) {
    flags.insert(flags.begin(), {"--listen=" + address_, "--admin_listen=" + admin_,
                                 "--embedded_workers=2", "--threads=2"});
    auto process = Start(std::move(flags));
    EXPECT_TRUE(test::Eventually(kPatience, [&] { return Health("readiness") == kServing; }));
    channel_ = grpc::CreateChannel(address_, grpc::InsecureChannelCredentials());
    stub_ = v1::AttentionService::NewStub(channel_);
    return process;
  }
  // What it says, or the error's code.
  std::string Health(const std::string& service) { return Said(CheckHealth(admin_, service)); }
  static std::string Said(const RawReply& reply) {
    return reply.status.ok() ? reply.bytes : "code " + std::to_string(reply.status.error_code());
  }

  const test::TemporaryDirectory directory_;
  const std::string address_ = "unix:" + directory_.File("service.sock");
  const std::string admin_ = "unix:" + directory_.File("admin.sock");
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::AttentionService::Stub> stub_;
};

// -------------------------------------------------------------------------------------- settings

TEST_F(ProcessTest, ABadSettingIsNamedAndEndsWithCode2) {
  const std::string file = directory_.File("config.yaml");
  const auto refused = [&](std::vector<std::string> flags) {
    auto process = Start(std::move(flags));
    EXPECT_EQ(process->Wait(kPatience), 2);
    return process->Log();
  };
  EXPECT_THAT(refused({"--no_such_flag=1"}), HasSubstr("no_such_flag"));
  EXPECT_THAT(refused({"--threads=many"}), HasSubstr("threads"));
  EXPECT_THAT(refused({"--threads=-1"}), HasSubstr("threads"));
  EXPECT_THAT(refused({"--listen=nowhere"}), HasSubstr("listen"));
  for (const std::string mode : {"432", "1666", "0778", "0", ""}) {
    EXPECT_THAT(refused({"--socket_mode=" + mode}), HasSubstr("socket_mode"));
  }
  EXPECT_THAT(refused({"--exchange=magic"}), HasSubstr("exchange"));
  EXPECT_THAT(refused({"--exchange=direct"}),
              HasSubstr("exchange: direct is between the memories"));
  EXPECT_THAT(refused({"--exchange=direct", "--device=cuda", "--device_exchange=host"}),
              HasSubstr("device_exchange=auto"));
  EXPECT_THAT(refused({"--device_exchange=gpu", "--device=cuda"}),
              HasSubstr("device_exchange: must be host or auto"));
  EXPECT_THAT(refused({"--device=abacus"}), HasSubstr("device"));
  EXPECT_THAT(refused({"--first_gpu=-1"}), HasSubstr("first_gpu"));
  EXPECT_THAT(refused({"--embedded_workers=0"}), HasSubstr("embedded_workers"));
  EXPECT_THAT(refused({"--embedded_workers=2", "--workers=2"}), HasSubstr("embedded_workers"));
  EXPECT_THAT(refused({"--batch_window=2h"}), HasSubstr("batch_window"));
  EXPECT_THAT(refused({"--max_message_bytes=1"}), HasSubstr("max_message_bytes"));
  EXPECT_THAT(refused({"--max_pages_per_client=-1"}), HasSubstr("max_pages_per_client"));
  EXPECT_THAT(refused({"--log_level=loud"}), HasSubstr("log_level"));
  for (const std::string prefixes : {"abc", "/a,b", "/a,,/b", "/a, /b", "/a/b"}) {
    EXPECT_THAT(refused({"--shared_memory_prefixes=" + prefixes}),
                HasSubstr("--shared_memory_prefixes: each must be"));
  }
  EXPECT_THAT(refused({"--config=" + directory_.File("absent.yaml")}), HasSubstr("absent.yaml"));
  std::ofstream(file) << "speed: 11\n";
  EXPECT_THAT(refused({"--config=" + file}), HasSubstr("speed"));
  std::ofstream(file) << "pipeline_depth: deep\n";
  EXPECT_THAT(refused({"--config=" + file}), HasSubstr("pipeline_depth"));
  std::ofstream(file) << "threads: 2\nlog_level: info\nthreads: 3\n";
  EXPECT_THAT(refused({"--config=" + file}), HasSubstr("threads is given twice"));
  std::ofstream(file) << "[1, 2]\n";
  EXPECT_THAT(refused({"--config=" + file}), HasSubstr("config"));
}

// A journal is named journal.db, and so may another program's database be.
TEST_F(ProcessTest, AnotherProgramsDatabaseInItsPlaceEndsItWithCode2) {
  const std::string file = directory_.File("journal.db");
  {
    auto database = Sqlite::Open(file);
    ASSERT_TRUE(database.ok()) << database.status();
    ASSERT_TRUE(database->Execute("CREATE TABLE notes (text TEXT)").ok());
  }
  auto process = Start({"--workers=1", "--worker_listen=127.0.0.1:0", "--listen=" + address_,
                        "--admin_listen=", "--state_dir=" + directory_.File("")});
  EXPECT_EQ(process->Wait(kPatience), 2);
  EXPECT_THAT(process->Log(), HasSubstr("--state_dir: "));
  EXPECT_THAT(process->Log(), HasSubstr("journal.db is the database of another program"));
}

// Where there are GPUs there is nothing to refuse.
TEST_F(ProcessTest, GpusThatAreNotThereEndItAtOnceWithTheReason) {
  if (worker::CheckGpus(0, 1).ok()) GTEST_SKIP() << "this machine has a GPU";
  auto process = Start({"--listen=" + address_, "--admin_listen=", "--device=cuda"});
  EXPECT_EQ(process->Wait(kPatience), 1);
  EXPECT_THAT(process->Log(), HasSubstr("cannot start the workers"));
  EXPECT_THAT(process->Log(), HasSubstr("CUDA"));
}

TEST_F(ProcessTest, HelpExplainsEverySetting) {
  auto process = Start({"--help"});
  EXPECT_EQ(process->Wait(kPatience), 0);
  for (const char* setting : {"--listen", "--embedded_workers", "--workers", "--drain_timeout"}) {
    EXPECT_THAT(process->Log(), HasSubstr(setting));
  }
  EXPECT_THAT(process->Log(), HasSubstr("--pipeline_depth="));
}

TEST_F(ProcessTest, TheFileIsReadAndTheCommandLineWins) {
  const std::string file = directory_.File("config.yaml");
  const std::string other = "unix:" + directory_.File("other.sock");
  std::ofstream(file) << "listen: [" << address_ << ", '" << other << "']\n"
                      << "admin_listen: " << admin_ << "\n"
                      << "embedded_workers: 3\n"
                      << "threads: 7\n";
  auto process = Start({"--config=" + file, "--embedded_workers=2"});
  ASSERT_TRUE(test::Eventually(kPatience, [&] { return Health("readiness") == kServing; }));
  for (const std::string& address : {address_, other}) {
    const auto stub = v1::AttentionService::NewStub(
        grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
    grpc::ClientContext context;
    v1::GetTopologyReply reply;
    ASSERT_TRUE(stub->GetTopology(&context, {}, &reply).ok());
    EXPECT_EQ(reply.workers_size(), 2);
  }
  process->Signal(SIGINT);
  EXPECT_EQ(process->Wait(kPatience), 0);
}

TEST_F(ProcessTest, SettingsOfTheFileChangeWithoutARestart) {
  const std::string file = directory_.File("config.yaml");
  std::ofstream(file) << "log_level: info\nbatch_max_rows: 64\n";
  auto process = StartServing({"--config=" + file, "--max_calls_per_client=5"});
  const auto asked = [&](const std::string& settings, const std::string& expected) {
    std::ofstream(file) << settings;
    process->Signal(SIGHUP);
    EXPECT_TRUE(test::Eventually(
        kPatience, [&] { return process->Log().find(expected) != std::string::npos; }))
        << expected << " is not in\n"
        << process->Log();
  };
  asked("log_level: debug\nbatch_max_rows: 64\n", "setting changed setting=log_level value=debug");
  asked("log_level: loud\nbatch_max_rows: 64\n",
        "setting not changed setting=log_level error=must");
  asked("log_level: debug\nbatch_max_rows: 32\n",
        "setting counts from the next start setting=batch_max_rows");
  asked("log_level: [\n", "the settings stay as they are");
  asked("batch_max_rows: 32\ntrace_sample: 0.5\nmax_streams_per_client: 2\n",
        "setting changed setting=trace_sample value=0.5");
  EXPECT_THAT(process->Log(), HasSubstr("setting=max_streams_per_client value=2"));
  EXPECT_THAT(process->Log(), HasSubstr("setting=log_level value=info")) << "the flag's default";
  asked("batch_max_rows: 32\ntrace_sample: 0.5\nmax_streams_per_client: 2\n",
        "settings read again: nothing has changed");
  asked(
      "batch_max_rows: 32\ntrace_sample: 0.5\nmax_streams_per_client: 2\n"
      "max_pages_per_client: 77\nmax_bytes_per_client: 123456\n",
      "setting=max_pages_per_client value=77");
  const auto stub = v1::AttentionService::NewStub(
      grpc::CreateChannel(address_, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  v1::GetLimitsReply limits;
  ASSERT_TRUE(stub->GetLimits(&context, {}, &limits).ok());
  EXPECT_EQ(limits.per_client().pages(), 77);
  EXPECT_EQ(limits.per_client().message_bytes(), 123456);
  EXPECT_EQ(process->Log().find("max_calls_per_client"), std::string::npos);
  EXPECT_EQ(Health("readiness"), kServing) << "all the while";
  // Without being asked, it looks by itself.
  std::ofstream(file) << "batch_max_rows: 32\ntrace_sample: 0.25\nmax_streams_per_client: 2\n";
  EXPECT_TRUE(test::Eventually(kPatience, [&] {
    return process->Log().find("setting=trace_sample value=0.25") != std::string::npos;
  }));
  process->Signal(SIGTERM);
  EXPECT_EQ(process->Wait(kPatience), 0);
}

TEST_F(ProcessTest, AnAddressInUseIsSaidAndEndsWithAnError) {
  auto first = StartServing({"--listen=" + address_ + ",127.0.0.1:0"});
  // It may be ready before it has said where.
  ASSERT_TRUE(test::Eventually(kPatience, [&] {
    return first->Log().find("127.0.0.1:") != std::string::npos;
  })) << first->Log();
  const std::string log = first->Log();
  const size_t at = log.find("127.0.0.1:");
  const std::string tcp = log.substr(at, log.find_first_of(" ,", at) - at);
  for (const std::string& taken : {address_, tcp}) {
    ChildProcess second({TRIBUTARY_COORDINATOR, "--listen=" + taken, "--admin_listen="},
                        directory_.File("second.log"));
    EXPECT_EQ(second.Wait(kPatience), 1) << taken;
    EXPECT_THAT(second.Log(), HasSubstr("cannot listen at " + taken));
  }
  EXPECT_EQ(Health("readiness"), kServing) << "the first is unharmed";
  v1::GetTopologyReply reply;
  grpc::ClientContext context;
  EXPECT_TRUE(stub_->GetTopology(&context, {}, &reply).ok());
}

// ---------------------------------------------------------------------------------------- health

TEST_F(ProcessTest, HealthAndTheApiLiveOnDifferentPorts) {
  auto process = StartServing();
  EXPECT_EQ(Health(""), kServing);
  EXPECT_EQ(Health("liveness"), kServing);
  EXPECT_EQ(Health("nonsense"), "code 5");
  const auto admin = grpc::CreateChannel(admin_, grpc::InsecureChannelCredentials());
  EXPECT_EQ(Said(RawCall(admin, "/tributary.v1.AttentionService/GetTopology", "", kPatience)),
            "code 12");
  EXPECT_EQ(Said(CheckHealth(address_, "")), "code 12");
}

TEST_F(ProcessTest, WatchersAreToldOfTheDrain) {
  auto process = StartServing({"--batch_window=1s"});  // so that a call is open for a while
  const v1::CacheSpec spec = SmallSpec();
  ASSERT_TRUE(CreateCache(*stub_, "m", spec).ok());
  ASSERT_TRUE(Open(*stub_, "m", 1).ok());
  HealthWatch readiness(admin_, "readiness"), liveness(admin_, "liveness"), other(admin_, "other");
  EXPECT_EQ(readiness.Next(), kServing);
  EXPECT_EQ(liveness.Next(), kServing);
  EXPECT_EQ(other.Next(), "\x08\x03") << "unknown, which may change";
  const auto calls_open = [&]() -> int64_t {
    grpc::ClientContext context;
    v1::GetTopologyReply reply;
    return stub_->GetTopology(&context, {}, &reply).ok() ? reply.statistics().calls_open() : -1;
  };
  // A call is counted off behind its answer, so that those above may still be counted.
  ASSERT_TRUE(test::Eventually(kPatience, [&] { return calls_open() == 0; }));
  std::thread call([&] {
    v1::AttendReply reply;
    const grpc::Status status = Attend(*stub_, AttendOf(spec, "m", 1, 0, 1), &reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
  });
  EXPECT_TRUE(test::Eventually(kPatience, [&] { return calls_open() > 0; }));
  process->Signal(SIGTERM);
  EXPECT_EQ(readiness.Next(), kNotServing);
  EXPECT_EQ(Health("liveness"), kServing);
  call.join();
  EXPECT_EQ(process->Wait(kPatience), 0);
}

TEST_F(ProcessTest, WaitingForWorkersIsAliveButNotReady) {
  auto process = Start({"--listen=" + address_, "--admin_listen=" + admin_, "--workers=2",
                        "--worker_listen=unix:" + directory_.File("workers.sock")});
  ASSERT_TRUE(test::Eventually(kPatience, [&] { return Health("liveness") == kServing; }));
  EXPECT_EQ(Health("readiness"), kNotServing);
  const auto stub = v1::AttentionService::NewStub(
      grpc::CreateChannel(address_, grpc::InsecureChannelCredentials()));
  EXPECT_EQ(CreateCache(*stub, "m", SmallSpec()).error_code(), StatusCode::UNAVAILABLE);
  process->Signal(SIGTERM);
  EXPECT_EQ(process->Wait(kPatience), 0);
}

TEST_F(ProcessTest, ReflectionListsTheServiceUnlessTurnedOff) {
  const auto listed = [&] {
    grpc::GenericStub stub(grpc::CreateChannel(address_, grpc::InsecureChannelCredentials()));
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    grpc::CompletionQueue queue;
    void* tag = nullptr;
    bool ok = false;
    auto call = stub.PrepareCall(
        &context, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", &queue);
    call->StartCall(nullptr);
    queue.Next(&tag, &ok);
    grpc::Slice slice(std::string("\x3a\x00", 2));  // list_services: ""
    call->Write(grpc::ByteBuffer(&slice, 1), nullptr);
    queue.Next(&tag, &ok);
    grpc::ByteBuffer reply;
    call->Read(&reply, nullptr);
    queue.Next(&tag, &ok);
    std::string text;
    grpc::Slice whole;
    if (ok && reply.DumpToSingleSlice(&whole).ok()) {
      text.assign(reinterpret_cast<const char*>(whole.begin()), whole.size());
    }
    context.TryCancel();
    grpc::Status status;
    call->Finish(&status, nullptr);
    queue.Next(&tag, &ok);
    return text;
  };
  {
    auto process = StartServing();
    EXPECT_THAT(listed(), HasSubstr("tributary.v1.AttentionService"));
  }
  auto process = StartServing({"--noreflection"});
  EXPECT_EQ(listed(), "");
}

// ------------------------------------------------------------------------------------------ ends

TEST_F(ProcessTest, UnderLoadSigtermFailsNoAcceptedCall) {
  // Every host comes back in time to be told.
  auto process = StartServing({"--drain_settle=3s"});
  const v1::CacheSpec spec = SmallSpec();
  ASSERT_TRUE(CreateCache(*stub_, "m", spec).ok());
  constexpr int kHosts = 8;
  std::atomic<int> answered{0}, refused{0};
  std::vector<std::thread> hosts;
  for (int host = 0; host < kHosts; ++host) {
    hosts.emplace_back([&, host] {
      const uint64_t id = 1 + host;
      const auto stub = v1::AttentionService::NewStub(
          grpc::CreateChannel(address_, grpc::InsecureChannelCredentials()));
      ASSERT_TRUE(Open(*stub, "m", id).ok());
      for (int64_t position = 0;; position = (position + 1) % 100) {
        v1::AttendReply reply;
        // A second round repeats the first: the bytes are those held.
        const grpc::Status status =
            Attend(*stub, AttendOf(spec, "m", id, position, 1, 0, id + position), &reply);
        if (!status.ok()) {
          // Refused by the service before it was accepted; anything else, a connection that broke
          // too, is an accepted call that failed.
          EXPECT_EQ(status.error_code(), StatusCode::UNAVAILABLE) << status.error_message();
          EXPECT_THAT(status.error_message(), HasSubstr("the service is shutting down"));
          ++refused;
          return;
        }
        EXPECT_GE(reply.lengths(0), position + 1);
        ++answered;
      }
    });
  }
  EXPECT_TRUE(test::Eventually(kPatience, [&] { return answered > 20 * kHosts; }));
  process->Signal(SIGTERM);
  for (std::thread& host : hosts) host.join();
  EXPECT_EQ(refused, kHosts);
  EXPECT_EQ(process->Wait(kPatience), 0);
  EXPECT_THAT(process->Log(), ::testing::Not(HasSubstr("still in flight")));
}

TEST_F(ProcessTest, IdleConnectionsAndStreamsDoNotHoldTheEnd) {
  auto process = StartServing({"--drain_timeout=1h"});
  grpc::ClientContext context;
  const auto stream = stub_->AttendStream(&context);
  v1::GetTopologyReply reply;
  grpc::ClientContext other;
  ASSERT_TRUE(stub_->GetTopology(&other, {}, &reply).ok());
  process->Signal(SIGTERM);
  EXPECT_EQ(process->Wait(kPatience), 0);
  v1::AttendReply none;
  EXPECT_FALSE(stream->Read(&none));
  EXPECT_EQ(stream->Finish().error_code(), StatusCode::UNAVAILABLE);
}

TEST_F(ProcessTest, ASecondSignalEndsAtOnce) {
  // The call waits for company and so keeps the drain open.
  auto process = StartServing({"--batch_window=1s", "--drain_timeout=1h"});
  const v1::CacheSpec spec = SmallSpec();
  ASSERT_TRUE(CreateCache(*stub_, "m", spec).ok());
  ASSERT_TRUE(Open(*stub_, "m", 1).ok());
  std::thread call([&] {
    for (int64_t position = 0;; ++position) {
      v1::AttendReply reply;
      if (!Attend(*stub_, AttendOf(spec, "m", 1, position, 1), &reply).ok()) return;
    }
  });
  EXPECT_TRUE(test::Eventually(kPatience, [&] {
    grpc::ClientContext context;
    v1::GetTopologyReply reply;
    return stub_->GetTopology(&context, {}, &reply).ok() && reply.statistics().requests() > 0;
  }));
  process->Signal(SIGTERM);
  EXPECT_TRUE(test::Eventually(
      kPatience, [&] { return process->Log().find("draining") != std::string::npos; }));
  process->Signal(SIGTERM);
  const auto code = process->Wait(kPatience);
  // The call may have ended before the second signal came.
  EXPECT_TRUE(code == 128 + SIGTERM || code == 0) << code.value_or(-1000);
  call.join();
}

}  // namespace
}  // namespace tributary::service::testing
