// What a profiler is told: this program is one, attached to the NVTX it is linked with.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tests/worker/cuda/gpu_ranks.h"
#include "tests/worker/specs.h"
#include "worker/cuda/nvtx_range.h"

namespace tributary::worker::testing {
namespace {

#if TRIBUTARY_HAS_NVTX

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::EndsWith;

// Ranges begun, "name layer" of each, those inside another one indented; of all threads.
class Profiler {
 public:
  static Profiler& Get() {
    static auto* const profiler = new Profiler;
    return *profiler;
  }

  // What was marked since the last call.
  std::vector<std::string> Take() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(ranges_, {});
  }
  int open() const { return Depth(); }
  const std::string& domain() const { return domain_; }

  nvtxDomainHandle_t Create(const char* name) {
    domain_ = name;
    return reinterpret_cast<nvtxDomainHandle_t>(this);
  }
  int Push(const nvtxEventAttributes_t& event) {
    std::lock_guard<std::mutex> lock(mutex_);
    ranges_.push_back(std::string(2 * static_cast<size_t>(Depth()), ' ') + event.message.ascii +
                      " " + std::to_string(event.payload.iValue));
    return Depth()++;
  }
  static int Pop() { return --Depth(); }

 private:
  static int& Depth() {
    thread_local int depth = 0;
    return depth;
  }

  std::mutex mutex_;
  std::vector<std::string> ranges_;
  std::string domain_;
};

nvtxDomainHandle_t OnDomainCreate(const char* name) { return Profiler::Get().Create(name); }
int OnPush(nvtxDomainHandle_t, const nvtxEventAttributes_t* event) {
  return Profiler::Get().Push(*event);
}
int OnPop(nvtxDomainHandle_t) { return Profiler::Pop(); }

template <typename Function>
void Set(NvtxFunctionTable table, int id, Function* function) {
  *table[id] = reinterpret_cast<NvtxFunctionPointer>(function);
}

int Attach(NvtxGetExportTableFunc_t tables) {
  const auto* const callbacks =
      static_cast<const NvtxExportTableCallbacks*>(tables(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned int size = 0;
  if (callbacks == nullptr ||
      callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size) == 0 ||
      size <= NVTX_CBID_CORE2_DomainCreateA) {
    return 0;
  }
  Set(table, NVTX_CBID_CORE2_DomainCreateA, OnDomainCreate);
  Set(table, NVTX_CBID_CORE2_DomainRangePushEx, OnPush);
  Set(table, NVTX_CBID_CORE2_DomainRangePop, OnPop);
  return 1;
}

// Where NVTX looks for a profiler that is linked in, at the first range.
const bool kAttached = [] {
  InitializeInjectionNvtx2_fnptr = Attach;
  return true;
}();

TEST(Nvtx, RangesHaveADomainNamesAndLayersAndEndWithTheirScope) {
  {
    const NvtxRange step("step: decode", 3);
    { const NvtxRange plan("plan", 3); }
    const NvtxRange append("append", 3);
    EXPECT_EQ(Profiler::Get().open(), 2);
  }
  EXPECT_EQ(Profiler::Get().open(), 0);
  EXPECT_EQ(Profiler::Get().domain(), "tributary");
  EXPECT_THAT(Profiler::Get().Take(), ElementsAre("step: decode 3", "  plan 3", "  append 3"));
}

TEST(Nvtx, AStepsWorkIsMarkedInsideIt) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  GpuRanks ranks(2);
  TestHost host(ranks, SmallSpec(), GpuTolerance());
  host.Open(1);
  Profiler::Get().Take();
  host.Step(StepKind::kPrefill, {{1, 37, 37}});
  EXPECT_THAT(Profiler::Get().Take(),
              AllOf(Contains("step: prefill 0").Times(2), Contains("  plan 0").Times(2),
                    Contains(EndsWith("  append 0")).Times(2)));
  host.Step(StepKind::kDecode, {{1, 1, 1}});
  EXPECT_THAT(Profiler::Get().Take(), Contains("step: decode 0").Times(2));
  EXPECT_EQ(Profiler::Get().open(), 0);
}

#else

TEST(Nvtx, RangesHaveADomainNamesAndLayersAndEndWithTheirScope) {
  GTEST_SKIP() << "this CUDA toolkit has no NVTX";
}

#endif

}  // namespace
}  // namespace tributary::worker::testing
