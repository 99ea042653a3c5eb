// A command's way to the ranks, and their replies' way back.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status/rpc_errors.h"
#include "service/workers/remote_core.h"
#include "worker/rpc/conversion.h"
#include "worker/rpc/session_conversion.h"

namespace tributary::service {

void RemoteCore::Submit(std::shared_ptr<const worker::Command> command, WorkerGroup::Done done) {
  const uint64_t number = command->number;
  const size_t reply_bytes = worker::MostReplyBytes(*command);
  const Pending pending = {.epoch = command->epoch, .deadline = command->deadline};
  const grpc::ByteBuffer message =
      worker::EncodeCommand(std::move(command), Clock::now(), Settled());

  MutexLock in_order(submit_mutex_);
  std::vector<Stream> streams;
  absl::Status admitted;
  if (message.Length() > options_.max_message_bytes) {
    admitted =
        Exhausted("worker messages",
                  absl::StrCat("a step of ", message.Length(), " bytes is beyond the ",
                               options_.max_message_bytes, " a message to a worker may have"));
  } else if (reply_bytes > options_.max_message_bytes) {
    admitted =
        Exhausted("worker messages",
                  absl::StrCat("a step whose result takes ", reply_bytes, " bytes is beyond the ",
                               options_.max_message_bytes,
                               " a message from a worker may have: send fewer rows per call"));
  } else {
    const MutexLock lock(mutex_);
    admitted = Admit(number, pending, &done);
    for (const RankState& state : Ranks()) streams.push_back(state.stream);
  }
  if (!admitted.ok()) {
    in_order.Unlock();
    return completions_.Add(std::move(done), Outcome{std::move(admitted), {}});
  }
  // The group may break meanwhile; workers drop commands of an epoch they have left.
  for (const Stream& stream : streams) stream->Send(message);
}

uint64_t RemoteCore::Settled() const {
  const MutexLock lock(mutex_);
  return pending_.empty() ? last_number_ : pending_.begin()->first - 1;
}

absl::Status RemoteCore::Admit(uint64_t number, Pending pending, WorkerGroup::Done* done) {
  const bool draining = std::any_of(peers_.begin(), peers_.end(),
                                    [](const auto& peer) { return peer.second.draining; });
  if (state_ != State::kServing || stopping_ || draining || pending.epoch != epoch_) {
    return absl::AbortedError(absl::StrCat("epoch ", pending.epoch, " is over"));
  }
  if (pending_.count(number) > 0) {
    return absl::InternalError(absl::StrCat("command ", number, " is in flight already"));
  }
  pending.done = std::move(*done);
  pending.replies.resize(Ranks().size());
  pending.answered.resize(Ranks().size());
  pending.missing = size_;
  if (pending.deadline < watch_until_) watch_wakes_.NotifyOne();
  last_number_ = number;
  pending_.emplace(number, std::move(pending));
  return absl::OkStatus();
}

void RemoteCore::TakeReply(int rank, worker::Reply reply) {
  if (state_ != State::kServing || rank >= size_) return;
  const auto found = pending_.find(reply.number);
  if (found == pending_.end()) return;
  Pending& pending = found->second;
  if (reply.rank != rank || pending.answered[rank]) {
    return Break(absl::StrCat("rank ", rank, " answered command ", reply.number, " out of turn"));
  }
  if (BreaksGroup(reply.status)) {
    return Break(absl::StrCat("rank ", rank, ": ", reply.status.message()));
  }
  pending.answered[rank] = true;
  pending.replies[rank] = std::move(reply);
  if (--pending.missing > 0) return;

  absl::Status status;
  for (const worker::Reply& r : pending.replies) status.Update(r.status);
  Complete(std::move(pending.done), std::move(status), std::move(pending.replies));
  pending_.erase(found);
  if (!pending_.empty()) return;
  LetDrainedGo();
  drained_.NotifyAll();
}

void RemoteCore::TakeNews(int rank, const v1::SessionNews& news) {
  if (state_ != State::kServing) return;
  completions_.Add([observer = observer_, told = worker::DecodeNews(rank, news)](
                       const Outcome&) { observer->OnSessionNews(told); },
                   {});
}

void RemoteCore::Complete(WorkerGroup::Done done, absl::Status status,
                          std::vector<worker::Reply> replies) {
  completions_.Add(std::move(done), Outcome{std::move(status), std::move(replies)});
}

}  // namespace tributary::service
