// A named stretch of the host's work on a step, for NVIDIA's profilers (Nsight Systems, ncu): what
// a rank's thread enqueues and waits for, in the domain "tributary", the layer as payload. Names
// are those of the operations, so there are few. Without a profiler attached a range is two calls
// that return at once; where the toolkit has no NVTX it is nothing.
#pragma once

#include <cstdint>

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define TRIBUTARY_HAS_NVTX 1
#else
#define TRIBUTARY_HAS_NVTX 0
#endif

namespace tributary::worker {

// Ends with the scope, on the thread that began it. `name` is copied.
class NvtxRange {
 public:
#if TRIBUTARY_HAS_NVTX
  NvtxRange(const char* name, int32_t layer) {
    nvtxEventAttributes_t event{};
    event.version = NVTX_VERSION;
    event.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    event.messageType = NVTX_MESSAGE_TYPE_ASCII;
    event.message.ascii = name;
    event.payloadType = NVTX_PAYLOAD_TYPE_INT32;
    event.payload.iValue = layer;
    nvtxDomainRangePushEx(Domain(), &event);
  }
  ~NvtxRange() { nvtxDomainRangePop(Domain()); }
#else
  NvtxRange(const char*, int32_t) {}
  ~NvtxRange() {
  }  // NOLINT(modernize-use-equals-default): a trivial one makes ranges unused variables
#endif
  NvtxRange(const NvtxRange&) = delete;
  NvtxRange& operator=(const NvtxRange&) = delete;

#if TRIBUTARY_HAS_NVTX
 private:
  // Lives as long as the process, as a profiler expects.
  static nvtxDomainHandle_t Domain() {
    static const nvtxDomainHandle_t domain = nvtxDomainCreateA("tributary");
    return domain;
  }
#endif
};

}  // namespace tributary::worker
