#include "collective/direct/direct.h"

#include <algorithm>
#include <array>
#include <thread>
#include <utility>
#include <vector>

#include "collective/device/cuda_resources.h"
#include "collective/direct/announcement.h"
#include "collective/direct/direct_kernel.h"
#include "collective/direct/inbox.h"
#include "collective/direct/peer_access.h"
#include "collective/direct/retired_memory.h"

namespace tributary::collective {
namespace {

using std::chrono::milliseconds;

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

// Frees memory that peers were told of, now or as soon as none of them can write to it any more.
void Retire(RetiredMemory* retired, std::unique_ptr<SharedInbox> inbox) {
  if (inbox->TryFree()) return;
  if (retired == nullptr) {
    // Ranks that leave together are through with it in a moment.
    const Deadline deadline = In(kMoment);
    do {
      std::this_thread::sleep_for(milliseconds(1));
      if (inbox->TryFree()) return;
    } while (std::chrono::steady_clock::now() < deadline);
    inbox->Leak();
    return;
  }
  // std::function wants to copy; what cannot be freed in the end stays until the process ends.
  auto held = std::shared_ptr<SharedInbox>(inbox.release(), [](SharedInbox* of_peers) {
    if (of_peers->data() != nullptr) of_peers->Leak();
    delete of_peers;
  });
  const size_t bytes = held->bytes();
  retired->Add(bytes, [held] { return held->TryFree(); });
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
    Retire(options_.retired.get(), std::move(inbox_));
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

  const uint32_t* failure_word() const override {
    return reinterpret_cast<const uint32_t*>(inbox_->data() + options_.layout.failure());
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

Status DecodeAll(const std::vector<std::string>& words, std::vector<Announcement>* all) {
  for (size_t r = 0; r < words.size(); ++r) {
    if (!(*all)[r].Decode(words[r])) {
      return {StatusCode::kInternal,
              "direct exchange: rank " + std::to_string(r) + " announced itself in another form"};
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
    if (s.ok()) s = inbox->Create(options.rank, options.device, options.layout);
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
  std::vector<Announcement> all(options.size);
  Status met = TellAll(options, rendezvous, "rank", self.Encode(), deadline, &words);
  if (met.ok()) met = DecodeAll(words, &all);
  if (!met.ok()) {
    // Other ranks may have heard all, and have mapped this rank's memory by now.
    if (self.why_not == "-") Retire(options.retired.get(), std::move(inbox));
    return met;
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
