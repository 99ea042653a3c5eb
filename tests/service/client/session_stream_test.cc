#include "service/client/session_stream.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/support/client_interceptor.h>

#include <chrono>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "tests/service/client/fake_service.h"

namespace tributary::client {
namespace {

using grpc::experimental::InterceptionHookPoints;
using std::chrono::steady_clock;

// Holds the reader of a stream back at the stream's end: until a write has failed, and a moment.
class LateReader final : public grpc::experimental::Interceptor {
 public:
  explicit LateReader(absl::Notification* write_failed) : write_failed_(*write_failed) {}

  void Intercept(grpc::experimental::InterceptorBatchMethods* batch) override {
    if (batch->QueryInterceptionHookPoint(InterceptionHookPoints::POST_SEND_MESSAGE) &&
        !batch->GetSendMessageStatus() && !write_failed_.HasBeenNotified()) {
      write_failed_.Notify();
    }
    if (batch->QueryInterceptionHookPoint(InterceptionHookPoints::POST_RECV_MESSAGE) &&
        batch->GetRecvMessage() == nullptr) {
      write_failed_.WaitForNotificationWithTimeout(absl::Seconds(20));
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
    }
    batch->Proceed();
  }

 private:
  absl::Notification& write_failed_;
};

class LateReaders final : public grpc::experimental::ClientInterceptorFactoryInterface {
 public:
  explicit LateReaders(absl::Notification* write_failed) : write_failed_(write_failed) {}
  grpc::experimental::Interceptor* CreateClientInterceptor(
      grpc::experimental::ClientRpcInfo*) override {
    return new LateReader(write_failed_);
  }

 private:
  absl::Notification* write_failed_;
};

TEST(SessionStreamTest, AWriteThatFailsBeforeTheEndIsReadSaysWhyTheSessionEnded) {
  const SocketPath socket;
  FakeService service(socket);
  service.session_end = {grpc::StatusCode::ABORTED, "endpoint 1 left"};
  absl::Notification write_failed;
  std::vector<std::unique_ptr<grpc::experimental::ClientInterceptorFactoryInterface>> interceptors;
  interceptors.push_back(std::make_unique<LateReaders>(&write_failed));
  const auto stub =
      v1::AttentionService::NewStub(grpc::experimental::CreateCustomChannelWithInterceptors(
          socket.target(), grpc::InsecureChannelCredentials(), {}, std::move(interceptors)));
  const auto until = steady_clock::now() + std::chrono::seconds(20);
  auto stream = SessionStream::Open(stub.get(), v1::SessionRequest(), "", until);
  ASSERT_TRUE(stream.ok()) << stream.status();
  absl::Status written;
  while (written.ok() && steady_clock::now() < until) written = (*stream)->SendLayer({});
  EXPECT_EQ(written, absl::AbortedError("endpoint 1 left"));
}

}  // namespace
}  // namespace tributary::client
