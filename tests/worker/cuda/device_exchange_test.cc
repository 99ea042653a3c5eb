// What a rank does with its group of GPUs as far as the host decides it: how calls are cut, when a
// step may be a graph, and that no rank is left behind when a group cannot be formed. The group is
// a recorder, and no GPU is needed.
#include "worker/cuda/device_exchange.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "collective/in_process.h"
#include "collective/rendezvous/memory_rendezvous.h"
#include "worker/cuda/device_group.h"
#include "worker/cuda/step_size.h"

namespace tributary::worker {
namespace {

using collective::DeviceExchangeCapability;
using collective::DeviceExchangeParams;
using collective::DeviceGatherParams;
using collective::Placement;
using collective::Strategy;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Keeps what it is asked for.
class RecordingGroup final : public collective::DeviceGroup {
 public:
  RecordingGroup(int rank, DeviceExchangeCapability capability)
      : rank_(rank), capability_(std::move(capability)) {}

  int rank() const override { return rank_; }
  int size() const override { return capability_.ranks; }
  uint64_t epoch() const override { return 5; }
  const DeviceExchangeCapability& capability() const override { return capability_; }
  Status Exchange(const DeviceExchangeParams& params, cudaStream_t) override {
    exchanges.push_back(params);
    return answer;
  }
  Status GatherSlices(const DeviceGatherParams& params, cudaStream_t) override {
    gathers.push_back(params);
    return answer;
  }
  collective::DeviceCommunicator* communicator() override { return nullptr; }
  Status Await(cudaStream_t, collective::Deadline) override { return answer; }
  Status Health() override { return answer; }
  const uint32_t* failure_word() const override { return nullptr; }
  void Abort(const std::string& reason) override { aborted = reason; }

  std::vector<DeviceExchangeParams> exchanges;
  std::vector<DeviceGatherParams> gathers;
  std::string aborted;
  Status answer;

 private:
  const int rank_;
  const DeviceExchangeCapability capability_;
};

DeviceExchangeCapability Of(int32_t ranks, const std::string& no_direct = "",
                            const std::string& no_nccl = "") {
  return {.ranks = ranks,
          .limits = {.rows = 64, .heads = 8, .value_dim = 128, .widest = DType::kF32},
          .no_nccl = no_nccl,
          .no_direct = no_direct};
}

// A step of a cache with `heads` heads of 128.
class DeviceExchangeTest : public ::testing::Test {
 protected:
  explicit DeviceExchangeTest(int32_t heads = 10) {
    spec_.q_heads = heads;
    spec_.kv_heads = heads;
    spec_.head_dim = 128;
    spec_.layers.resize(1);
  }

  PlannedStep Step() { return {.spec = spec_, .plan = plan_, .comm = *comms_[0]}; }
  // Memory that nobody reads: only where it lies is looked at.
  StepOperations::Partial At(size_t megabytes) const {
    auto* o = reinterpret_cast<float*>(megabytes << 20);
    return {o, o + (size_t{1} << 17)};
  }

