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

// What one group does of a call. Its tensors lie where the caller's do when its entries stand side
// by side in the call; otherwise they are copied into the part, and its results out of it.
class AttendPart {
 public:
  size_t group() const { return group_; }
  const AttendCall& call() const { return call_; }
  // Copies results that lie in the part to where the whole call wants them.
  void GiveResults(const AttendCall& whole) const;
  // An error of the part, with its fields as the whole call spells them: "entries[0].sequence_id"
  // of the part may be "entries[5].sequence_id" of the call.
  absl::Status Renamed(const absl::Status& status) const;

 private:
  friend absl::StatusOr<std::vector<std::unique_ptr<AttendPart>>> Split(
      const AttendCall& call, const std::vector<size_t>& groups);

  size_t group_ = 0;
  AttendCall call_;
  std::vector<size_t> entries_;  // of the whole call
  bool copies_results_ = false;
  std::vector<std::byte> q_, k_, v_, output_;
  std::vector<float> lse_;
};

class AppendPart {
 public:
  size_t group() const { return group_; }
  const AppendCall& call() const { return call_; }
  absl::Status Renamed(const absl::Status& status) const;

 private:
  friend std::vector<std::unique_ptr<AppendPart>> Split(const AppendCall& call,
                                                        const std::vector<size_t>& groups);

  size_t group_ = 0;
  AppendCall call_;
  std::vector<size_t> entries_;
  std::vector<std::byte> k_, v_;
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
