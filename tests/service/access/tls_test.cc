// Servers that speak TLS: who gets in, who does not, and certificates that rotate under load.

#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/rpc/channel_security.h"
#include "service/client/client.h"
#include "tests/service/access/certificates.h"
#include "tests/service/test_service.h"

namespace tributary::service::testing {
namespace {

using ::grpc::StatusCode;
using std::chrono::milliseconds;
using std::chrono::seconds;
using test::Authority;

// A service whose callers are hosts named model.example and operators named ops.example.
class TlsTest : public ::testing::Test {
 protected:
  void Serve(bool mutual, int64_t max_calls = 0, std::chrono::milliseconds window = {}) {
    TestService::Options options{.workers = 1};
    options.coordinator.batch.window = window;
    options.server.tls = server_files_;
    if (mutual) {
      options.server.tls.authorities = authorities_;
      const auto access = AccessControl::Create({.token_file = "",
                                                 .client_names = {"model.example"},
                                                 .worker_names = {},
                                                 .admin_names = {"ops.example"}});
      ASSERT_TRUE(access.ok()) << access.status();
      options.server.access = *access;
    }
    options.server.max_calls_per_client = max_calls;
    options.server.reflection = false;
    service_.emplace(options);
  }

  // Shows `files`, believes our authority.
  ChannelSecurity Trusting(const TlsFiles& files = {}) const {
    ChannelSecurity security{.tls = files, .token_file = ""};
    security.tls.authorities = authority_.file();
    return security;
  }
  ChannelSecurity Model() { return Trusting(authority_.Issue("model", {{"model.example"}})); }

  // What GetTopology over a channel of one's own answers.
  grpc::Status Ask(const std::shared_ptr<grpc::Channel>& channel) {
    const auto stub = v1::AttentionService::NewStub(channel);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + seconds(20));
    v1::GetTopologyReply reply;
    return stub->GetTopology(&context, {}, &reply);
  }
  std::shared_ptr<grpc::Channel> Dial(const ChannelSecurity& security) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    auto channel = DialSecurely(service_->address(), security, arguments);
    EXPECT_TRUE(channel.ok()) << channel.status();
    return *channel;
  }
  StatusCode AskAs(const ChannelSecurity& security) { return Ask(Dial(security)).error_code(); }

  Authority authority_;
  std::string authorities_ = authority_.file();  // whose certificates callers may show
  TlsFiles server_files_ = authority_.Issue("server");
  std::optional<TestService> service_;
};

TEST_F(TlsTest, WhoBelievesTheAuthorityIsServed) {
  Serve(/*mutual=*/false);
  EXPECT_EQ(AskAs(Trusting()), StatusCode::OK);
}

TEST_F(TlsTest, PlainTextIsNotSpoken) {
  Serve(/*mutual=*/false);
  EXPECT_EQ(AskAs({}), StatusCode::UNAVAILABLE);
}

TEST_F(TlsTest, AnotherAuthorityIsNotBelieved) {
  Serve(/*mutual=*/false);
  const Authority other;
  ChannelSecurity security;
  security.tls.authorities = other.file();
  EXPECT_EQ(AskAs(security), StatusCode::UNAVAILABLE);
}

TEST_F(TlsTest, AServerOfAnotherNameIsNotBelieved) {
  server_files_ = authority_.Issue("server", {{"elsewhere.example"}});
  Serve(/*mutual=*/false);
  EXPECT_EQ(AskAs(Trusting()), StatusCode::UNAVAILABLE);
}

TEST_F(TlsTest, AnExpiredServerIsNotBelieved) {
  server_files_ = authority_.Issue("server", {{"localhost"}, -7200, -3600});
  Serve(/*mutual=*/false);
  EXPECT_EQ(AskAs(Trusting()), StatusCode::UNAVAILABLE);
}

TEST_F(TlsTest, ClientsNeedACertificateOfOurAuthority) {
  Serve(/*mutual=*/true);
  EXPECT_EQ(AskAs(Model()), StatusCode::OK);
  EXPECT_EQ(AskAs(Trusting()), StatusCode::UNAVAILABLE);
  Authority other;
  EXPECT_EQ(AskAs(Trusting(other.Issue("model", {{"model.example"}}))), StatusCode::UNAVAILABLE);
  EXPECT_EQ(AskAs(Trusting(authority_.Issue("old", {{"model.example"}, -7200, -3600}))),
            StatusCode::UNAVAILABLE);
}

