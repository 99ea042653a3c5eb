#include "collective/direct/direct.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <mutex>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

#include "collective/device/cuda_resources.h"
#include "collective/direct/direct_kernel.h"
#include "collective/direct/peer_access.h"
#include "collective/direct/retired_memory.h"
#include "collective/rendezvous/hex.h"

namespace tributary::collective {
namespace {

using std::chrono::milliseconds;

// Memory shared with other processes comes in blocks of this size; whole ones share nothing else.
constexpr size_t kShareableBytes = 2 << 20;
// For a copy of a few bytes, or a kernel that stores as many.
constexpr milliseconds kMoment(500);

Deadline In(milliseconds t) { return std::chrono::steady_clock::now() + t; }

// What a rank tells the others before they map its memory.
struct Announcement {
  PeerIdentity who;
  size_t channel_bytes = 0;
  uint64_t address = 0;  // in its process
  cudaIpcMemHandle_t handle = {};
  std::string why_not = "-";  // "-": nothing speaks against it here

  std::string Encode() const {
    std::ostringstream text;
    text << who.host << '\n'
         << who.pid_namespace << '\n'
         << who.pid << '\n'
         << who.process << '\n'
         << who.gpu << '\n'
         << channel_bytes << '\n'
         << address << '\n'
         << ToHex(&handle, sizeof(handle)) << '\n'
         << why_not << '\n';
    return text.str();
  }
  bool Decode(const std::string& encoded) {
    std::istringstream text(encoded);
    std::string number, hex;
    std::getline(text, who.host);
    std::getline(text, who.pid_namespace);
    std::getline(text, number);
    who.pid = std::strtoll(number.c_str(), nullptr, 10);
    std::getline(text, who.process);
    std::getline(text, who.gpu);
    std::getline(text, number);
    channel_bytes = std::strtoull(number.c_str(), nullptr, 10);
    std::getline(text, number);
    address = std::strtoull(number.c_str(), nullptr, 10);
    std::getline(text, hex);
    std::getline(text, why_not);
    return !text.fail() && FromHex(hex, &handle, sizeof(handle));
  }
};

bool SameProcess(const PeerIdentity& a, const PeerIdentity& b) {
  return a.process == b.process && a.pid == b.pid;
}

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

// A rank's own memory, which its peers write. Outlives the exchange, until no peer can any more.
class SharedInbox {
 public:
  Status Create(const DirectOptions& options) {
    rank_ = options.rank;
    device_ = options.device;
    layout_ = options.layout;
    bytes_ = (layout_.bytes(rank_) + kShareableBytes - 1) / kShareableBytes * kShareableBytes;
    if (Status s = stream_.Create(); !s.ok()) return s;
    if (Status s = host_.Allocate(sizeof(Host)); !s.ok()) return s;
    *host() = {};
    if (Status s = memory_.Allocate(bytes_); !s.ok()) return s;
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
  void Watch(int peer, ProcessWatch watch) { watches_[peer] = std::move(watch); }

  void NobodyElseMaps() { nobody_else_maps_ = true; }

  // Frees the memory unless a peer may still write to it.
  bool TryFree() {
    const ScopedDevice device(device_);
    if (nobody_else_maps_) {
      memory_ = DeviceMemory();
      return true;
    }
    auto* closed = host()->closed;
    (void)cudaMemcpyAsync(closed, memory_.data() + layout_.closed(0), sizeof(host()->closed),
                          cudaMemcpyDeviceToHost, stream_.get());
    if (!AwaitStream(stream_.get(), In(kMoment)).ok()) return false;
    for (int r = 0; r < layout_.ranks; ++r) {
      if (r != rank_ && closed[r] == 0 && !watches_[r].Ended()) return false;
    }
    memory_ = DeviceMemory();
    return true;
  }

  void Leak() {
    memory_.Leak();
    host_.Leak();
  }

 private:
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
  PinnedMemory host_;
  DeviceMemory memory_;
  std::array<ProcessWatch, kMaxDirectRanks> watches_;
};

// A peer's memory as this process reaches it.
class MappedInbox {
 public:
  MappedInbox() = default;
  ~MappedInbox() { Unmap(); }
  MappedInbox(const MappedInbox&) = delete;
  MappedInbox& operator=(const MappedInbox&) = delete;

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

std::string RankList(uint32_t ranks) {
  std::string text;
  for (int r = 0; r < kMaxDirectRanks; ++r) {
    if (ranks >> r & 1) text += (text.empty() ? "rank " : ", ") + std::to_string(r);
  }
  return text;
}

Status StatusOfFailure(uint32_t word, int rank) {
  const std::string ranks = RankList(RanksOf(word));
  switch (WhatFailed(word)) {
    case DirectFailure::kNone:
      return Status::Ok();
    case DirectFailure::kLate:
      return {StatusCode::kDeadlineExceeded, "direct exchange: " + ranks +
                                                 " did not come before the bound of rank " +
                                                 std::to_string(rank)};
    case DirectFailure::kAborted:
      return {StatusCode::kAborted, "direct exchange: aborted"};
    case DirectFailure::kTold:
      return {StatusCode::kUnavailable, "direct exchange: " + ranks + " gave up"};
  }
  return {StatusCode::kInternal, "direct exchange: unknown failure " + std::to_string(word)};
}

class PeerExchange final : public DirectExchange {
 public:
  PeerExchange(const DirectOptions& options, std::unique_ptr<SharedInbox> inbox)
      : options_(options), inbox_(std::move(inbox)) {
    args_.memory[options.rank] = inbox_->data();
    args_.layout = options.layout;
    args_.rank = options.rank;
    args_.bound_ns = static_cast<uint64_t>(std::chrono::nanoseconds(options.bound).count());
    args_.host_failure = inbox_->host_failure();
    // Older GPUs know no launch that overlaps the kernel before it.
    int major = 0;
    (void)cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, options.device);
    can_overlap_ = major >= 9;
  }

