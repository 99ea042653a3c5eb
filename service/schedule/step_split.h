// How a call is cut into pieces, each a step, which are carried out one after the other: one that
// is more than a step may take, and one for whose length others would have to wait.
//
// SplitStep: pieces have whole rows and tokens, in the order of the call. They follow from the call
// and the limits alone, so a repeated call has the same ones. All of the call's pages are reserved
// before the first piece, and its tokens count when the last piece has been carried out, or not at
// all.
//
// A row sees the tokens of earlier pieces of its entry as the cache keeps them. An entry with more
// than kMaxDecodeRows new tokens, whose rows see the tokens of their piece as they came, is not cut
// so that a piece has fewer, unless the limits leave no other way.
//
// CutIntoTurns: a row sees what it sees in one step, and on CPUs has the same bytes, wherever the
// call is cut. So that may depend on who else is there.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "service/schedule/step_cost.h"
#include "service/schedule/step_request.h"
#include "tributary/v1/attention.pb.h"
#include "worker/cache_spec.h"
#include "worker/command.h"

namespace tributary::service {

struct StepPiece {
  std::vector<worker::StepEntry> entries;
  int32_t first_entry = 0;  // of the call: the one of which entries[0] is a part
  int64_t first_row = 0;    // counted in the call
  int64_t first_token = 0;  // counted in the call
};

// Cuts a call into pieces, one at least. `entries` are the call's, with positions that were
// checked. RESOURCE_EXHAUSTED, as CheckCost says it, when a single row or a draft's block is beyond
// the limits.
absl::StatusOr<std::vector<StepPiece>> SplitStep(const worker::LayerGeometry& geometry,
                                                 int64_t window_left, worker::StepKind kind,
                                                 const std::vector<worker::StepEntry>& entries,
                                                 const StepLimits& limits);

// Cuts a call that fits into one step into pieces of about so much work, with 8 rows at least where
// an entry has them. Of an entry whose rows see its tokens as they came, each piece has all tokens
// and some of the rows (StepEntry::first_row), which only CPU workers of this process take. Not for
// drafts.
std::vector<StepPiece> CutIntoTurns(const worker::LayerGeometry& geometry, int64_t window_left,
                                    const std::vector<worker::StepEntry>& entries, double flops);

// Whether the call's tensors can be cut between rows: a result in memory of a GPU must lie there at
// a multiple of worker::kRegionAlignment in every piece.
bool CanBeCut(const StepRequest& request, const std::vector<StepPiece>& pieces,
              const worker::LayerGeometry& geometry);

// Makes a request of a piece. Its results on the host are inline; PlacePiece puts them where the
// call wants them.
StepRequest PieceOf(const StepRequest& request, const StepPiece& piece);

// Puts the results of a piece, as the reply to PieceOf's request, into the reply to the call, or
// into the region that the call names.
void PlacePiece(const StepRequest& request, const StepPiece& piece, const v1::AttendReply& results,
                v1::AttendReply* reply);

}  // namespace tributary::service
