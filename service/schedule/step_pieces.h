// The pieces of a session's step that is larger than a slot (base/mailbox/pieces.h), as steps of
// their own.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/mailbox/pieces.h"
#include "worker/command.h"

namespace tributary::service {

// The entries of a piece, of the accepted entries of its step.
std::vector<worker::StepEntry> EntriesOf(std::span<const worker::StepEntry> entries,
                                         const mailbox::Piece& piece);

// How a piece is computed; `kind` is its step's, which it has where the step is not cut.
worker::StepKind KindOf(worker::StepKind kind, std::span<const mailbox::Piece> pieces,
                        const mailbox::Piece& piece);

}  // namespace tributary::service
