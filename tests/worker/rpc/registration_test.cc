// Who may join a group, and where.

#include "worker/rpc/registration.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "base/status/errors.h"
#include "worker/rpc/protocol.h"

namespace tributary::worker {
namespace {

const GroupFacts kGroup = {.size = 4, .group_id = 77, .epoch = 5, .backend = "cpu"};

v1::Registration Good(uint64_t instance_id) {
  v1::Registration registration;
  registration.set_protocol_version(kProtocolVersion);
  registration.set_minimum_protocol_version(kMinProtocolVersion);
  registration.set_instance_id(instance_id);
  registration.set_host("127.0.0.1");
  registration.set_backend("cpu");
  return registration;
}

struct Refusal {
  const char* field;
  uint64_t epoch;
  std::function<void(v1::Registration*)> spoil;
};

class Refused : public ::testing::TestWithParam<Refusal> {};

TEST_P(Refused, NamesTheField) {
  v1::Registration registration = Good(1);
  GetParam().spoil(&registration);
  const absl::Status status = CheckRegistration(kGroup, GetParam().epoch, registration);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_EQ(FieldOf(status), GetParam().field) << status;
}

INSTANTIATE_TEST_SUITE_P(
    Reasons, Refused,
    ::testing::Values(Refusal{"protocol_version", 0,
                              [](auto* r) {
                                r->set_protocol_version(99);
                                r->set_minimum_protocol_version(kProtocolVersion + 1);
                              }},
                      Refusal{"protocol_version", 0,
                              [](auto* r) {
                                r->set_protocol_version(kMinProtocolVersion - 1);
                                r->set_minimum_protocol_version(1);
                              }},
                      Refusal{"protocol_version", 0,
                              [](auto* r) {
                                r->set_protocol_version(99);
                                r->clear_minimum_protocol_version();
                              }},
                      Refusal{"backend", 0, [](auto* r) { r->set_backend("cuda"); }},
                      Refusal{"world_size", 0, [](auto* r) { r->set_world_size(3); }},
                      Refusal{"rank", 0, [](auto* r) { r->set_rank(4); }},
                      Refusal{"rank", 0, [](auto* r) { r->set_rank(-1); }},
                      Refusal{"instance_id", 0, [](auto* r) { r->set_instance_id(0); }},
                      Refusal{"epoch", 3, [](auto* r) { r->set_group_id(78); }},
                      Refusal{"epoch", 6, [](auto* r) { r->set_group_id(77); }}));

TEST(Registration, WorkersMayBeMeantForTheSizeThatTheGroupIsToHave) {
  GroupFacts group = kGroup;
  group.other_sizes = {8};
  v1::Registration meant = Good(1);
  meant.set_world_size(8);
  EXPECT_EQ(CheckRegistration(group, 0, meant), absl::OkStatus());
  meant.set_rank(5);
  EXPECT_EQ(FieldOf(CheckRegistration(group, 0, meant)), "rank") << "there is no place yet";
  meant.set_world_size(6);
  EXPECT_EQ(FieldOf(CheckRegistration(group, 0, meant)), "world_size");
}

TEST(Registration, WhatFitsIsTaken) {
  EXPECT_EQ(CheckRegistration(kGroup, 0, Good(1)), absl::OkStatus());
  v1::Registration full = Good(1);
  full.set_rank(3);
  full.set_world_size(4);
  full.set_group_id(77);
  EXPECT_EQ(CheckRegistration(kGroup, 5, full), absl::OkStatus());
}

TEST(Protocol, BothEndsSpeakTheHighestThatBothKnow) {
  const ProtocolRange ours = {.minimum = 7, .current = 8};
  EXPECT_EQ(CommonProtocol(ours, ours), 8u);
  EXPECT_EQ(CommonProtocol(ours, {.minimum = 6, .current = 7}), 7u);  // the one before
  EXPECT_EQ(CommonProtocol(ours, {.minimum = 8, .current = 9}), 8u);  // the one behind
  EXPECT_EQ(CommonProtocol(ours, {.minimum = 1, .current = 6}), std::nullopt);
  EXPECT_EQ(CommonProtocol(ours, {.minimum = 9, .current = 9}), std::nullopt);
  EXPECT_LT(SpokenProtocol().minimum, SpokenProtocol().current);
}

TEST(Registration, BuildsAndVersionsMayDiffer) {
  v1::Registration registration = Good(1);
  registration.set_build_version("another");
  registration.set_protocol_version(kProtocolVersion + 1);
  registration.set_minimum_protocol_version(kProtocolVersion);
  EXPECT_EQ(CheckRegistration(kGroup, 0, registration), absl::OkStatus());
  registration.set_protocol_version(kMinProtocolVersion);
  registration.clear_minimum_protocol_version();  // as before ranges were stated
  EXPECT_EQ(CheckRegistration(kGroup, 0, registration), absl::OkStatus());
}

TEST(Ranks, AnInstanceGetsItsOwnBack) {
  const std::vector<RankHistory> ranks = {{.instance_id = 1, .left = 1},
                                          {.instance_id = 2, .left = 2}};
  EXPECT_EQ(ChooseRank(ranks, Good(2)).value(), 1);
  EXPECT_EQ(ChooseRank(ranks, Good(1)).value(), 0);
}

TEST(Ranks, ANewInstanceTakesOneNobodyHadThenTheOneLeftFirst) {
  std::vector<RankHistory> ranks = {{.instance_id = 1, .connected = true},
                                    {.instance_id = 2, .left = 4},
                                    {.instance_id = 3, .left = 2},
                                    {}};
  EXPECT_EQ(ChooseRank(ranks, Good(9)).value(), 3);
  ranks[3] = {.instance_id = 9, .connected = true};
  EXPECT_EQ(ChooseRank(ranks, Good(10)).value(), 2);
}

// As after a restart of the coordinator: nobody is connected, and none has left.
TEST(Ranks, ThoseOfHoldersThatAreAwaitedAreKept) {
  std::vector<RankHistory> ranks = {{.instance_id = 1, .awaited = true},
                                    {.instance_id = 2, .awaited = true}};
  const absl::Status status = ChooseRank(ranks, Good(9)).status();
  EXPECT_EQ(FieldOf(status), "rank");
  EXPECT_THAT(status.message(), ::testing::HasSubstr("kept for a while"));
  EXPECT_EQ(ChooseRank(ranks, Good(2)).value(), 1);
  v1::Registration registration = Good(9);
  registration.set_rank(0);  // a process that was started anew for this rank
  EXPECT_EQ(ChooseRank(ranks, registration).value(), 0);
  ranks.push_back({});
  EXPECT_EQ(ChooseRank(ranks, Good(9)).value(), 2);
  for (RankHistory& rank : ranks) rank.awaited = false;
  ranks[2] = {.instance_id = 9, .connected = true};
  EXPECT_EQ(ChooseRank(ranks, Good(10)).value(), 0);
}

TEST(Ranks, ARankThatNobodyHadComesBeforeOnesThatWereNeverLeft) {
  const std::vector<RankHistory> ranks = {{.instance_id = 1}, {}};
  EXPECT_EQ(ChooseRank(ranks, Good(9)).value(), 1);
}

TEST(Ranks, TheRankAskedForIsGivenUnlessALiveInstanceHasIt) {
  std::vector<RankHistory> ranks = {{.instance_id = 1, .connected = true},
                                    {.instance_id = 2, .left = 1}};
  v1::Registration registration = Good(9);
  registration.set_rank(1);
  EXPECT_EQ(ChooseRank(ranks, registration).value(), 1);
  registration.set_rank(0);
  EXPECT_EQ(FieldOf(ChooseRank(ranks, registration).status()), "rank");
  registration.set_instance_id(1);  // the same worker, over a new connection
  EXPECT_EQ(ChooseRank(ranks, registration).value(), 0);
}

TEST(Ranks, NoneIsLeft) {
  const std::vector<RankHistory> ranks = {{.instance_id = 1, .connected = true},
                                          {.instance_id = 2, .connected = true}};
  const absl::Status status = ChooseRank(ranks, Good(3)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(FieldOf(status), "rank");
}

}  // namespace
}  // namespace tributary::worker
