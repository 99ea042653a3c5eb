// What sequences go through in a service, as scripts that any group of ranks can run.
#pragma once

#include "tests/worker/test_host.h"

namespace tributary::worker::testing {

// Sequences of every length at which something begins or ends (a turn, a round, a page, a virtual
// page), grown by prefill and by appends, then decoded and verified with 1, 4 and 16 rows.
void RunBoundaryLengths(Ranks& ranks, const CacheSpec& spec, const TestHost::Options& options);

// Chunks of a prompt, of sizes that fit nothing.
void RunChunkedPrefill(Ranks& ranks, const CacheSpec& spec, const TestHost::Options& options,
                       const std::vector<int32_t>& chunks);

// Forks that share pages, parents and children that then write, rollbacks, closed sequences whose
// pages others take.
void RunForkAndTruncate(Ranks& ranks, const CacheSpec& spec, const TestHost::Options& options);

// Batches of decode, verify, look-backs and appends alone; repeats, with and without other bytes.
void RunMixedBatches(Ranks& ranks, const CacheSpec& spec, const TestHost::Options& options);

// Drafts of 1 to 32 rows over contexts of every length at which something begins or ends, in mixed
// batches, again at an earlier position, and with verify and rollback in between.
void RunDrafts(Ranks& ranks, const CacheSpec& spec, const TestHost::Options& options);

// Truncated tokens were NaN: a slot that is read after it died shows.
void RunPoisonedSlots(Ranks& ranks, const CacheSpec& spec, const TestHost::Options& options);

}  // namespace tributary::worker::testing
