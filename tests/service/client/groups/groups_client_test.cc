// A client of a service with many groups of workers.
#include "service/client/groups/groups_client.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_join.h"
#include "base/status/errors.h"
#include "tests/service/client/groups/stub_group.h"

namespace tributary::client {
namespace {

using std::chrono::milliseconds;

// Waits until something that a thread of the client brings about is so.
bool Eventually(const std::function<bool()>& so) {
  for (int i = 0; i < 1000; ++i) {
    if (so()) return true;
    std::this_thread::sleep_for(milliseconds(10));
  }
  return false;
}

class GroupsClientTest : public ::testing::Test {
 protected:
  void StartGroups(int count, int64_t pages = 1'000) {
    for (int i = 0; i < count; ++i) {
      groups_.push_back(std::make_unique<StubGroup>(1'000 + i, pages));
    }
  }
  std::string Target() const {
    std::vector<std::string> targets;
    for (const auto& group : groups_) targets.push_back(group->target());
    return absl::StrJoin(targets, ",");
  }
  void Connect() {
    auto client = ConnectToGroups(Options());
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
    ASSERT_TRUE(Eventually([this] { return AllAnswer(); }));
    ASSERT_TRUE(client_->CreateCache("m", {}).ok());
    // Until the client has seen the cache everywhere.
    const int seen = groups_.front()->topologies();
    ASSERT_TRUE(Eventually([&] {
      return std::all_of(groups_.begin(), groups_.end(),
                         [&](const auto& group) { return group->topologies() > seen + 1; });
    }));
  }
  bool AllAnswer() {
    const auto topology = client_->GetTopology({});
    return topology.ok() && topology->workers_size() == static_cast<int>(groups_.size());
  }
  GroupTableOptions Options() {
    GroupTableOptions options;
    options.connect.target = Target();
    options.connect.timeout = milliseconds(5'000);
    options.ask_every = milliseconds(50);
    options.answer_within = milliseconds(5'000);  // a busy machine is not a dead group
    return options;
  }
  StubGroup* GroupOf(uint64_t sequence) {
    for (const auto& group : groups_) {
      if (group->Has(sequence)) return group.get();
    }
    return nullptr;
  }
  absl::Status Append(uint64_t sequence, int tokens) {
    std::vector<float> k(tokens * 16);
    AppendCall call{.cache_id = "m", .entries = {{sequence, 0, tokens}}};
    call.k = call.v = k.data();
    call.kv_heads = 1;
    call.head_dim = 16;
    return client_->Append(call);
  }
  // A row of each sequence; the results must be the queries.
  absl::Status Attend(const std::vector<uint64_t>& sequences) {
    std::vector<float> q(sequences.size() * 16), output(q.size()), lse(sequences.size());
    for (size_t i = 0; i < q.size(); ++i) q[i] = static_cast<float>(i / 16) + 1;
    AttendCall call{.cache_id = "m"};
    for (const uint64_t id : sequences) call.entries.push_back({id, 0, 1, 1});
    call.q = call.k = call.v = q.data();
    call.q_heads = call.kv_heads = 1;
    call.head_dim = 16;
    call.output = output.data();
    call.lse = lse.data();
    const absl::Status status = client_->Attend(call);
    if (status.ok()) {
      EXPECT_EQ(output, q);
      for (size_t i = 0; i < lse.size(); ++i) EXPECT_EQ(lse[i], q[i * 16]);
    }
    return status;
  }
  int Strangers() const {
    int strangers = 0;
    for (const auto& group : groups_) strangers += group->strangers();
    return strangers;
  }

  std::vector<std::unique_ptr<StubGroup>> groups_;
  std::unique_ptr<Client> client_;
};

TEST_F(GroupsClientTest, SixtyFourGroupsFillEvenlyAndNoCallGoesToAWrongOne) {
  StartGroups(64);
  Connect();
  std::vector<uint64_t> sequences;
  for (int i = 0; i < 64 * 8; ++i) {
    const auto opened = client_->OpenSequence("m");
    ASSERT_TRUE(opened.ok()) << opened.status();
    sequences.push_back(*opened);
  }
  size_t least = sequences.size(), most = 0;
  for (const auto& group : groups_) {
    least = std::min(least, group->sequences());
    most = std::max(most, group->sequences());
  }
  EXPECT_GE(least, 7u);
  EXPECT_LE(most, 9u);

  std::mt19937 random(7);
  for (int round = 0; round < 10; ++round) {
    std::shuffle(sequences.begin(), sequences.end(), random);
    ASSERT_TRUE(Attend({sequences.begin(), sequences.begin() + 100}).ok());
  }
  for (int i = 0; i < 20; ++i) {
    const auto child = client_->ForkSequence("m", sequences[i], std::nullopt);
    ASSERT_TRUE(child.ok()) << child.status();
    EXPECT_EQ(GroupOf(*child), GroupOf(sequences[i])) << "a fork lives beside its parent";
    EXPECT_EQ(*client_->TargetOf(*child), GroupOf(*child)->target());
  }
  for (const uint64_t id : sequences) ASSERT_TRUE(client_->CloseSequence("m", id).ok());
  EXPECT_EQ(Strangers(), 0);
}

TEST_F(GroupsClientTest, NewSequencesGoWhereMostPagesAreFree) {
  StartGroups(2);
  Connect();
  const uint64_t large = *client_->OpenSequence("m");
  StubGroup* full = GroupOf(large);
  ASSERT_TRUE(Append(large, 16 * 500).ok());
  const int seen = full->topologies();
  ASSERT_TRUE(Eventually([&] { return full->topologies() > seen + 1; }));
  for (int i = 0; i < 20; ++i) EXPECT_NE(GroupOf(*client_->OpenSequence("m")), full);
}

TEST_F(GroupsClientTest, AFullGroupIsPassedOver) {
  StartGroups(1, /*pages=*/1);
  StartGroups(1, /*pages=*/1'000);
  groups_[1]->Forget(2'000);  // ids differ
  Connect();
  for (int i = 0; i < 5; ++i) {
    const auto opened = client_->OpenSequence("m");
    ASSERT_TRUE(opened.ok()) << opened.status();
    ASSERT_TRUE(Append(*opened, 1).ok());
  }
}

TEST_F(GroupsClientTest, AGroupThatIsGoneFailsItsOwnSequencesAlone) {
  StartGroups(3);
  Connect();
  std::vector<uint64_t> by_group(3);
  while (std::count(by_group.begin(), by_group.end(), 0u) > 0) {
    const uint64_t id = *client_->OpenSequence("m");
    for (int g = 0; g < 3; ++g) {
      if (groups_[g]->Has(id)) by_group[g] = id;
    }
  }
  groups_[1]->Stop();
  EXPECT_TRUE(Attend({by_group[0], by_group[2]}).ok());
  const int before = groups_[2]->attends();
  const absl::Status status = Attend(by_group);
  EXPECT_TRUE(absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status)) << status;
  EXPECT_EQ(groups_[2]->attends(), before + 1) << "the others' parts are done";
  for (int i = 0; i < 6; ++i) {
    const auto opened = client_->OpenSequence("m");
    ASSERT_TRUE(opened.ok()) << opened.status();
    EXPECT_FALSE(groups_[1]->Has(*opened));
  }
  groups_[1]->Start();
  EXPECT_TRUE(Eventually([&] { return Attend(by_group).ok(); })) << "it is back, and holds all";
  EXPECT_EQ(Strangers(), 0);
}

TEST_F(GroupsClientTest, AGroupThatBeganAnewHoldsNothingOfBefore) {
  StartGroups(2);
  Connect();
  uint64_t id = *client_->OpenSequence("m");
  StubGroup* group = GroupOf(id);
  group->Forget(5'000);
  EXPECT_TRUE(Eventually([&] { return absl::IsNotFound(client_->TargetOf(id).status()); }));
  EXPECT_EQ(FieldOf(Attend({id})), "entries[0].sequence_id");
  EXPECT_TRUE(Eventually([&] { return group->HasCache("m"); })) << "it is given the cache again";
}

TEST_F(GroupsClientTest, UnknownSequencesAreRefusedByName) {
  StartGroups(2);
  Connect();
  const uint64_t id = *client_->OpenSequence("m");
  EXPECT_EQ(client_->TargetOf(1).status().code(), absl::StatusCode::kNotFound);
  const absl::Status status = Attend({id, 1});
  EXPECT_TRUE(absl::IsNotFound(status)) << status;
  EXPECT_EQ(FieldOf(status), "entries[1].sequence_id");
  EXPECT_EQ(FieldOf(client_->ForkSequence("m", 1, std::nullopt).status()), "parent_id");
  // Known to the client as its group's, but not there any more: the group says so.
  ASSERT_TRUE(client_->CloseSequence("m", id).ok());
  const uint64_t other = *client_->OpenSequence("m");
  const absl::Status closed = Attend({other, id});
  EXPECT_EQ(FieldOf(closed), "entries[1].sequence_id") << closed;
}

TEST_F(GroupsClientTest, GroupsThatComeLaterAreServedToo) {
  StartGroups(2);
  std::atomic<int> found{1};
  GroupTableOptions options = Options();
  options.connect.target = "groups:tributary.inference:7400";
  options.resolve = [&](const std::string& name,
                        const std::string& port) -> absl::StatusOr<std::vector<std::string>> {
    EXPECT_EQ(name, "tributary.inference");
    EXPECT_EQ(port, "7400");
    std::vector<std::string> targets;
    for (int i = 0; i < found; ++i) targets.push_back(groups_[i]->target());
    return targets;
  };
  auto client = ConnectToGroups(options);
  ASSERT_TRUE(client.ok()) << client.status();
  client_ = *std::move(client);
  ASSERT_TRUE(client_->CreateCache("m", {}).ok());
  const uint64_t first = *client_->OpenSequence("m");
  EXPECT_TRUE(groups_[0]->Has(first));
  found = 2;
  EXPECT_TRUE(Eventually([&] { return groups_[1]->HasCache("m"); }));
  EXPECT_TRUE(Eventually([&] { return groups_[1]->Has(*client_->OpenSequence("m")); }));
  EXPECT_TRUE(Attend({first}).ok());
}

TEST_F(GroupsClientTest, TwoAddressesOfOneGroupServeAsOne) {
  StartGroups(2);
  groups_[1]->Forget(1'000);
  auto client = ConnectToGroups(Options());
  ASSERT_TRUE(client.ok()) << client.status();
  client_ = *std::move(client);
  ASSERT_TRUE(
      Eventually([&] { return groups_[0]->topologies() > 1 && groups_[1]->topologies() > 1; }));
  const auto topology = client_->GetTopology({});
  ASSERT_TRUE(topology.ok());
  EXPECT_EQ(topology->workers_size(), 1);
}

TEST_F(GroupsClientTest, CancelEndsEveryPartOfACall) {
  StartGroups(2);
  Connect();
  std::vector<uint64_t> sequences;
  while (sequences.size() < 2) {
    const auto sequence = client_->OpenSequence("m");
    ASSERT_TRUE(sequence.ok()) << sequence.status();
    if (sequences.empty() || GroupOf(*sequence) != GroupOf(sequences.front())) {
      sequences.push_back(*sequence);
    }
  }
  for (const auto& group : groups_) group->StopAnswering();
  std::vector<float> q(32), output(32);
  AttendCall call{.cache_id = "m", .entries = {{sequences[0], 0, 1, 1}, {sequences[1], 0, 1, 1}}};
  call.q = call.k = call.v = q.data();
  call.q_heads = call.kv_heads = 1;
  call.head_dim = 16;
  call.output = output.data();
  std::promise<absl::Status> done;
  std::future<absl::Status> ended = done.get_future();
  const uint64_t id = client_->AttendAsync(
      call, [&done](absl::Status status) { done.set_value(std::move(status)); });
  EXPECT_NE(id, 0u);
  // Through a client with another timeout, which is the same client otherwise.
  client_->WithTimeout(milliseconds(1))->Cancel(id);
  EXPECT_TRUE(absl::IsCancelled(ended.get()));
  client_->Cancel(id);  // over: nothing comes of it
}

TEST_F(GroupsClientTest, WithoutAnyGroupTheReasonsAreTold) {
  StartGroups(2);
  for (const auto& group : groups_) group->Stop();
  GroupTableOptions options = Options();
  options.connect.wait_for_service = false;
  const auto client = ConnectToGroups(options);
  EXPECT_TRUE(absl::IsUnavailable(client.status())) << client.status();
  for (const auto& group : groups_) {
    EXPECT_NE(client.status().message().find(group->target()), std::string::npos)
        << client.status();
  }
  EXPECT_EQ(FieldOf(Client::Connect({.target = "a:1,,b:1"}).status()), "target");
}

}  // namespace
}  // namespace tributary::client
