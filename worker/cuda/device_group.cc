#include "worker/cuda/device_group.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status/status_macros.h"
#include "collective/direct/peer_access.h"
#include "worker/exchange_choice.h"
#include "worker/status_conversion.h"

namespace tributary::worker {
namespace {

using collective::Deadline;
using collective::Wanted;

// How long a kernel waits for a peer that nobody said is gone. The end of last resort: a dead peer
// is noticed sooner by whoever keeps the group, who aborts, and a deadline by Await.
constexpr std::chrono::milliseconds kDirectBound{10'000};

// What a rank tells the others: a short text.
using Word = std::array<char, 256>;

absl::StatusOr<std::vector<std::string>> TellAll(const std::string& text,
                                                 collective::Communicator& comm,
                                                 Deadline deadline) {
  Word own{};
  std::copy_n(text.begin(), std::min(text.size(), own.size() - 1), own.begin());
  std::vector<Word> words(static_cast<size_t>(comm.size()));
  TRIBUTARY_RETURN_IF_ERROR(
      CollectiveStatus(comm.AllGather(own.data(), words.data(), sizeof(Word), deadline)));
  std::vector<std::string> texts;
  for (Word& word : words) {
    word.back() = '\0';
    texts.emplace_back(word.data());
  }
  return texts;
}

// Two attempts must not read each other's words.
class PrefixedRendezvous final : public collective::Rendezvous {
 public:
  PrefixedRendezvous(std::string prefix, collective::Rendezvous& below)
      : prefix_(std::move(prefix)), below_(below) {}
  tributary::Status Set(const std::string& key, const std::string& value) override {
    return below_.Set(prefix_ + key, value);
  }
  tributary::Status Get(const std::string& key, std::string* value, Deadline deadline) override {
    return below_.Get(prefix_ + key, value, deadline);
  }

 private:
  const std::string prefix_;
  collective::Rendezvous& below_;
};

// Every rank's GPU, by a name that is the same wherever it is seen from.
absl::StatusOr<std::string> WhyNotHere(int gpu, collective::Communicator& comm, Deadline deadline) {
  collective::PeerIdentity self;
  const tributary::Status described = collective::DescribeSelf(gpu, &self);
  // No text is the sign for what cannot be said.
  TRIBUTARY_ASSIGN_OR_RETURN(
      const std::vector<std::string> gpus,
      TellAll(described.ok() ? absl::StrCat(self.gpu, " ", self.host) : "", comm, deadline));
  for (size_t rank = 0; rank < gpus.size(); ++rank) {
    if (gpus[rank].empty()) return absl::StrCat("rank ", rank, " cannot tell its GPU");
  }
  return WhyNotOnGpus(gpus);
}

// "" on all ranks, or the first reason on all ranks.
absl::StatusOr<std::string> Attempt(DeviceTransport transport, const DeviceGroupWishes& wishes,
                                    collective::Communicator& comm,
                                    collective::Rendezvous& rendezvous, Deadline deadline,
                                    std::unique_ptr<collective::DeviceGroup>* group) {
  const bool direct = transport == DeviceTransport::kDirect;
  const collective::DeviceGroupOptions options{.rank = comm.rank(),
                                               .size = comm.size(),
                                               .epoch = comm.epoch(),
                                               .device = wishes.gpu,
                                               .limits = kDeviceGroupLimits,
                                               .nccl = direct ? Wanted::kNo : Wanted::kYes,
                                               .direct = direct ? Wanted::kYes : Wanted::kNo,
                                               .direct_bound = kDirectBound,
                                               .retired = wishes.retired};
  PrefixedRendezvous apart(absl::StrCat(Name(transport), "/"), rendezvous);
  // What is left must do for saying how it went, and for another attempt.
  const Deadline now = std::chrono::steady_clock::now();
  const Deadline half = now + (deadline - now) / 2;
  const tributary::Status made = collective::CreateDeviceGroup(options, apart, half, group);
  const absl::StatusOr<std::vector<std::string>> words =
      TellAll(made.ok() ? "" : absl::StrCat("no ", made.message()), comm, deadline);
  if (!words.ok()) {
    group->reset();
    return words.status();
  }
  for (size_t rank = 0; rank < words->size(); ++rank) {
    const std::string& word = (*words)[rank];
    if (word.empty()) continue;
    group->reset();
    return absl::StrCat(Name(transport), ": rank ", rank, ": ", word.substr(3));
  }
  return "";
}

class AbortingTogether final : public collective::Communicator {
 public:
  AbortingTogether(std::unique_ptr<collective::Communicator> comm,
                   std::weak_ptr<collective::DeviceGroup> group)
      : comm_(std::move(comm)), group_(std::move(group)) {}

  int rank() const override { return comm_->rank(); }
  int size() const override { return comm_->size(); }
  uint64_t epoch() const override { return comm_->epoch(); }
  tributary::Status AllGather(const void* send, void* recv, size_t bytes,
                              Deadline deadline) override {
    return comm_->AllGather(send, recv, bytes, deadline);
  }
  tributary::Status AllToAll(const void* send, void* recv, size_t bytes,
                             Deadline deadline) override {
    return comm_->AllToAll(send, recv, bytes, deadline);
  }
  tributary::Status ReduceScatter(const float* send, float* recv, size_t count,
                                  Deadline deadline) override {
    return comm_->ReduceScatter(send, recv, count, deadline);
  }
  tributary::Status Pass(const void* send, void* recv, size_t bytes, int from, int to,
                         Deadline deadline) override {
    return comm_->Pass(send, recv, bytes, from, to, deadline);
  }
  tributary::Status Gather(const void* send, void* recv, size_t bytes, int root,
                           Deadline deadline) override {
    return comm_->Gather(send, recv, bytes, root, deadline);
  }
  tributary::Status Barrier(Deadline deadline) override { return comm_->Barrier(deadline); }
  void Abort(const std::string& reason) override {
    // The GPUs first: a rank that waits for its own looks at nothing else.
    if (const auto group = group_.lock()) group->Abort(reason);
    comm_->Abort(reason);
  }

 private:
  const std::unique_ptr<collective::Communicator> comm_;
  const std::weak_ptr<collective::DeviceGroup> group_;
};

}  // namespace

absl::StatusOr<FormedDeviceGroup> FormDeviceGroup(const DeviceGroupWishes& wishes,
                                                  collective::Communicator& comm,
                                                  collective::Rendezvous& rendezvous,
                                                  Deadline deadline) {
  FormedDeviceGroup formed;
  if (comm.size() == 1) return formed;
  TRIBUTARY_ASSIGN_OR_RETURN(std::string reasons, WhyNotHere(wishes.gpu, comm, deadline));
  if (reasons.empty()) {
    for (const DeviceTransport transport : TransportsFor(wishes.strategy)) {
      TRIBUTARY_ASSIGN_OR_RETURN(
          const std::string why_not,
          Attempt(transport, wishes, comm, rendezvous, deadline, &formed.group));
      if (formed.group != nullptr) {
        formed.how = absl::StrCat("partials meet in device memory, by ", Name(transport),
                                  reasons.empty() ? "" : "; ", reasons);
        return formed;
      }
      absl::StrAppend(&reasons, reasons.empty() ? "" : "; ", why_not);
    }
  }
  if (wishes.strategy == collective::Strategy::kDirect) {
    return absl::FailedPreconditionError(absl::StrCat("exchange: direct is not there: ", reasons));
  }
  formed.how = absl::StrCat("partials meet in host memory: ", reasons);
  return formed;
}

std::unique_ptr<collective::Communicator> AbortTogether(
    std::unique_ptr<collective::Communicator> comm, std::weak_ptr<collective::DeviceGroup> group) {
  return std::make_unique<AbortingTogether>(std::move(comm), std::move(group));
}

}  // namespace tributary::worker