TEST_F(TlsTest, ANameWithoutARoleIsTurnedAwayAndNothingHappens) {
  Serve(/*mutual=*/true);
  const auto stranger = v1::AttentionService::NewStub(
      Dial(Trusting(authority_.Issue("stranger", {{"stranger.example"}}))));
  EXPECT_EQ(CreateCache(*stranger, "m", SmallSpec()).error_code(), StatusCode::UNAUTHENTICATED);
  const auto ops =
      v1::AttentionService::NewStub(Dial(Trusting(authority_.Issue("ops", {{"ops.example"}}))));
  EXPECT_EQ(CreateCache(*ops, "m", SmallSpec()).error_code(), StatusCode::PERMISSION_DENIED);
  grpc::ClientContext context;
  const auto stream = ops->AttendStream(&context);
  v1::AttendReply reply;
  EXPECT_FALSE(stream->Read(&reply));
  EXPECT_EQ(stream->Finish().error_code(), StatusCode::PERMISSION_DENIED);

  // Which both may see.
  EXPECT_EQ(AskAs(Trusting(authority_.Issue("ops", {{"ops.example"}}))), StatusCode::OK);
  const auto model = v1::AttentionService::NewStub(Dial(Model()));
  grpc::ClientContext asking;
  v1::GetTopologyReply topology;
  ASSERT_TRUE(model->GetTopology(&asking, {}, &topology).ok());
  EXPECT_EQ(topology.caches_size(), 0);
}

TEST_F(TlsTest, TheAdminAddressCarriesHealthOnly) {
  Serve(/*mutual=*/true);
  const auto channel =
      grpc::CreateChannel(service_->admin_address(), grpc::InsecureChannelCredentials());
  EXPECT_EQ(Ask(channel).error_code(), StatusCode::UNIMPLEMENTED);
}

TEST_F(TlsTest, ReflectionThatIsOffIsNotThere) {
  Serve(/*mutual=*/false);
  const auto channel = Dial(Trusting());
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + seconds(20));
  grpc::TemplatedGenericStub<v1::GetTopologyRequest, v1::GetTopologyReply> stub(channel);
  const v1::GetTopologyRequest request;
  v1::GetTopologyReply reply;
  std::promise<grpc::Status> status;
  stub.UnaryCall(&context, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", {},
                 &request, &reply, [&](const grpc::Status& s) { status.set_value(s); });
  EXPECT_EQ(status.get_future().get().error_code(), StatusCode::UNIMPLEMENTED);
}

TEST_F(TlsTest, ACallerHasNoMoreCallsInFlightThanItMay) {
  // The window keeps a call in flight until others have come.
  Serve(/*mutual=*/true, /*max_calls=*/1, std::chrono::milliseconds(200));
  client::ConnectOptions options{.target = service_->address(), .security = Model()};
  options.max_attempts = 1;
  const auto client = client::Client::Connect(options);
  ASSERT_TRUE(client.ok()) << client.status();
  ASSERT_TRUE((*client)->CreateCache("m", SmallSpec()).ok());
  const auto sequence = (*client)->OpenSequence("m");
  ASSERT_TRUE(sequence.ok());

  constexpr int kCalls = 64;
  const v1::CacheSpec spec = SmallSpec();
  const std::vector<float> token(static_cast<size_t>(spec.kv_heads() * spec.head_dim()));
  client::AppendCall append{.cache_id = "m", .layer = 0, .entries = {{*sequence, 0, 1}}};
  append.k = append.v = token.data();
  append.kv_heads = spec.kv_heads();
  append.head_dim = spec.head_dim();
  ASSERT_TRUE((*client)->Append(append).ok());
  const std::vector<float> q(static_cast<size_t>(spec.q_heads() * spec.head_dim()));
  std::vector<float> output(q.size() * kCalls);
  std::atomic<int> done{0};
  std::atomic<int> refused{0};
  std::atomic<int> other{0};
  for (int i = 0; i < kCalls; ++i) {
    client::AttendCall call{.cache_id = "m", .layer = 0, .entries = {{*sequence, 0, 1, 0}}};
    call.q = q.data();
    call.q_heads = spec.q_heads();
    call.kv_heads = spec.kv_heads();
    call.head_dim = spec.head_dim();
    call.output = output.data() + q.size() * static_cast<size_t>(i);
    (*client)->AttendAsync(call, [&](const absl::Status& status) {
      if (absl::IsResourceExhausted(status)) {
        ++refused;
      } else if (!status.ok()) {
        ++other;
      }
      ++done;
    });
  }
  ASSERT_TRUE(test::Eventually(seconds(20), [&] { return done == kCalls; }));
  EXPECT_EQ(other, 0);
  EXPECT_GT(refused, 0);
  EXPECT_LT(refused, kCalls);
  // The place is free again.
  EXPECT_TRUE((*client)->GetTopology({}).ok());
}

