// Coordinator, workers and command line with tokens and certificates, as processes.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "base/rpc/channel_security.h"
#include "google/protobuf/descriptor.h"
#include "service/client/client.h"
#include "tests/fault/programs.h"
#include "tests/service/access/certificates.h"
#include "tests/service/raw_call.h"
#include "tributary/v1/attention.grpc.pb.h"
#include "tributary/v1/diagnostics.grpc.pb.h"
#include "tributary/v1/worker.grpc.pb.h"

namespace tributary::test {
namespace {

using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr seconds kPatience{60};

class AccessProcess : public ::testing::Test {
 protected:
  AccessProcess() {
    Write("tokens",
          "model client 0123456789abcdef-model\n"
          "ranks worker 0123456789abcdef-worker\n"
          "ops admin 0123456789abcdef-ops\n");
    Write("model.token", "0123456789abcdef-model\n");
    Write("worker.token", "0123456789abcdef-worker\n");
    Write("ops.token", "0123456789abcdef-ops\n");
  }

  void Write(const std::string& name, const std::string& text) {
    std::ofstream(directory_.File(name)) << text;
  }
  std::string File(const std::string& name) const { return directory_.File(name); }

  // A coordinator of `workers` with a certificate and the tokens.
  void Serve(int workers, std::vector<std::string> more = {}) {
    const TlsFiles files = authority_.Issue("coordinator");
    more.insert(more.end(), {"--tls_cert=" + files.certificate, "--tls_key=" + files.key});
    coordinator_ = StartCoordinator(directory_, workers, more);
  }
  std::vector<std::string> WorkerFlags(const std::string& token) const {
    return {"--tls_ca=" + authority_.file(), "--token_file=" + File(token)};
  }
  client::ConnectOptions ClientOptions(const std::string& token) const {
    client::ConnectOptions options{.target = PublicAddress(directory_)};
    options.security.tls.authorities = authority_.file();
    if (!token.empty()) options.security.token_file = File(token);
    return options;
  }
  // Whether the group is seen to be ready, as the operator.
  bool WaitReady() {
    const auto client = client::Client::Connect(ClientOptions("ops.token"));
    if (!client.ok()) return false;
    return Eventually(kPatience, [&] {
      const auto topology = (*client)->GetTopology({});
      return topology.ok() && topology->state() == v1::GROUP_STATE_READY;
    });
  }