  ~PeerExchange() override {
    const ScopedDevice device(options_.device);
    // Peers may be at work still on what this rank has done its part of, so they are told nothing.
    StopKernels(/*tell_peers=*/false);
    if (!SayClosed()) {
      for (MappedInbox& m : mapped_) m.Leak();
    }
    Unmap();
    Retire();
  }

  void Unmap() {
    for (MappedInbox& m : mapped_) m.Unmap();
    for (int r = 0; r < options_.size; ++r) {
      if (r != options_.rank) args_.memory[r] = nullptr;
    }
  }
  void NobodyElseMaps() { inbox_->NobodyElseMaps(); }

  // Why not, or empty.
  std::string Map(const std::vector<Announcement>& all) {
    const Announcement& self = all[options_.rank];
    for (int r = 0; r < options_.size; ++r) {
      if (r == options_.rank) continue;
      if (std::string why = mapped_[r].Map(self, all[r]); !why.empty()) {
        return "rank " + std::to_string(r) + ": " + why;
      }
      args_.memory[r] = mapped_[r].data();
      if (!SameProcess(self.who, all[r].who) &&
          self.who.pid_namespace == all[r].who.pid_namespace) {
        inbox_->Watch(r, ProcessWatch(all[r].who.pid));
      }
    }
    return "";
  }

  Status Exchange(const DeviceExchangeParams& p, const DirectPlan& plan, bool overlap_launch,
                  cudaStream_t stream) override {
    DirectArgs args = ArgsOf(plan, p.rows, p.heads, p.value_dim);
    // Written to only when the partial arrives.
    args.o = const_cast<void*>(p.o);
    args.lse = const_cast<float*>(p.lse);
    args.partial_arrives = p.partial_arrives;
    args.sinks = p.sinks;
    args.out = p.out;
    args.lse_out = p.lse_out;
    args.out_dtype = p.out_dtype;
    return LaunchDirect(args, p.o_dtype, p.wire, overlap_launch && can_overlap_, stream);
  }