// Files of one version; `current` is a link that moves from one to the next, as Kubernetes does it.
class Versions {
 public:
  TlsFiles files() const { return {Path("current/cert.pem"), Path("current/key.pem"), ""}; }

  void MoveTo(const TlsFiles& issued) {
    const std::string version = std::to_string(++count_);
    std::filesystem::create_directory(Path(version));
    std::filesystem::copy_file(issued.certificate, Path(version + "/cert.pem"));
    std::filesystem::copy_file(issued.key, Path(version + "/key.pem"));
    std::filesystem::create_directory_symlink(version, Path("next"));
    std::filesystem::rename(Path("next"), Path("current"));
  }

 private:
  std::string Path(const std::string& name) const { return directory_.File(name); }

  const test::TemporaryDirectory directory_;
  int count_ = 0;
};

// Every connection meets the old certificate or the new one, and no call fails.
TEST_F(TlsTest, CertificatesRotateUnderLoad) {
  Versions versions;
  versions.MoveTo(authority_.Issue("first"));
  server_files_ = versions.files();
  Serve(/*mutual=*/true);
  const ChannelSecurity model = Model();
  // The certificate that a new connection is shown, as PEM; empty when the call fails.
  const auto shown = [&]() -> std::string {
    const auto stub = v1::AttentionService::NewStub(Dial(model));
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + seconds(20));
    v1::GetTopologyReply reply;
    if (!stub->GetTopology(&context, {}, &reply).ok()) return "";
    const auto values = context.auth_context()->FindPropertyValues("x509_pem_cert");
    return values.empty() ? "" : std::string(values[0].data(), values[0].size());
  };
  const std::string first = shown();
  ASSERT_FALSE(first.empty());

  std::atomic<bool> stop{false};
  std::atomic<int> failures{0};
  std::thread load([&] {
    const auto steady = Dial(model);  // one connection that stays
    while (!stop) {
      if (!Ask(steady).ok()) ++failures;
      if (!Ask(Dial(model)).ok()) ++failures;
    }
  });
  versions.MoveTo(authority_.Issue("second"));
  EXPECT_TRUE(test::Eventually(seconds(60), [&] {
    const std::string now = shown();
    if (now.empty()) ++failures;
    return !now.empty() && now != first;
  }));
  stop = true;
  load.join();
  EXPECT_EQ(failures, 0);
}

// The server comes to believe another authority, and a caller to show a certificate of that one.
TEST_F(TlsTest, AuthoritiesAndTheCertificatesOfCallersRotateToo) {
  Authority next;
  const test::TemporaryDirectory directory;
  authorities_ = directory.File("authorities.pem");
  const auto believe = [&](const Authority& authority) {
    std::filesystem::copy_file(authority.file(), directory.File("new.pem"));
    std::filesystem::rename(directory.File("new.pem"), authorities_);
  };
  believe(authority_);
  Serve(/*mutual=*/true);
  Versions versions;
  versions.MoveTo(authority_.Issue("before", {{"model.example"}}));
  const auto open = Dial(Trusting(versions.files()));
  const auto later = Dial(Trusting(versions.files()));  // connects with its first call
  ASSERT_TRUE(Ask(open).ok());

  believe(next);
  EXPECT_TRUE(test::Eventually(seconds(60), [&] {
    return AskAs(Model()) == StatusCode::UNAVAILABLE;
  })) << "a new connection with a certificate of the old authority";
  versions.MoveTo(next.Issue("after", {{"model.example"}}));
  EXPECT_TRUE(test::Eventually(seconds(60), [&] { return Ask(later).ok(); }));
  EXPECT_TRUE(Ask(open).ok()) << "what is connected stays";
}

}  // namespace
}  // namespace tributary::service::testing
