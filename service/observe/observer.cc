#include "service/observe/observer.h"

namespace tributary::service {

const char* Name(Method method) {
  constexpr const char* kNames[kMethods] = {"CreateCache",
                                            "DeleteCache",
                                            "OpenSequence",
                                            "ForkSequence",
                                            "TruncateSequence",
                                            "CloseSequence",
                                            "Append",
                                            "Attend",
                                            "AttendStream",
                                            "GetTopology",
                                            "RegisterSharedMemory",
                                            "UnregisterSharedMemory",
                                            "UpdateSequences",
                                            "GetLimits",
                                            "RenewLease"};
  return kNames[static_cast<int>(method)];
}

const char* Name(ClientLimit limit) {
  constexpr const char* kNames[kClientLimits] = {"calls",  "sequences",   "pages",
                                                 "caches", "cache_bytes", "streams",
                                                 "bytes",  "sessions",    "mailbox_bytes"};
  return kNames[static_cast<int>(limit)];
}

}  // namespace tributary::service