  const TemporaryDirectory directory_;
  Authority authority_;
  std::unique_ptr<ChildProcess> coordinator_;
};

TEST_F(AccessProcess, RolesAreKeptApartByTokens) {
  Serve(2, {"--token_file=" + File("tokens")});
  const auto first =
      StartWorker(directory_, WorkerAddress(directory_), 0, WorkerFlags("worker.token"));
  // A host's token is not a worker's.
  const auto impostor =
      StartWorker(directory_, WorkerAddress(directory_), 1, WorkerFlags("model.token"));
  EXPECT_TRUE(Eventually(kPatience, [&] {
    return impostor->Log().find("does not have the role worker") != std::string::npos;
  }));
  EXPECT_TRUE(Eventually(kPatience, [&] {
    return coordinator_->Log().find("waiting for workers missing=rank 1") != std::string::npos;
  })) << coordinator_->Log();
  EXPECT_THAT(coordinator_->Log(),
              AllOf(HasSubstr("a worker was refused"), HasSubstr("does not have the role worker")));
  const auto second =
      StartWorker(directory_, WorkerAddress(directory_), 1, WorkerFlags("worker.token"));
  ASSERT_TRUE(WaitReady());

  v1::CacheSpec spec;
  spec.set_layers(1);
  spec.set_q_heads(2);
  spec.set_kv_heads(1);
  spec.set_head_dim(64);
  spec.set_capacity_tokens(1'024);
  const auto as = [&](const std::string& token) {
    client::ConnectOptions options = ClientOptions(token);
    options.max_attempts = 1;
    const auto client = client::Client::Connect(options);
    EXPECT_TRUE(client.ok()) << client.status();
    return (*client)->CreateCache("m", spec).status().code();
  };
  EXPECT_EQ(as("ops.token"), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(as("worker.token"), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(as(""), absl::StatusCode::kUnauthenticated);
  EXPECT_EQ(as("model.token"), absl::StatusCode::kOk);

  // A token that is taken away works no longer; the others do.
  Write("tokens",
        "ranks worker 0123456789abcdef-worker\n"
        "ops admin 0123456789abcdef-ops\n");
  EXPECT_TRUE(Eventually(kPatience,
                         [&] { return as("model.token") == absl::StatusCode::kUnauthenticated; }));
  EXPECT_TRUE(WaitReady());
}

TEST_F(AccessProcess, CallersShowTheTokenThatTheirFileHasNow) {
  Serve(1, {"--token_file=" + File("tokens")});
  const auto worker =
      StartWorker(directory_, WorkerAddress(directory_), 0, WorkerFlags("worker.token"));
  ASSERT_TRUE(WaitReady());
  client::ConnectOptions options = ClientOptions("model.token");
  options.max_attempts = 1;
  const auto client = client::Client::Connect(options);
  ASSERT_TRUE(client.ok()) << client.status();
  const auto code = [&] { return (*client)->GetTopology({}).status().code(); };
  ASSERT_EQ(code(), absl::StatusCode::kOk);
  Write("tokens",
        "model client 0123456789abcdef-again\n"
        "ranks worker 0123456789abcdef-worker\n");
  EXPECT_TRUE(Eventually(kPatience, [&] { return code() == absl::StatusCode::kUnauthenticated; }));
  Write("model.token", "0123456789abcdef-again\n");
  EXPECT_TRUE(Eventually(kPatience, [&] { return code() == absl::StatusCode::kOk; }))
      << "the same connection, with what its file says now";
}

TEST_F(AccessProcess, OnlyAWorkerWithTheGroupsSecretJoins) {
  Write("secret", "0123456789abcdef-group\n");
  Write("other", "0123456789abcdef-other\n");
  coordinator_ = StartCoordinator(directory_, 1, {"--join_secret_file=" + File("secret")});
  const auto joined = [&] {
    const auto client = client::Client::Connect({.target = PublicAddress(directory_)});
    if (!client.ok()) return false;
    const auto topology = (*client)->GetTopology({});
    return topology.ok() && topology->workers(0).connected();
  };
  {
    const auto without = StartWorker(directory_, WorkerAddress(directory_), 0);
    EXPECT_TRUE(Eventually(kPatience, [&] {
      return without->Log().find("wants a join secret") != std::string::npos;
    })) << without->Log();
    const auto wrong = StartWorker(directory_, WorkerAddress(directory_), 0,
                                   {"--join_secret_file=" + File("other")});
    EXPECT_TRUE(Eventually(kPatience, [&] {
      return wrong->Log().find("is not this group's") != std::string::npos;
    })) << wrong->Log();
    EXPECT_FALSE(joined());
  }
  const auto right = StartWorker(directory_, WorkerAddress(directory_), 0,
                                 {"--join_secret_file=" + File("secret")});
  EXPECT_TRUE(Eventually(kPatience, joined)) << right->Log();
}

// gRPC ends the process that gives it metadata of other bytes, and a file that is being written is
// empty for a moment.
TEST_F(AccessProcess, AFileWithoutAUsableTokenLeavesTheCallersAsItWas) {
  Serve(1, {"--token_file=" + File("tokens")});
  const auto worker =
      StartWorker(directory_, WorkerAddress(directory_), 0, WorkerFlags("worker.token"));
  ASSERT_TRUE(WaitReady());
  const auto client = client::Client::Connect(ClientOptions("model.token"));
  ASSERT_TRUE(client.ok()) << client.status();
  for (const std::string text :
       {"", "\n0123456789abcdef-model\n", "\xef\xbb\xbftoken\n", "a\x01b\n"}) {
    Write("model.token", text);
    // Longer than a token is taken for what its file says.
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(1'300);
    while (std::chrono::steady_clock::now() < end) {
      ASSERT_TRUE((*client)->GetTopology({}).ok());
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  }
}

// Every method that there is, so that none can be added without a role.
TEST_F(AccessProcess, EveryMethodHasItsRoles) {
  Serve(1, {"--token_file=" + File("tokens")});
  ASSERT_TRUE(Eventually(
      kPatience, [&] { return coordinator_->Log().find("listening") != std::string::npos; }));
  const auto dial = [&](const std::string& address, const std::string& token) {
    const auto channel =
        DialSecurely(address, ClientOptions(token).security, grpc::ChannelArguments());
    EXPECT_TRUE(channel.ok()) << channel.status();
    return *channel;
  };
  const auto roles_of = [](const std::string& service, const std::string& method) {
    if (service == "GroupService") return std::set<std::string>{"worker.token"};
    if (service == "DiagnosticsService") return std::set<std::string>{"ops.token"};
    std::set<std::string> roles = {"model.token"};
    if (method == "DeleteCache" || method == "GetTopology" || method == "GetLimits") {
      roles.insert("ops.token");
    }
    return roles;
  };
  int methods = 0;
  for (const google::protobuf::FileDescriptor* file :
       {v1::AttendRequest::descriptor()->file(), v1::FlightRecord::descriptor()->file(),
        v1::WorkerMessage::descriptor()->file()}) {
    ASSERT_EQ(file->service_count(), 1) << file->name();
    const google::protobuf::ServiceDescriptor* const service = file->service(0);
    const std::string& name = service->name();
    const std::string address =
        name == "GroupService" ? WorkerAddress(directory_) : PublicAddress(directory_);
    for (const std::string token : {"", "model.token", "worker.token", "ops.token"}) {
      const auto channel = dial(address, token);
      for (int i = 0; i < service->method_count(); ++i, ++methods) {
        const std::string& method = service->method(i)->name();
        const grpc::StatusCode code =
            service::testing::RawCall(channel, "/tributary.v1." + name + "/" + method, "",
                                      kPatience)
                .status.error_code();
        const std::string what = name + "." + method + " with '" + token + "'";
        if (token.empty()) {
          EXPECT_EQ(code, grpc::StatusCode::UNAUTHENTICATED) << what;
        } else if (roles_of(name, method).count(token) == 0) {
          EXPECT_EQ(code, grpc::StatusCode::PERMISSION_DENIED) << what;
        } else {  // let in: refused for what the empty message asks, or not at all
          EXPECT_THAT(code, AnyOf(grpc::StatusCode::OK, grpc::StatusCode::INVALID_ARGUMENT,
                                  grpc::StatusCode::NOT_FOUND, grpc::StatusCode::UNAVAILABLE))
              << what;
        }
      }
    }
  }
  EXPECT_GE(methods, 4 * 15);
}

TEST_F(AccessProcess, AWorkerIsKnownByTheNameInItsCertificate) {
  Serve(1, {"--tls_client_ca=" + authority_.file(), "--worker_san=*.workers.example",
            "--admin_san=ops.example"});
  const auto flags = [&](const std::string& name) -> std::vector<std::string> {
    const TlsFiles files = authority_.Issue(name, {{name}});
    return {"--tls_ca=" + authority_.file(), "--tls_cert=" + files.certificate,
            "--tls_key=" + files.key};
  };
  {
    const auto impostor =
        StartWorker(directory_, WorkerAddress(directory_), 0, flags("ops.example"));
    EXPECT_TRUE(Eventually(kPatience, [&] {
      return impostor->Log().find("does not have the role worker") != std::string::npos;
    }));
  }
  const auto worker =
      StartWorker(directory_, WorkerAddress(directory_), 0, flags("w0.workers.example"));
  client::ConnectOptions options = ClientOptions("");
  const TlsFiles ops = authority_.Issue("ops", {{"ops.example"}});
  options.security.tls.certificate = ops.certificate;
  options.security.tls.key = ops.key;
  const auto client = client::Client::Connect(options);
  ASSERT_TRUE(client.ok()) << client.status();
  EXPECT_TRUE(Eventually(kPatience, [&] {
    const auto topology = (*client)->GetTopology({});
    return topology.ok() && topology->state() == v1::GROUP_STATE_READY;
  }));
}

TEST_F(AccessProcess, TheCommandLineShowsItsToken) {
  Serve(1, {"--token_file=" + File("tokens")});
  const auto worker =
      StartWorker(directory_, WorkerAddress(directory_), 0, WorkerFlags("worker.token"));
  ASSERT_TRUE(WaitReady());
  const auto run = [&](std::vector<std::string> flags) {
    flags.insert(flags.begin(),
                 {TRIBUTARY_CLI_PROGRAM, "topology", "--target=" + PublicAddress(directory_),
                  "--tls_ca=" + authority_.file()});
    return ChildProcess(std::move(flags), directory_.File("cli.log")).Wait(kPatience);
  };
  EXPECT_EQ(run({"--token_file=" + File("ops.token")}), 0);
  EXPECT_NE(run({}), 0);
  EXPECT_THAT(ReadWholeFile(directory_.File("cli.log")), HasSubstr("no token"));
}

// Workers that speak TLS to the coordinator speak it to each other, without being told.
TEST_F(AccessProcess, WhatWorkersSayToEachOtherIsUnderTls) {
  Serve(2, {"--token_file=" + File("tokens")});
  const auto first =
      StartWorker(directory_, WorkerAddress(directory_), 0, WorkerFlags("worker.token"));
  // One that was told otherwise is named, by itself and by its peer, and the group waits.
  std::vector<std::string> plain = WorkerFlags("worker.token");
  plain.push_back("--peer_tls=never");
  {
    const auto other = StartWorker(directory_, WorkerAddress(directory_), 1, plain);
    EXPECT_TRUE(Eventually(kPatience, [&] {
      return first->Log().find(
                 "rank 1 reaches its peers by Gloo over TCP, rank 0 by TCP under "
                 "TLS 1.3: --peer_tls") != std::string::npos;
    })) << first->Log();
    EXPECT_TRUE(Eventually(kPatience, [&] {
      return other->Log().find(
                 "rank 0 reaches its peers by TCP under TLS 1.3, rank 1 by Gloo "
                 "over TCP: --peer_tls") != std::string::npos;
    })) << other->Log();
    const auto client = client::Client::Connect(ClientOptions("ops.token"));
    ASSERT_TRUE(client.ok()) << client.status();
    EXPECT_EQ((*client)->GetTopology({})->state(), v1::GROUP_STATE_FORMING);
    EXPECT_THAT(coordinator_->Log(),
                AllOf(HasSubstr("the group could not be formed"), HasSubstr("could not join: rank"),
                      HasSubstr("Gloo over TCP")));
  }
  const auto second =
      StartWorker(directory_, WorkerAddress(directory_), 1, WorkerFlags("worker.token"));
  ASSERT_TRUE(WaitReady());
  const auto run = [&](const std::string& command, const std::string& token) {
    std::filesystem::remove(directory_.File("cli.log"));
    const auto code =
        ChildProcess({TRIBUTARY_CLI_PROGRAM, command, "--target=" + PublicAddress(directory_),
                      "--tls_ca=" + authority_.file(), "--token_file=" + File(token)},
                     directory_.File("cli.log"))
            .Wait(kPatience);
    EXPECT_EQ(code, 0) << ReadWholeFile(directory_.File("cli.log"));
    return ReadWholeFile(directory_.File("cli.log"));
  };
  EXPECT_THAT(run("topology", "ops.token"),
              HasSubstr("partials meet in host memory, by TCP under TLS 1.3"));
  run("check", "model.token");  // attention against a known answer
}

TEST_F(AccessProcess, AWorkerDoesNotLearnInPlainTextWhomToTrust) {
  const auto worker = StartWorker(directory_, "127.0.0.1:1", 0, {"--peer_tls=always"});
  EXPECT_EQ(worker->Wait(kPatience), 2);
  EXPECT_THAT(worker->Log(), HasSubstr("peer_tls"));
  EXPECT_THAT(worker->Log(), HasSubstr("--tls_ca must be given"));
  const auto unknown =
      StartWorker(directory_, WorkerAddress(directory_), 0, {"--peer_tls=sometimes"});
  EXPECT_EQ(unknown->Wait(kPatience), 2);
  EXPECT_THAT(unknown->Log(), HasSubstr("must be auto, always or never"));
}

// Which of name, trust, certificate and plain text it was, and by which name a service is known.
TEST_F(AccessProcess, TheCommandLineSaysWhyTlsFailed) {
  const TlsFiles server = authority_.Issue("server", {.names = {"service.example"}});
  const TlsFiles operators = authority_.Issue("ops", {.names = {"ops.example"}});
  const Authority other;
  const TemporaryDirectory plain_directory;
  coordinator_ = StartCoordinator(directory_, 1,
                                  {"--tls_cert=" + server.certificate, "--tls_key=" + server.key,
                                   "--tls_client_ca=" + authority_.file()});
  const auto plain = StartCoordinator(plain_directory, 1, {});
  const auto said = [&](const TemporaryDirectory& where, std::vector<std::string> flags) {
    flags.insert(flags.begin(),
                 {TRIBUTARY_CLI_PROGRAM, "topology", "--target=" + PublicAddress(where)});
    std::filesystem::remove(directory_.File("cli.log"));
    EXPECT_EQ(ChildProcess(std::move(flags), directory_.File("cli.log")).Wait(kPatience), 1);
    return ReadWholeFile(directory_.File("cli.log"));
  };
  const std::string trusting = "--tls_ca=" + authority_.file();
  const std::string named = "--tls_server_name=service.example";
  const std::vector<std::string> own = {"--tls_cert=" + operators.certificate,
                                        "--tls_key=" + operators.key};
  ASSERT_TRUE(Eventually(kPatience, [&] {
    return ChildProcess({TRIBUTARY_CLI_PROGRAM, "topology", "--target=" + PublicAddress(directory_),
                         trusting, named, own[0], own[1]},
                        directory_.File("cli.log"))
               .Wait(kPatience) == 0;
  })) << ReadWholeFile(directory_.File("cli.log"));
  EXPECT_THAT(said(directory_, {trusting, own[0], own[1]}), HasSubstr("does not name"));
  EXPECT_THAT(said(directory_, {"--tls_ca=" + other.file(), named, own[0], own[1]}),
              HasSubstr("is not trusted"));
  EXPECT_THAT(said(directory_, {trusting, named}), HasSubstr("it may want a certificate"));
  EXPECT_THAT(said(directory_, {}), HasSubstr("it may want TLS"));
  EXPECT_TRUE(Eventually(kPatience, [&] {
    return said(plain_directory, {trusting, named}).find("speaks plain text") != std::string::npos;
  }));
}

struct Refused {
  const char* field;
  std::vector<std::string> flags;
};

class RefusedSettings : public AccessProcess, public ::testing::WithParamInterface<Refused> {};

TEST_P(RefusedSettings, EndWithCode2AndTheSettingsName) {
  const auto process = StartCoordinator(directory_, 1, GetParam().flags);
  EXPECT_EQ(process->Wait(kPatience), 2);
  EXPECT_THAT(process->Log(), HasSubstr(GetParam().field));
}

INSTANTIATE_TEST_SUITE_P(
    Settings, RefusedSettings,
    ::testing::Values(Refused{"listen", {"--listen=0.0.0.0:0"}},
                      Refused{"worker_listen", {"--worker_listen=[::]:0"}},
                      Refused{"tls_key", {"--tls_cert=/nowhere.pem"}},
                      Refused{"tls_cert", {"--tls_cert=/nowhere.pem", "--tls_key=/nowhere.key"}},
                      Refused{"tls_client_ca", {"--tls_client_ca=/nowhere.pem"}},
                      Refused{"tls_client_ca", {"--worker_san=w.example"}},
                      Refused{"token_file", {"--token_file=/nowhere"}}));

TEST_F(AccessProcess, BeyondThisMachineInPlainTextOnlyWhenAskedTo) {
  const auto process =
      StartCoordinator(directory_, 0, {"--listen=0.0.0.0:0", "--insecure", "--embedded_workers=1"});
  EXPECT_TRUE(
      Eventually(kPatience, [&] { return process->Log().find("listening") != std::string::npos; }));
  process->Signal(SIGTERM);
  EXPECT_EQ(process->Wait(kPatience), 0);
}

}  // namespace
}  // namespace tributary::test
