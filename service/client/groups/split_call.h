// A call whose sequences live in several groups as one call for each group.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "service/client/client.h"

namespace tributary::client {

// What one group does of a call: some of its entries, in their order. The part's tensors lie where
// the caller's do when its entries stand side by side in the call; otherwise the part holds copies
// of them. The call's tensors outlive the part.
template <typename Call>
class CallPart {
 public:
  // `entries` are indices of the whole call's entries, in rising order. One group has them all.
  CallPart(const Call& whole, size_t group, std::vector<size_t> entries);
  CallPart(const CallPart&) = delete;
  CallPart& operator=(const CallPart&) = delete;

  size_t group() const { return group_; }
  const Call& call() const { return call_; }
  // An error of the part, with its fields as the whole call spells them: "entries[0].sequence_id"
  // of the part may be "entries[5].sequence_id" of the call.
  absl::Status Renamed(const absl::Status& status) const;

 protected:
  Call call_;
  const std::vector<size_t> entries_;  // of the whole call

 private:
  const size_t group_;
  std::vector<std::byte> k_, v_;  // the copies
};

using AppendPart = CallPart<AppendCall>;

// The same, with queries and results, which lie where the caller's do or are copied as well.
class AttendPart : public CallPart<AttendCall> {
 public:
  AttendPart(const AttendCall& whole, size_t group, std::vector<size_t> entries);

  // Copies results that lie in the part to where the whole call wants them.
  void GiveResults(const AttendCall& whole) const;

 private:
  bool copies_results_ = false;
  std::vector<std::byte> q_, output_;
  std::vector<float> lse_;
};

// groups[i] is where entry i's sequence lives. CheckCall has accepted the call. A group appears in
// one part, whose entries keep their order; with tensors on a device, which are not copied here, in
// one part for each run of its entries. INVALID_ARGUMENT (output_dtype) for NVFP4 outputs on a
// device, whose parts do not lie side by side.
absl::StatusOr<std::vector<std::unique_ptr<AttendPart>>> Split(const AttendCall& call,
                                                               const std::vector<size_t>& groups);
std::vector<std::unique_ptr<AppendPart>> Split(const AppendCall& call,
                                               const std::vector<size_t>& groups);

}  // namespace tributary::client
