// An AttendCall or AppendCall as a message, its tensors in shared memory or inline; a reply as the
// caller's results.
#pragma once

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "service/client/client.h"
#include "service/client/host_buffers.h"
#include "service/client/region_pool.h"
#include "tributary/v1/attention.pb.h"

namespace tributary::client {

// Checks what the client itself must be sure of before it touches the caller's memory: that there
// are pointers where bytes are needed, that counts make sense, and that sizes fit. The service
// refuses everything else.
absl::Status CheckCall(const AttendCall& call);
absl::Status CheckCall(const AppendCall& call);

// Dimensions of a value, and of an output, in one head.
template <typename Call>
int32_t ValueDim(const Call& call) {
  return call.value_head_dim == 0 ? call.head_dim : call.value_head_dim;
}
v1::DType OutputDType(const AttendCall& call);

// The message for a call, but for its tensors' bytes.
v1::AttendRequest DescribeCall(const AttendCall& call);
v1::AppendRequest DescribeCall(const AppendCall& call);

// The buffers that tensors of a call lie in, where the service reads and writes these tensors in
// place. Null: the tensor is copied.
struct InPlace {
  HostBuffers::BufferPtr q, k, v, output, lse;

  // Notes that the service does not know one of the buffers: none of them is used in place again.
  void Forget() const;
};
InPlace FindInPlace(const AttendCall& call, const HostBuffers& buffers);
InPlace FindInPlace(const AppendCall& call, const HostBuffers& buffers);

// Bytes of a call's other tensors in shared memory, results included, each aligned.
uint64_t SharedBytes(const AttendCall& call, const InPlace& in_place = {});
uint64_t SharedBytes(const AppendCall& call, const InPlace& in_place = {});

// Puts the call's tensors into the request. Those that lie in memory of a GPU or in place are
// referred to. The others are copied into the slot and referred to, or into the message where
// `slot` is null.
void PlaceTensors(const AttendCall& call, const InPlace& in_place, const RegionPool::Slot* slot,
                  v1::AttendRequest& request);
void PlaceTensors(const AppendCall& call, const InPlace& in_place, const RegionPool::Slot* slot,
                  v1::AppendRequest& request);

// RESOURCE_EXHAUSTED when the request, or the reply it asks for, is larger than a message may be.
absl::Status CheckSize(const AttendCall& call, const v1::AttendRequest& request, uint64_t limit);
absl::Status CheckSize(const v1::AppendRequest& request, uint64_t limit);

// Copies the results to where the caller wants them. INTERNAL when the reply is not what was asked.
absl::Status TakeResults(const AttendCall& call, const InPlace& in_place,
                         const RegionPool::Slot* slot, const v1::AttendReply& reply);

}  // namespace tributary::client
