#include "base/cuda/device_memory.h"

#include <cuda.h>

#include <cstdint>
#include <random>

namespace tributary::cuda {
namespace {

using GetAddressRange = decltype(&cuMemGetAddressRange);

// The driver is asked for at run time: programs must load where there is none.
GetAddressRange FindGetAddressRange() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &function,
                                                             12000, cudaEnableDefault, &found);
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<GetAddressRange>(function);
}

}  // namespace

std::string UuidOf(const cudaDeviceProp& device) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text = "GPU";
  for (int i = 0; i < 16; ++i) {
    if (i == 0 || i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    const auto byte = static_cast<uint8_t>(device.uuid.bytes[i]);
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

const std::string& ProcessNonce() {
  static const std::string nonce = [] {
    std::random_device dice;
    std::string bytes(16, '\0');
    for (char& byte : bytes) byte = static_cast<char>(dice());
    return bytes;
  }();
  return nonce;
}

absl::StatusOr<Allocation> FindAllocation(const void* data) {
  static const GetAddressRange get = FindGetAddressRange();
  if (get == nullptr) {
    return absl::FailedPreconditionError("the driver has no cuMemGetAddressRange");
  }
  CUdeviceptr base = 0;
  size_t bytes = 0;
  if (get(&base, &bytes, reinterpret_cast<CUdeviceptr>(data)) != CUDA_SUCCESS) {
    return absl::InvalidArgumentError("it is no memory of a GPU");
  }
  return Allocation{reinterpret_cast<std::byte*>(base), bytes};
}

}  // namespace tributary::cuda
