#include "base/cuda/stream_wait.h"

#include <cuda.h>

namespace tributary::cuda {
namespace {

using WaitValue = decltype(&cuStreamWaitValue32);

// The driver is not linked, so that programs run on machines without one. Null: it is too old.
WaitValue FindWaitValue() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuStreamWaitValue32", &function,
                                                             12000, cudaEnableDefault, &found);
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) {
    (void)cudaGetLastError();
    return nullptr;
  }
  return reinterpret_cast<WaitValue>(function);
}

}  // namespace

cudaError_t EnqueueWaitAtLeast(const uint32_t* word, uint32_t value, cudaStream_t stream) {
  static const WaitValue wait = FindWaitValue();
  if (wait == nullptr) return cudaErrorNotSupported;
  const CUresult result = wait(reinterpret_cast<CUstream>(stream),
                               static_cast<CUdeviceptr>(reinterpret_cast<uintptr_t>(word)), value,
                               CU_STREAM_WAIT_VALUE_GEQ);
  switch (result) {
    case CUDA_SUCCESS:
      return cudaSuccess;
    case CUDA_ERROR_NOT_SUPPORTED:
      return cudaErrorNotSupported;
    case CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED:
      return cudaErrorStreamCaptureUnsupported;
    default:
      return cudaErrorUnknown;
  }
}

}  // namespace tributary::cuda
