// A coordinator and workers as processes, under a CancellingLoad.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "tests/fault/cancelling_load.h"
#include "tests/fault/programs.h"
#include "tests/support/usage.h"

namespace tributary::test {

class CancellationRig {
 public:
  // Throws when the group does not come up.
  CancellationRig(int ranks, int clients, uint64_t seed);

  CancellingLoad& load() { return *load_; }
  Usage UsageOfCoordinator() const { return UsageOf(coordinator_->pid()); }
  Usage UsageOfWorker(int rank) const { return UsageOf(workers_[rank]->pid()); }
  v1::GetTopologyReply Topology();

  // Between phases: no call is open, the group never parted, no step was aborted, and pages are
  // used for the tokens that sequences hold and for nothing else.
  void ExpectRest();
  // Once the clients have closed their sequences nothing is left; the processes end on SIGTERM.
  void ExpectEnd();

 private:
  const TemporaryDirectory directory_;
  std::unique_ptr<ChildProcess> coordinator_;
  std::vector<std::unique_ptr<ChildProcess>> workers_;
  std::shared_ptr<v1::AttentionService::Stub> stub_;
  std::unique_ptr<CancellingLoad> load_;
};

}  // namespace tributary::test
