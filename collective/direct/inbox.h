// The memory of a direct exchange as its owner holds it, and as a peer reaches it.
#pragma once

#include <cuda_runtime.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "collective/device/cuda_resources.h"
#include "collective/direct/announcement.h"
#include "collective/direct/direct_layout.h"
#include "kernels/cuda/buffer.h"

namespace tributary::collective {

// For a copy of a few bytes, or a kernel that stores as many.
inline constexpr std::chrono::milliseconds kMoment(500);

inline Deadline In(std::chrono::milliseconds t) { return std::chrono::steady_clock::now() + t; }

// A file descriptor that tells when the process has ended, or -1.
class ProcessWatch {
 public:
  ProcessWatch() = default;
  explicit ProcessWatch(int64_t pid)
      : fd_(static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0))) {}
  ~ProcessWatch() {
    if (fd_ >= 0) close(fd_);
  }
  ProcessWatch(ProcessWatch&& o) noexcept : fd_(std::exchange(o.fd_, -1)) {}
  ProcessWatch& operator=(ProcessWatch&& o) noexcept {
    std::swap(fd_, o.fd_);
    return *this;
  }

  bool Ended() const {
    if (fd_ < 0) return false;
    pollfd p = {fd_, POLLIN, 0};
    return poll(&p, 1, 0) == 1;
  }

 private:
  int fd_ = -1;
};

// A rank's own memory, which its peers write. It outlives the exchange for as long as a peer may
// still write to it.
class SharedInbox {
 public:
  Status Create(int rank, int device, const DirectLayout& layout) {
    rank_ = rank;
    device_ = device;
    layout_ = layout;
    bytes_ = (layout_.bytes(rank_) + kShareableBytes - 1) / kShareableBytes * kShareableBytes;
    if (Status s = stream_.Create(); !s.ok()) return s;
    if (Status s = CudaStatus(host_.Allocate(sizeof(Host)), "cudaHostAlloc"); !s.ok()) return s;
    *host() = {};
    if (Status s = CudaStatus(memory_.Allocate(bytes_), "cudaMalloc"); !s.ok()) return s;
    const size_t control = layout_.control_bytes();
    static_assert(kNotArrived == 0xffffffffu);
    (void)cudaMemsetAsync(memory_.data(), 0, control, stream_.get());
    (void)cudaMemsetAsync(memory_.data() + control, 0xff, bytes_ - control, stream_.get());
    return AwaitStream(stream_.get(), In(kMoment * 10));
  }

  std::byte* data() const { return memory_.data(); }
  size_t bytes() const { return bytes_; }
  cudaStream_t stream() const { return stream_.get(); }
  uint32_t* host_failure() const { return &host()->failure; }
  uint32_t failure() const { return std::atomic_ref<uint32_t>(host()->failure).load(); }
  // Rank `peer` is a process of this machine: once that has ended, it writes no more.
  void Watch(int peer, ProcessWatch watch) { watches_[peer] = std::move(watch); }

  // No other rank has the memory mapped, or it had and has let go of it.
  void NobodyElseMaps() { nobody_else_maps_ = true; }

  // Frees the memory unless a peer may still write to it.
  bool TryFree() {
    const ScopedDevice device(device_);
    if (nobody_else_maps_) {
      memory_ = cuda::DeviceBuffer();
      return true;
    }
    auto* closed = host()->closed;
    (void)cudaMemcpyAsync(closed, memory_.data() + layout_.closed(0), sizeof(host()->closed),
                          cudaMemcpyDeviceToHost, stream_.get());
    if (!AwaitStream(stream_.get(), In(kMoment)).ok()) return false;
    for (int r = 0; r < layout_.ranks; ++r) {
      if (r != rank_ && closed[r] == 0 && !watches_[r].Ended()) return false;
    }
    memory_ = cuda::DeviceBuffer();
    return true;
  }

  // The memory stays until the process ends.
  void Leak() {
    memory_.Leak();
    host_.Leak();
  }

 private:
  // Memory shared with other processes comes in blocks of this size; whole ones share nothing else.
  static constexpr size_t kShareableBytes = 2 << 20;

  struct Host {
    uint32_t failure = 0;
    uint32_t closed[kMaxDirectRanks] = {};
  };
  Host* host() const { return host_.as<Host>(); }

  int rank_ = 0;
  int device_ = 0;
  DirectLayout layout_;
  size_t bytes_ = 0;
  bool nobody_else_maps_ = false;
  Stream stream_;
  cuda::PinnedBuffer host_;
  cuda::DeviceBuffer memory_;
  std::array<ProcessWatch, kMaxDirectRanks> watches_;
};

// A peer's memory as this process reaches it.
class MappedInbox {
 public:
  MappedInbox() = default;
  ~MappedInbox() { Unmap(); }
  MappedInbox(const MappedInbox&) = delete;
  MappedInbox& operator=(const MappedInbox&) = delete;

  // Why the memory cannot be mapped, or empty.
  std::string Map(const Announcement& self, const Announcement& peer) {
    if (SameProcess(self.who, peer.who)) {
      data_ = reinterpret_cast<std::byte*>(peer.address);
      return peer.who.gpu == self.who.gpu ? std::string() : EnableAccess(peer.who.gpu);
    }
    const cudaError_t e =
        cudaIpcOpenMemHandle(&opened_, peer.handle, cudaIpcMemLazyEnablePeerAccess);
    if (e == cudaSuccess) {
      data_ = static_cast<std::byte*>(opened_);
      return "";
    }
    (void)cudaGetLastError();
    opened_ = nullptr;
    return std::string("cannot map its memory: ") + cudaGetErrorString(e);
  }

  std::byte* data() const { return data_; }
  void Unmap() {
    if (opened_ != nullptr) (void)cudaIpcCloseMemHandle(opened_);
    opened_ = nullptr;
    data_ = nullptr;
  }
  // Stays mapped until the process ends.
  void Leak() { opened_ = nullptr; }

 private:
  static std::string EnableAccess(const std::string& gpu) {
    int peer = 0;
    cudaError_t e = cudaDeviceGetByPCIBusId(&peer, gpu.c_str());
    if (e == cudaSuccess) e = cudaDeviceEnablePeerAccess(peer, 0);
    (void)cudaGetLastError();
    if (e == cudaSuccess || e == cudaErrorPeerAccessAlreadyEnabled) return "";
    return std::string("peer access: ") + cudaGetErrorString(e);
  }

  void* opened_ = nullptr;
  std::byte* data_ = nullptr;
};

}  // namespace tributary::collective
