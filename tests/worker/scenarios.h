// What sequences go through in a service, as scripts that any group of ranks can run.
#pragma once

#include "tests/worker/test_host.h"

namespace tributary::worker::testing {

// Sequences of every length at which something begins or ends (a turn, a round, a page, a virtual
// page), grown by prefill and by appends, then decoded and verified with 1, 4 and 16 rows.
void RunBoundaryLengths(Ranks& ranks, const CacheSpec& spec, const TestHost::Options& options);

// 16-bit inputs of both kinds and full floats take turns over a grid of geometries.
TestHost::Options InputsInTurn(int32_t head_dim, int32_t group);

// Few tokens and `many` of two sequences, in every kind of causal step.
void RunDecodeVerifyPrefill(Ranks& ranks, const CacheSpec& spec, const TestHost::Options& options,
                            int32_t many);

// Chunks of a prompt, of sizes that fit nothing.
void RunChunkedPrefill(Ranks& ranks, const CacheSpec& spec, const TestHost::Options& options,
                       const std::vector<int32_t>& chunks);

// Forks that share pages, parents and children that then write, rollbacks, closed sequences whose
// pages others take.
void RunForkAndTruncate(Ranks& ranks, const CacheSpec& spec, const TestHost::Options& options);

// `forks` of a sequence of `tokens`, half of them of a longer fork of it, that go on side by side
// with a stranger: decode, verify, drafts, rollbacks into what is shared, and the parent's end.
void RunSharedForks(Ranks& ranks, const CacheSpec& spec, const TestHost::Options& options,
                    int32_t tokens, int32_t forks);

// Batches of decode, verify, look-backs and appends alone; repeats, with and without other bytes.
void RunMixedBatches(Ranks& ranks, const CacheSpec& spec, const TestHost::Options& options);

// More rows than a pass of 24 takes, few and many of a sequence, with and without context.
void RunStepsInPasses(Ranks& ranks, const CacheSpec& spec, const TestHost::Options& options);

// `tokens` of one sequence next to a few of others, over FP8.
void RunLongAndShort(Ranks& ranks, int32_t tokens, const TestHost::Options& options);

// Two prefills, decode and verify of one sequence: what they gave, step after step. Groups of
// every size give the same, within rounding.
struct Results {
  std::vector<float> o;
  std::vector<float> lse;
};
Results RunOneSequence(Ranks& ranks, const TestHost::Options& options);

// Drafts of 1 to 32 rows over contexts of every length at which something begins or ends, in mixed
// batches, again at an earlier position, and with verify and rollback in between.
void RunDrafts(Ranks& ranks, const CacheSpec& spec, const TestHost::Options& options);

// The same two drafts three times, with a context and without.
void RunTwoDrafts(Ranks& ranks, const CacheSpec& spec, const TestHost::Options& options);

// Truncated tokens were NaN: a slot that is read after it died shows.
void RunPoisonedSlots(Ranks& ranks, const CacheSpec& spec, const TestHost::Options& options);

}  // namespace tributary::worker::testing
