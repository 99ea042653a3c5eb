// What may be asked for between ranks, and what ranks with GPUs try.
#include "worker/exchange_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "base/status/errors.h"

namespace tributary::worker {
namespace {

using collective::Strategy;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr Strategy kOfTheHost[] = {Strategy::kAuto, Strategy::kAllGather, Strategy::kAgRs,
                                   Strategy::kA2a};

TEST(ExchangePlace, IsReadBack) {
  for (const ExchangePlace place : {ExchangePlace::kHost, ExchangePlace::kAuto}) {
    ExchangePlace read = ExchangePlace::kHost;
    EXPECT_TRUE(Parse(Name(place), &read));
    EXPECT_EQ(read, place);
  }
  ExchangePlace place = ExchangePlace::kAuto;
  EXPECT_FALSE(Parse("device", &place));
  EXPECT_FALSE(Parse("", &place));
  EXPECT_EQ(place, ExchangePlace::kAuto);
}

TEST(CheckExchange, WhatTheHostHasIsServedEverywhere) {
  for (const Strategy strategy : kOfTheHost) {
    EXPECT_TRUE(CheckExchange(Device::kCpu, strategy, ExchangePlace::kHost).ok());
    EXPECT_TRUE(CheckExchange(Device::kCpu, strategy, ExchangePlace::kAuto).ok());
    EXPECT_TRUE(CheckExchange(Device::kCuda, strategy, ExchangePlace::kHost).ok());
    EXPECT_TRUE(CheckExchange(Device::kCuda, strategy, ExchangePlace::kAuto).ok());
  }
  EXPECT_TRUE(CheckExchange(Device::kCuda, Strategy::kDirect, ExchangePlace::kAuto).ok());
}

TEST(CheckExchange, RefusalsNameTheSettingAndTheReason) {
  const absl::Status on_cpu = CheckExchange(Device::kCpu, Strategy::kDirect, ExchangePlace::kAuto);
  EXPECT_EQ(on_cpu.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FieldOf(on_cpu), "exchange");
  EXPECT_THAT(std::string(on_cpu.message()), HasSubstr("device cpu"));

  const absl::Status in_host_memory =
      CheckExchange(Device::kCuda, Strategy::kDirect, ExchangePlace::kHost);
  EXPECT_EQ(FieldOf(in_host_memory), "exchange");
  EXPECT_THAT(std::string(in_host_memory.message()), HasSubstr("device_exchange=auto"));
}

TEST(TransportsFor, AForcedStrategyHasOneWay) {
  EXPECT_THAT(TransportsFor(Strategy::kAuto),
              ElementsAre(DeviceTransport::kDirect, DeviceTransport::kNccl));
  EXPECT_THAT(TransportsFor(Strategy::kDirect), ElementsAre(DeviceTransport::kDirect));
  for (const Strategy strategy : {Strategy::kAllGather, Strategy::kAgRs, Strategy::kA2a}) {
    EXPECT_THAT(TransportsFor(strategy), ElementsAre(DeviceTransport::kNccl));
  }
}

TEST(WhyNotOnGpus, RanksThatShareAGpuAreNamed) {
  EXPECT_THAT(WhyNotOnGpus({"a"}), IsEmpty());
  EXPECT_THAT(WhyNotOnGpus({"a", "b", "c"}), IsEmpty());
  EXPECT_EQ(WhyNotOnGpus({"a", "b", "c", "b"}), "ranks 1 and 3 share a GPU");
}

}  // namespace
}  // namespace tributary::worker
