// Sequences that belong to the lease of the host that opened them, over the public API.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "service/client/client.h"
#include "tests/service/test_service.h"
#include "tests/support/process.h"

namespace tributary::service::testing {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

// Anything comes about in this time, on a busy machine too.
constexpr std::chrono::seconds kPatience{45};
constexpr milliseconds kShort{50};
constexpr std::chrono::hours kLong{1};

class LeaseCalls : public ::testing::Test {
 protected:
  void Serve(milliseconds timeout) {
    TestService::Options options;
    options.workers = 2;
    options.coordinator.lease_timeout = timeout;
    service_ = std::make_unique<TestService>(std::move(options));
    ASSERT_TRUE(CreateCache(service_->stub(), "m", SmallSpec()).ok());
  }
  std::unique_ptr<client::Client> Host(const std::string& lease) {
    auto client = client::Client::Connect({.target = service_->address(), .lease = lease});
    EXPECT_TRUE(client.ok()) << client.status();
    return *std::move(client);
  }
  uint64_t OpenBy(client::Client& host) {
    const auto id = host.OpenSequence("m");
    EXPECT_TRUE(id.ok()) << id.status();
    return id.value_or(0);
  }
  std::vector<uint64_t> Sequences() {
    std::vector<uint64_t> ids;
    const v1::GetTopologyReply topology = service_->Topology();
    for (const auto& sequence : topology.caches(0).sequence()) {
      ids.push_back(sequence.sequence_id());
    }
    return ids;
  }
  static std::vector<uint64_t> LeasedBy(client::Client& host) {
    std::vector<uint64_t> ids;
    const auto sequences = host.LeasedSequences();
    EXPECT_TRUE(sequences.ok()) << sequences.status();
    for (const v1::LeasedSequence& sequence : *sequences) ids.push_back(sequence.sequence_id());
    return ids;
  }
  bool WaitFor(const std::vector<uint64_t>& ids) {
    return test::Eventually(kPatience, [&] {
      return ::testing::Matches(::testing::UnorderedElementsAreArray(ids))(Sequences());
    });
  }

  std::unique_ptr<TestService> service_;
};

TEST_F(LeaseCalls, SequencesOfADeadHostAreClosed) {
  Serve(std::chrono::seconds(3));  // which a host that lives renews in time on a busy machine, too
  const uint64_t unleased = OpenBy(*Host(""));
  auto host = Host("host-1");
  const uint64_t opened = OpenBy(*host);
  v1::AttendReply reply;
  ASSERT_TRUE(Attend(service_->stub(), AttendOf(SmallSpec(), "m", unleased, 0, 20), &reply).ok());
  ASSERT_TRUE(host->ForkSequence("m", opened, std::nullopt).ok());
  ASSERT_TRUE(host->ForkSequence("m", unleased, std::nullopt).ok());
  ASSERT_TRUE(host->UpdateSequences("m", {{}, {}}).ok());
  EXPECT_EQ(service_->Topology().caches(0).sequences(), 6);
  host.reset();  // it closes nothing
  EXPECT_TRUE(WaitFor({unleased}));
  EXPECT_TRUE(test::Eventually(kPatience, [&] {
    const Snapshot now = service_->coordinator().TakeSnapshot();
    return now.closed_by_leases == 5 && now.leases == 0;
  }));
  EXPECT_EQ(service_->Topology().caches(0).pages_used(), 1);
}

// A stream that is open holds the lease, for as long as it may be silent.
TEST_F(LeaseCalls, AnOpenStreamHoldsIt) {
  Serve(kShort);
  grpc::ClientContext context;
  context.AddMetadata("tributary-lease", "host-1");
  const auto stream = service_->stub().AttendStream(&context);
  // The service answers this, so it has the stream.
  v1::AttendRequest bad;
  v1::AttendReply reply;
  ASSERT_TRUE(stream->Write(bad));
  ASSERT_TRUE(stream->Read(&reply));
  const uint64_t id = [&] {
    grpc::ClientContext call;
    call.AddMetadata("tributary-lease", "host-1");
    v1::OpenSequenceRequest request;
    request.set_cache_id("m");
    v1::OpenSequenceReply opened;
    EXPECT_TRUE(service_->stub().OpenSequence(&call, request, &opened).ok());
    return opened.sequence_id();
  }();
  std::this_thread::sleep_for(10 * kShort);
  EXPECT_THAT(Sequences(), ElementsAre(id));
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_TRUE(WaitFor({}));
}

TEST_F(LeaseCalls, WhoPresentsItHasAdoptedItsSequences) {
  Serve(kLong);
  auto host = Host("host-1");
  const uint64_t first = OpenBy(*host), second = OpenBy(*host);
  const uint64_t of_another = OpenBy(*Host("host-2"));
  v1::AttendReply reply;
  ASSERT_TRUE(Attend(service_->stub(), AttendOf(SmallSpec(), "m", first, 0, 20), &reply).ok());
  host.reset();
  host = Host("host-1");
  EXPECT_THAT(LeasedBy(*host), UnorderedElementsAre(first, second));
  EXPECT_THAT(LeasedBy(*Host("host-2")), ElementsAre(of_another));
  EXPECT_THAT(LeasedBy(*Host("host-3")), IsEmpty());
  EXPECT_TRUE(host->CloseSequence("m", first).ok());
  EXPECT_THAT(LeasedBy(*host), ElementsAre(second));
  // A sequence goes over to whoever opens it again.
  grpc::ClientContext call;
  call.AddMetadata("tributary-lease", "host-2");
  v1::OpenSequenceRequest request;
  request.set_cache_id("m");
  request.set_sequence_id(second);
  v1::OpenSequenceReply opened;
  EXPECT_TRUE(service_->stub().OpenSequence(&call, request, &opened).ok());
  EXPECT_THAT(LeasedBy(*host), IsEmpty());
  EXPECT_FALSE(Host("")->LeasedSequences().ok());
}

TEST_F(LeaseCalls, BadNamesAreRefused) {
  Serve(kLong);
  grpc::ClientContext call;
  call.AddMetadata("tributary-lease", "not a lease");
  v1::OpenSequenceRequest request;
  request.set_cache_id("m");
  v1::OpenSequenceReply opened;
  const grpc::Status refused = service_->stub().OpenSequence(&call, request, &opened);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(FieldOf(refused), "tributary-lease");
  EXPECT_THAT(Sequences(), IsEmpty());

  grpc::ClientContext on_stream;
  on_stream.AddMetadata("tributary-lease", std::string(129, 'x'));
  const auto stream = service_->stub().AttendStream(&on_stream);
  v1::AttendReply reply;
  EXPECT_FALSE(stream->Read(&reply));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);

  grpc::ClientContext renewing;
  v1::RenewLeaseReply renewed;
  const grpc::Status empty = service_->stub().RenewLease(&renewing, {}, &renewed);
  EXPECT_EQ(FieldOf(empty), "lease");

  const auto client = client::Client::Connect({.target = service_->address(), .lease = "a b"});
  EXPECT_EQ(client::FieldOf(client.status()), "lease");
}

TEST_F(LeaseCalls, HowLongItHoldsIsTold) {
  Serve(kLong);
  EXPECT_EQ(Host("")->GetLimits()->lease_timeout_seconds(), 3600);
  grpc::ClientContext call;
  v1::RenewLeaseRequest request;
  request.set_lease("host-1");
  v1::RenewLeaseReply reply;
  EXPECT_TRUE(service_->stub().RenewLease(&call, request, &reply).ok());
  EXPECT_EQ(reply.timeout_seconds(), 3600);
}

}  // namespace
}  // namespace tributary::service::testing
