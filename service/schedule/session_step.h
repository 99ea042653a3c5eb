// One SubmitStep of a session, checked as far as that goes without looking at any sequence.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "base/mailbox/pieces.h"
#include "service/data/resolve_spec.h"
#include "service/data/session_terms.h"
#include "service/schedule/range_steps.h"
#include "tributary/v1/session.pb.h"
#include "worker/backends.h"
#include "worker/cache_spec.h"
#include "worker/command.h"

namespace tributary::service {

// About as many pieces a step may have: 65,536 of `max_rows` rows, or of `max_new_tokens` tokens.
inline constexpr int64_t kMostPieces = 1 << 16;

struct SessionStepRequest {
  uint64_t step_id = 0;
  worker::StepKind kind = worker::StepKind::kDecode;
  LayerRange range;
  std::vector<worker::StepEntry> entries;
  std::vector<EntryChange> changes;  // empty, or one per entry
  // What goes through a slot at a time; there is at least one.
  std::vector<mailbox::Piece> pieces;

  // Those of the entries and those that they are forked from, each once.
  std::vector<SequenceId> Sequences() const;
};

// INVALID_ARGUMENT naming the field, RESOURCE_EXHAUSTED (more rows than the session has room for)
// or FAILED_PRECONDITION with reasons.
absl::StatusOr<SessionStepRequest> CheckSessionStep(const v1::SubmitStep& message,
                                                    const SessionTerms& terms,
                                                    const worker::CacheSpec& spec,
                                                    const CacheTerms& cache_terms,
                                                    const worker::CacheBackends& backends);

}  // namespace tributary::service