  CacheSpec spec_;
  StepPlan plan_;
  std::vector<std::unique_ptr<collective::Communicator>> comms_ =
      collective::CreateInProcessGroup(1, 5);
};

TEST_F(DeviceExchangeTest, PiecesCoverEveryRowOnceAndFitTheGroup) {
  const PlannedStep step = Step();
  for (const int rank : {0, 2}) {
    for (const int32_t rows : {1, 17, 64, 200}) {
      RecordingGroup group(rank, Of(3, "", "not wanted"));
      DeviceExchange exchange(step, Strategy::kAuto, group, nullptr);
      const StepOperations::Partial partial = At(1);
      const StepOperations::Partial out = rank == 0 ? At(32) : StepOperations::Partial{};
      const float sinks = 0;
      ASSERT_TRUE(exchange.MergeToRoot(rows, partial, &sinks, out).ok());
      int32_t row = 0;
      for (const DeviceExchangeParams& p : group.exchanges) {
        const size_t pairs = static_cast<size_t>(row) * 10;
        EXPECT_EQ(p.o, partial.o + pairs * 128);
        EXPECT_EQ(p.lse, partial.lse + pairs);
        EXPECT_EQ(p.out, rank == 0 ? out.o + pairs * 128 : nullptr);
        EXPECT_EQ(p.lse_out, rank == 0 ? out.lse + pairs : nullptr);
        EXPECT_EQ(p.sinks, &sinks);
        EXPECT_EQ(p.placement, Placement::kGathered);
        EXPECT_EQ(p.wire, DType::kF32);
        EXPECT_EQ(p.out_dtype, DType::kF32);
        Strategy strategy = Strategy::kAuto;
        EXPECT_TRUE(ChooseDeviceStrategy(p, group.capability(), &strategy).ok());
        EXPECT_TRUE(CheckDeviceExchange(p, rank, 3).ok());
        row += p.rows;
      }
      EXPECT_EQ(row, rows);
      if (rows == 1) {
        EXPECT_EQ(group.exchanges.size(), 1u);
      } else if (rows == 200) {
        EXPECT_GT(group.exchanges.size(), 1u);
      }
    }
  }
}

TEST_F(DeviceExchangeTest, PartialsOfABf16ResultTravelAsThat) {
  PlannedStep step = Step();
  const auto wire = [&](Strategy strategy, bool batch_invariant) {
    return DeviceExchange::WireOf(step, strategy, batch_invariant);
  };
  EXPECT_EQ(wire(Strategy::kAuto, false), DType::kF32);
  step.bf16_partials = true;
  EXPECT_EQ(wire(Strategy::kAuto, false), DType::kBf16);
  EXPECT_EQ(wire(Strategy::kA2a, false), DType::kBf16);
  EXPECT_EQ(wire(Strategy::kAgRs, false), DType::kF32) << "it adds in the wire's type";
  EXPECT_EQ(wire(Strategy::kAuto, true), DType::kF32) << "others in the batch decide it, too";
}

TEST_F(DeviceExchangeTest, SlicesFollowEachOtherWithTheRanksHeads) {
  const PlannedStep step = Step();
  RecordingGroup group(/*rank=*/1, Of(4));  // heads 3, 3, 2, 2
  DeviceExchange exchange(step, Strategy::kAuto, group, nullptr);
  ASSERT_TRUE(exchange.MergeToSlices(200, At(1), At(32)).ok());
  ASSERT_GT(group.exchanges.size(), 1u);
  size_t row = 0;
  for (const DeviceExchangeParams& p : group.exchanges) {
    EXPECT_EQ(p.placement, Placement::kScattered);
    EXPECT_EQ(p.sinks, nullptr);
    EXPECT_EQ(p.out, At(32).o + row * 3 * 128);
    EXPECT_EQ(p.lse_out, At(32).lse + row * 3);
    row += static_cast<size_t>(p.rows);
  }
  EXPECT_EQ(row, 200u);

  ASSERT_TRUE(exchange.GatherToRoot(200, At(1), {}).ok());
  row = 0;
  for (const DeviceGatherParams& p : group.gathers) {
    EXPECT_EQ(p.slice, At(1).o + row * 3 * 128);
    EXPECT_EQ(p.slice_lse, At(1).lse + row * 3);
    EXPECT_EQ(p.out, nullptr);
    EXPECT_EQ(p.dtype, DType::kF32);
    row += static_cast<size_t>(p.rows);
  }
  EXPECT_EQ(row, 200u);
}

// A row of any cache fits what groups take memory for.
TEST(DeviceGroupLimits, EveryGeometryFits) {
  for (const int32_t ranks : {2, 3, 4, 8}) {
    for (const char* no_direct : {"", "no peer access"}) {
      const DeviceExchangeCapability capability{.ranks = ranks,
                                                .limits = kDeviceGroupLimits,
                                                .no_nccl = *no_direct == '\0' ? "not wanted" : "",
                                                .no_direct = no_direct};
      for (const int32_t heads : {1, 2, 7, 40, 128, 1024}) {
        for (const int32_t head_dim : {64, 128, 256}) {
          SCOPED_TRACE(std::to_string(ranks) + " ranks, " + std::to_string(heads) + " heads of " +
                       std::to_string(head_dim));
          DeviceExchangeParams p{.rows = 1, .heads = heads, .value_dim = head_dim};
          p.wire = p.out_dtype = DType::kF32;
          for (const Placement placement : {Placement::kGathered, Placement::kScattered}) {
            p.placement = placement;
            EXPECT_EQ(RowsAtOnce(p, capability), 1);
          }
          DeviceGatherParams g{
              .dtype = DType::kF32, .rows = 1, .heads = heads, .value_dim = head_dim};
          EXPECT_EQ(RowsAtOnce(g, capability), 1);
        }
      }
    }
  }
}

// Cut as they are on the others, or ranks would part ways.
TEST_F(DeviceExchangeTest, EveryRankCutsAlike) {
  const PlannedStep step = Step();
  for (const DeviceExchangeCapability& capability : {Of(4), Of(4, "no peer access")}) {
    std::vector<std::vector<int32_t>> rows(4);
    for (int rank = 0; rank < 4; ++rank) {
      RecordingGroup group(rank, capability);
      DeviceExchange exchange(step, Strategy::kAuto, group, nullptr);
      ASSERT_TRUE(exchange.MergeToRoot(300, At(1), nullptr, At(64)).ok());
      ASSERT_TRUE(exchange.MergeToSlices(300, At(1), At(64)).ok());
      ASSERT_TRUE(exchange.GatherToRoot(300, At(1), At(64)).ok());
      for (const auto& p : group.exchanges) rows[static_cast<size_t>(rank)].push_back(p.rows);
      for (const auto& p : group.gathers) rows[static_cast<size_t>(rank)].push_back(p.rows);
    }
    EXPECT_EQ(rows[1], rows[0]);
    EXPECT_EQ(rows[2], rows[0]);
    EXPECT_EQ(rows[3], rows[0]);
  }
}

TEST_F(DeviceExchangeTest, OnlyDirectExchangesMayBeCaptured) {
  const PlannedStep step = Step();
  const auto may = [&](const DeviceExchangeCapability& capability, Strategy strategy,
                       int32_t rows) {
    RecordingGroup group(1, capability);
    return DeviceExchange(step, strategy, group, nullptr).MayBeCaptured(rows);
  };
  for (const int32_t rows : {1, 64, 500}) {
    EXPECT_TRUE(may(Of(4, "", "not wanted"), Strategy::kAuto, rows));
    EXPECT_TRUE(may(Of(4), Strategy::kDirect, rows));
    EXPECT_FALSE(may(Of(4), Strategy::kA2a, rows));
    EXPECT_FALSE(may(Of(4, "no peer access"), Strategy::kAuto, rows));
  }
  EXPECT_TRUE(may(Of(4, "no peer access"), Strategy::kAuto, 0)) << "nothing is exchanged";
}

TEST_F(DeviceExchangeTest, AnErrorOfTheGroupIsThatOfABrokenExchange) {
  const PlannedStep step = Step();
  RecordingGroup group(0, Of(2));
  DeviceExchange exchange(step, Strategy::kAuto, group, nullptr);
  group.answer = {StatusCode::kUnavailable, "rank 1 gave up"};
  const absl::Status gone = exchange.MergeToRoot(1, At(1), nullptr, At(32));
  EXPECT_EQ(gone.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(gone.message()), HasSubstr("rank 1 gave up"));
  EXPECT_EQ(group.exchanges.size(), 1u) << "nothing follows a piece that failed";
  group.answer = {StatusCode::kDeadlineExceeded, "late"};
  EXPECT_EQ(exchange.GatherToRoot(1, At(1), At(32)).code(), absl::StatusCode::kDeadlineExceeded);
}

// ---- the size of a step ------------------------------------------------------------------------

TEST_F(DeviceExchangeTest, StepsOfOneSizeDifferByLessThanTwo) {
  const auto size = [&](int32_t rows, int32_t entries, int64_t reach) {
    plan_.query_rows = plan_.new_tokens = rows;
    PlannedStep step{.kind = StepKind::kDecode,
                     .spec = spec_,
                     .plan = plan_,
                     .comm = *comms_[0],
                     .entries = entries,
                     .reach = reach};
    return StepSizeOf(step);
  };
  EXPECT_EQ(size(4, 4, 4096), size(4, 4, 8191));
  EXPECT_NE(size(4, 4, 4095), size(4, 4, 4096));
  EXPECT_NE(size(4, 4, 4096), size(5, 4, 4096));
  EXPECT_NE(size(8, 8, 4096), size(8, 2, 4096));
  const StepSize few = size(100, 2, 4096);
  plan_.passes = {{.row_count = 1}, {.row_begin = 1, .row_count = 99, .many_rows = true}};
  EXPECT_NE(size(100, 2, 4096), few) << "kernels for many rows take other memory";
  plan_.passes.clear();
  const StepSize wide = size(4, 4, 4096);
  spec_.layers[0].window.left = 100;
  EXPECT_NE(size(4, 4, 4096), wide) << "other layers have other plans";
}

// ---- forming -----------------------------------------------------------------------------------

constexpr int kNoSuchGpu = 4096;

// What each of two ranks gets.
std::vector<absl::StatusOr<std::string>> FormTwo(Strategy strategy, int first_gpu) {
  auto comms = collective::CreateInProcessGroup(2, 1);
  collective::MemoryRendezvous rendezvous;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  std::vector<absl::StatusOr<std::string>> how(2, absl::UnknownError("did not return"));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      absl::StatusOr<FormedDeviceGroup> formed =
          FormDeviceGroup({.gpu = first_gpu + rank, .strategy = strategy},
                          *comms[static_cast<size_t>(rank)], rendezvous, deadline);
      EXPECT_TRUE(!formed.ok() || formed->group == nullptr);
      how[static_cast<size_t>(rank)] =
          formed.ok() ? absl::StatusOr<std::string>(formed->how) : formed.status();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return how;
}

TEST(FormDeviceGroup, WithoutGpusPartialsMeetOnTheHostAndTheReasonIsSaid) {
  for (const Strategy strategy : {Strategy::kAuto, Strategy::kA2a}) {
    for (const auto& how : FormTwo(strategy, kNoSuchGpu)) {
      ASSERT_TRUE(how.ok()) << how.status();
      EXPECT_THAT(*how, HasSubstr("host memory: rank 0"));
    }
  }
}

TEST(FormDeviceGroup, WhatIsForcedAndMissingIsRefusedOnEveryRank) {
  for (const auto& how : FormTwo(Strategy::kDirect, kNoSuchGpu)) {
    EXPECT_EQ(how.status().code(), absl::StatusCode::kFailedPrecondition) << how.status();
    EXPECT_THAT(std::string(how.status().message()), HasSubstr("exchange: direct"));
  }
}

TEST(FormDeviceGroup, AloneThereIsNothingToForm) {
  auto comms = collective::CreateInProcessGroup(1, 1);
  collective::MemoryRendezvous rendezvous;
  const auto formed = FormDeviceGroup({.gpu = kNoSuchGpu, .strategy = Strategy::kDirect}, *comms[0],
                                      rendezvous, std::chrono::steady_clock::now());
  ASSERT_TRUE(formed.ok()) << formed.status();
  EXPECT_EQ(formed->group, nullptr);
  EXPECT_THAT(formed->how, IsEmpty());
}

TEST(FormDeviceGroup, ARankThatStaysAwayEndsItByTheDeadline) {
  auto comms = collective::CreateInProcessGroup(2, 1);
  collective::MemoryRendezvous rendezvous;
  const auto formed =
      FormDeviceGroup({.gpu = kNoSuchGpu}, *comms[0], rendezvous,
                      std::chrono::steady_clock::now() + std::chrono::milliseconds(20));
  EXPECT_EQ(formed.status().code(), absl::StatusCode::kDeadlineExceeded) << formed.status();
}

TEST(AbortTogether, EndsTheGroupOfGpusToo) {
  auto comms = collective::CreateInProcessGroup(1, 7);
  auto group = std::make_shared<RecordingGroup>(0, Of(1));
  const auto both = AbortTogether(std::move(comms[0]), group);
  EXPECT_EQ(both->epoch(), 7u);
  both->Abort("enough");
  EXPECT_EQ(group->aborted, "enough");
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  EXPECT_EQ(both->Barrier(deadline).code(), StatusCode::kAborted);
  group.reset();
  both->Abort("again");  // the group is gone, and that is all right
}

}  // namespace
}  // namespace tributary::worker