  Status Gather(const DeviceGatherParams& p, const DirectPlan& plan, bool overlap_launch,
                cudaStream_t stream) override {
    DirectArgs args = ArgsOf(plan, p.rows, p.heads, p.value_dim);
    args.o = const_cast<void*>(p.slice);
    args.lse = const_cast<float*>(p.slice_lse);
    args.out = p.out;
    args.lse_out = p.lse_out;
    args.out_dtype = p.dtype;
    return LaunchDirect(args, p.dtype, p.dtype, overlap_launch && can_overlap_, stream);
  }

  Status Health() override { return StatusOfFailure(inbox_->failure(), options_.rank); }

  void Abort() override {
    const ScopedDevice device(options_.device);
    StopKernels(/*tell_peers=*/true);
  }

 private:
  DirectArgs ArgsOf(const DirectPlan& plan, int32_t rows, int32_t heads, int32_t value_dim) const {
    DirectArgs args = args_;
    args.plan = plan;
    args.rows = rows;
    args.heads = heads;
    args.value_dim = value_dim;
    SetHeads(&args);
    return args;
  }

  void StopKernels(bool tell_peers) {
    const uint32_t me = 1u << options_.rank;
    PeerWords words;
    for (int r = 0; r < options_.size; ++r) {
      if (args_.memory[r] == nullptr || (r != options_.rank && !tell_peers)) continue;
      words.at[r] = args_.memory[r] + options_.layout.failure();
      words.value[r] = DirectFailureWord(
          r == options_.rank ? DirectFailure::kAborted : DirectFailure::kTold, me);
    }
    (void)LaunchStoreIfZero(words, inbox_->stream());
  }

  // This rank's last store into its peers' memory.
  bool SayClosed() {
    PeerWords words;
    for (int r = 0; r < options_.size; ++r) {
      if (r == options_.rank || args_.memory[r] == nullptr) continue;
      words.at[r] = args_.memory[r] + options_.layout.closed(options_.rank);
      words.value[r] = 1;
    }
    return LaunchStoreIfZero(words, inbox_->stream()).ok() &&
           AwaitStream(inbox_->stream(), In(kMoment)).ok();
  }

  void Retire() {
    if (inbox_->TryFree()) return;
    if (options_.retired == nullptr) {
      // Ranks that leave together are through with it in a moment.
      const Deadline deadline = In(kMoment);
      do {
        std::this_thread::sleep_for(milliseconds(1));
        if (inbox_->TryFree()) return;
      } while (std::chrono::steady_clock::now() < deadline);
      inbox_->Leak();
      return;
    }
    // std::function wants to copy; what cannot be freed in the end stays until the process ends.
    auto held = std::shared_ptr<SharedInbox>(inbox_.release(), [](SharedInbox* inbox) {
      if (inbox->data() != nullptr) inbox->Leak();
      delete inbox;
    });
    const size_t bytes = held->bytes();
    options_.retired->Add(bytes, [held] { return held->TryFree(); });
  }

