// How many bytes a layer's tensors take in a session's slot, or in its messages.
#pragma once

#include <cstdint>
#include <span>

#include "base/mailbox/layout.h"
#include "worker/cache_spec.h"
#include "worker/command.h"

namespace tributary::worker {

// For so many query rows and new tokens of a layer, in the element types of the session. The LSE is
// counted whether or not the host asks for it.
mailbox::SlotRoom SlotBytes(const LayerGeometry& geometry, const OpenSessionCommand& session,
                            int64_t rows, int64_t tokens);

// The most that any of these layers takes.
mailbox::SlotRoom MostSlotBytes(std::span<const LayerGeometry> layers,
                                const OpenSessionCommand& session, int64_t rows, int64_t tokens);

}  // namespace tributary::worker
