// What a group of remote workers keeps beyond the life of its coordinator.
#pragma once

#include <cstdint>
#include <vector>

namespace tributary::service {

// How the group was left by the coordinator's last life.
struct GroupIdentity {
  uint64_t group_id = 0;
  uint64_t epoch = 0;         // the last one given out
  uint64_t formed_epoch = 0;  // the last one in which commands were given; 0: none
  // [ranks]: the instances that formed it; 0 for nobody.
  std::vector<uint64_t> holders;
};

// Each call returns when what it was told is safe, or cannot be made so; then the store says it in
// the log, and the group goes on: epochs rise by what workers report, too.
class GroupStore {
 public:
  virtual ~GroupStore() = default;
  // The epoch is about to be given out.
  virtual void OnEpoch(uint64_t epoch) = 0;
  // Commands are about to be given in the epoch, to these instances.
  virtual void OnFormed(uint64_t epoch, const std::vector<uint64_t>& holders) = 0;
};

}  // namespace tributary::service