  const DirectOptions options_;
  std::unique_ptr<SharedInbox> inbox_;
  std::array<MappedInbox, kMaxDirectRanks> mapped_;
  DirectArgs args_;
  bool can_overlap_ = false;
};

// Every rank tells a word, and gets what all told.
Status TellAll(const DirectOptions& options, Rendezvous& rendezvous, const std::string& subject,
               const std::string& word, Deadline deadline, std::vector<std::string>* words) {
  const std::string prefix = "direct/" + std::to_string(options.epoch) + "/" + subject + "/";
  if (Status s = rendezvous.Set(prefix + std::to_string(options.rank), word); !s.ok()) return s;
  words->assign(options.size, "");
  for (int r = 0; r < options.size; ++r) {
    Status s = rendezvous.Get(prefix + std::to_string(r), &(*words)[r], deadline);
    if (!s.ok()) {
      return {s.code(),
              "direct exchange: waiting for rank " + std::to_string(r) + ": " + s.message()};
    }
  }
  return Status::Ok();
}

std::string WhyNot(const DirectOptions& options, const std::vector<Announcement>& all) {
  for (int r = 0; r < options.size; ++r) {
    if (all[r].why_not != "-") return "rank " + std::to_string(r) + ": " + all[r].why_not;
  }
  for (int r = 0; r < options.size; ++r) {
    if (all[r].channel_bytes != options.layout.channel_bytes) {
      return "rank " + std::to_string(r) + " is made for other shapes";
    }
  }
  std::vector<PeerIdentity> peers;
  for (const Announcement& a : all) peers.push_back(a.who);
  return WhyNoDirectAccess(peers, options.rank, kMaxDirectRanks, [&](const std::string& gpu) {
    return WhyGpuIsOutOfReach(options.device, gpu);
  });
}

Announcement Announce(const DirectOptions& options, SharedInbox* inbox) {
  Announcement a;
  a.channel_bytes = options.layout.channel_bytes;
  Status s = DescribeSelf(options.device, &a.who);
  if (s.ok() && options.size <= kMaxDirectRanks) {
    if (s.ok()) s = inbox->Create(options);
    if (s.ok()) s = LoadDirectKernels();
    if (s.ok()) {
      s = CudaStatus(cudaIpcGetMemHandle(&a.handle, inbox->data()), "cudaIpcGetMemHandle");
    }
    a.address = reinterpret_cast<uint64_t>(inbox->data());
  }
  if (!s.ok()) a.why_not = s.message();
  std::replace(a.why_not.begin(), a.why_not.end(), '\n', ' ');
  return a;
}

}  // namespace

Status CreateDirectExchange(const DirectOptions& options, Rendezvous& rendezvous, Deadline deadline,
                            std::unique_ptr<DirectExchange>* out, std::string* why_not) {
  const ScopedDevice device(options.device);
  auto inbox = std::make_unique<SharedInbox>();
  const Announcement self = Announce(options, inbox.get());
  std::vector<std::string> words;
  if (Status s = TellAll(options, rendezvous, "rank", self.Encode(), deadline, &words); !s.ok()) {
    return s;
  }
  std::vector<Announcement> all(options.size);
  for (int r = 0; r < options.size; ++r) {
    if (!all[r].Decode(words[r])) {
      return {StatusCode::kInternal,
              "direct exchange: rank " + std::to_string(r) + " announced itself in another form"};
    }
  }
  // Memory that nobody has mapped goes with `inbox`.
  *why_not = WhyNot(options, all);
  std::unique_ptr<PeerExchange> exchange;
  std::string found = *why_not;
  if (self.why_not == "-" && options.size <= kMaxDirectRanks) {
    exchange = std::make_unique<PeerExchange>(options, std::move(inbox));
    if (found.empty()) found = exchange->Map(all);
  }
  if (Status s =
          TellAll(options, rendezvous, "mapped", found.empty() ? "-" : found, deadline, &words);
      !s.ok()) {
    return s;
  }
  for (int r = 0; r < options.size && why_not->empty(); ++r) {
    if (words[r] != "-") *why_not = "rank " + std::to_string(r) + ": " + words[r];
  }
  if (why_not->empty()) {
    *out = std::move(exchange);
    return Status::Ok();
  }
  // Memory is given back once no rank has it mapped.
  if (exchange != nullptr) exchange->Unmap();
  const Status unmapped = TellAll(options, rendezvous, "unmapped", "-", deadline, &words);
  if (unmapped.ok() && exchange != nullptr) exchange->NobodyElseMaps();
  return unmapped;
}

}  // namespace tributary::collective
