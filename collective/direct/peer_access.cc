#include "collective/direct/peer_access.h"

#include <cuda_runtime.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <random>

namespace tributary::collective {
namespace {

std::string FirstLine(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string LinkTarget(const char* path) {
  char target[128];
  const ssize_t n = readlink(path, target, sizeof(target));
  return n < 0 ? std::string() : std::string(target, static_cast<size_t>(n));
}

// Drawn once a process: a process id alone comes back after a while, and in every container.
const std::string& ProcessToken() {
  static const std::string token = [] {
    std::random_device random;
    std::string text;
    for (int i = 0; i < 4; ++i) text += std::to_string(random()) + "-";
    return text + std::to_string(getpid());
  }();
  return token;
}

}  // namespace

Status DescribeSelf(int device, PeerIdentity* self) {
  char gpu[32] = {};
  if (const cudaError_t e = cudaDeviceGetPCIBusId(gpu, sizeof(gpu), device); e != cudaSuccess) {
    return InvalidArgument("device " + std::to_string(device) + ": " + cudaGetErrorString(e));
  }
  self->host = FirstLine("/proc/sys/kernel/random/boot_id");
  self->pid_namespace = LinkTarget("/proc/self/ns/pid");
  self->pid = getpid();
  self->process = ProcessToken();
  self->gpu = gpu;
  // Without a name for the host every rank is on a host of its own.
  if (self->host.empty()) self->host = self->process;
  return Status::Ok();
}

std::string WhyGpuIsOutOfReach(int device, const std::string& peer_gpu) {
  int peer = -1;
  if (cudaDeviceGetByPCIBusId(&peer, peer_gpu.c_str()) != cudaSuccess) {
    (void)cudaGetLastError();
    return "its GPU " + peer_gpu + " is hidden from this process (CUDA_VISIBLE_DEVICES)";
  }
  int reaches = 0;
  if (const cudaError_t e = cudaDeviceCanAccessPeer(&reaches, device, peer); e != cudaSuccess) {
    (void)cudaGetLastError();
    return cudaGetErrorString(e);
  }
  if (reaches == 0) return "its GPU " + peer_gpu + " has no peer access from this one";
  return "";
}

}  // namespace tributary::collective
