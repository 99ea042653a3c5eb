// Replies with results as the bytes that are sent.
#pragma once

#include <grpcpp/grpcpp.h>

#include "tributary/v1/attention.pb.h"

namespace tributary::service {

// The bytes of a reply that is not needed any more, beside raw_methods.h. Long results are not
// copied: the reply's own memory is sent, and freed when gRPC is done with it. So whoever answers a
// call does not take longer for a long result, and keeps nobody waiting whose answer comes next.
grpc::ByteBuffer SerializeMessage(v1::AttendReply&& reply);

}  // namespace tributary::service
