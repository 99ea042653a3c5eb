// What all ranks hold of a cache, made of what each of them reports: a coordinator that has
// restarted goes on from that.
//
// Ranks carry out the same commands in one order, so a rank can only be ahead of another. What was
// done after the last command that all of them have carried out is undone: no client was told that
// it had succeeded. A sequence that only some ranks have was being made or closed. A sequence about
// which the ranks then still disagree is lost.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "worker/holdings.h"

namespace tributary::service {

struct ReconciledCache {
  std::vector<worker::HeldSequence> whole;  // `pages` cover what is held, and no more
  struct Lost {
    worker::HeldSequence sequence;  // its lengths
    std::string why;
  };
  std::vector<Lost> lost;
  // Sequences that not all ranks hold: workers are told to forget them.
  std::vector<worker::SequenceId> absent;
};

// The last command that every rank of `held` has carried out. Null elements stand for ranks that
// hold nothing and are left out.
worker::CommandMark LastOfAll(const std::vector<const worker::Holdings*>& held);

// One cache of the workers. `ranks`: what each rank reports of it; null when the rank does not have
// it. `page_tokens`: tokens that a virtual page stands for.
ReconciledCache Reconcile(const std::vector<const worker::HeldCache*>& ranks,
                          const worker::CommandMark& last_of_all, int64_t page_tokens);

}  // namespace tributary::service
