#include "worker/rpc/holdings_conversion.h"

#include <utility>

#include "base/status/status_macros.h"
#include "worker/rpc/conversion.h"

namespace tributary::worker {
namespace {

void Encode(const CommandMark& mark, v1::CommandMark* out) {
  out->set_epoch(mark.epoch);
  out->set_number(mark.number);
}

CommandMark Decode(const v1::CommandMark& mark) { return {mark.epoch(), mark.number()}; }

void Encode(const HeldSequence& sequence, v1::HeldSequence* out) {
  out->set_sequence(sequence.id);
  out->mutable_pages()->Add(sequence.pages.begin(), sequence.pages.end());
  out->set_given_up(sequence.given_up);
  out->mutable_lengths()->Add(sequence.lengths.begin(), sequence.lengths.end());
  out->mutable_last_step()->Add(sequence.last_step.begin(), sequence.last_step.end());
}

HeldSequence Decode(const v1::HeldSequence& sequence) {
  return {.id = sequence.sequence(),
          .pages = {sequence.pages().begin(), sequence.pages().end()},
          .given_up = sequence.given_up(),
          .lengths = {sequence.lengths().begin(), sequence.lengths().end()},
          .last_step = {sequence.last_step().begin(), sequence.last_step().end()}};
}

void Encode(const Undo& undo, v1::UndoneByRestart* out) {
  Encode(undo.mark, out->mutable_mark());
  out->set_sequence(undo.sequence);
  out->set_layer(undo.layer);
  out->set_length(undo.length);
  out->set_last_step(undo.last_step);
  out->set_table_size(undo.table_size);
  out->set_first_index(undo.first_index);
  out->mutable_pages()->Add(undo.pages.begin(), undo.pages.end());
}

Undo Decode(const v1::UndoneByRestart& undo) {
  return {.mark = Decode(undo.mark()),
          .sequence = undo.sequence(),
          .layer = undo.layer(),
          .length = undo.length(),
          .last_step = undo.last_step(),
          .table_size = undo.table_size(),
          .first_index = undo.first_index(),
          .pages = {undo.pages().begin(), undo.pages().end()}};
}

}  // namespace

v1::Holdings EncodeHoldings(const Holdings& holdings) {
  v1::Holdings out;
  out.set_rank(holdings.rank);
  out.set_joined_epoch(holdings.joined_epoch);
  Encode(holdings.last, out.mutable_last());
  for (const HeldCache& cache : holdings.caches) {
    v1::HeldCache* held = out.add_caches();
    held->set_cache(cache.id);
    EncodeSpec(cache.spec, held->mutable_spec());
    held->set_lacks_pages(cache.lacks_pages);
    held->set_replica_lacks_pages(cache.replica_lacks_pages);
    for (const HeldSequence& sequence : cache.sequences) Encode(sequence, held->add_sequences());
    for (const Undo& undo : cache.undo) Encode(undo, held->add_undo());
  }
  return out;
}

absl::StatusOr<Holdings> DecodeHoldings(const v1::Holdings& message) {
  Holdings out{.rank = message.rank(),
               .joined_epoch = message.joined_epoch(),
               .last = Decode(message.last()),
               .caches = {}};
  for (const v1::HeldCache& cache : message.caches()) {
    HeldCache held{.id = cache.cache(),
                   .spec = {},
                   .lacks_pages = cache.lacks_pages(),
                   .replica_lacks_pages = cache.replica_lacks_pages(),
                   .sequences = {},
                   .undo = {}};
    TRIBUTARY_ASSIGN_OR_RETURN(held.spec, DecodeSpec(cache.spec()));
    for (const v1::HeldSequence& sequence : cache.sequences()) {
      held.sequences.push_back(Decode(sequence));
    }
    for (const v1::UndoneByRestart& undo : cache.undo()) held.undo.push_back(Decode(undo));
    out.caches.push_back(std::move(held));
  }
  return out;
}

}  // namespace tributary::worker
