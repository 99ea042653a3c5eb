#include "tests/worker/scenarios.h"

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "kernels/params.h"

namespace tributary::worker::testing {
namespace {

std::vector<int64_t> BoundaryLengths(const CacheSpec& spec, int ranks) {
  const int64_t turn = spec.interleave;
  const int64_t round = turn * ranks;
  const int64_t virtual_page = int64_t{spec.page_size} * ranks;
  const std::set<int64_t> lengths = {
      0,         1,     turn - 1,  turn,         turn + 1,
      round - 1, round, round + 1, virtual_page, 2 * virtual_page + spec.page_size + 3};
  return {lengths.begin(), lengths.end()};
}

// Brings a sequence to a length the way that its number says: in one prefill, without queries, or
// token by token at the end.
void Grow(TestHost& host, SequenceId sequence, int64_t length) {
  const auto count = static_cast<int32_t>(length);
  if (count == 0) return;
  switch (sequence % 3) {
    case 0:
      host.Step(StepKind::kPrefill, {{sequence, count, count}});
      return;
    case 1:
      host.Step(StepKind::kAppend, {{sequence, 0, count}});
      return;
    default:
      if (count > 2) host.Step(StepKind::kAppend, {{sequence, 0, count - 2}});
      for (int32_t i = 0; i < std::min(count, 2); ++i) {
        host.Step(StepKind::kDecode, {{sequence, 1, 1}});
      }
  }
}

}  // namespace

void RunBoundaryLengths(Ranks& ranks, const CacheSpec& spec, const TestHost::Options& options) {
  TestHost host(ranks, spec, options);
  std::vector<Move> decode, verify, block;
  SequenceId sequence = 1;
  for (const int64_t length : BoundaryLengths(spec, ranks.size())) {
    host.Open(sequence);
    Grow(host, sequence, length);
    decode.push_back({sequence, 1, 1});
    verify.push_back({sequence, 4, 4});
    block.push_back({sequence, 16, 16});
    ++sequence;
  }
  host.Step(StepKind::kDecode, decode);
  host.Step(StepKind::kDecode, verify);
  host.Step(StepKind::kDecode, block);
  host.Step(StepKind::kPrefill, verify);
}

TestHost::Options InputsInTurn(int32_t head_dim, int32_t group) {
  const DType inputs[] = {DType::kBf16, DType::kF16, DType::kF32};
  return {.q_dtype = inputs[static_cast<size_t>(group) % 3],
          .input_dtype = inputs[static_cast<size_t>(head_dim / 64 + group) % 3]};
}

void RunDecodeVerifyPrefill(Ranks& ranks, const CacheSpec& spec, const TestHost::Options& options,
                            int32_t many) {
  TestHost host(ranks, spec, options);
  host.Open(1);
  host.Open(2);
  host.Step(StepKind::kPrefill, {{1, 37, 37}, {2, 5, 5}});
  host.Step(StepKind::kPrefill, {{2, many + 6, many + 6}});
  host.Step(StepKind::kDecode, {{1, 1, 1}, {2, 1, 1}});
  host.Step(StepKind::kDecode, {{2, 4, 4}, {1, 1, 1}});
  host.Step(StepKind::kDecode, {{2, many, many}, {1, 1, 1}});
}

void RunChunkedPrefill(Ranks& ranks, const CacheSpec& spec, const TestHost::Options& options,
                       const std::vector<int32_t>& chunks) {
  TestHost host(ranks, spec, options);
  host.set_row_stride(7);
  host.Open(1);
  host.Open(2);
  for (size_t i = 0; i < chunks.size(); ++i) {
    // The second sequence starts later and has other chunks, so that one step holds entries with a
    // context and entries without.
    std::vector<Move> moves = {{1, chunks[i], chunks[i]}};
    if (i > 0) moves.push_back({2, chunks[i] / 2 + 1, chunks[i] / 2 + 1});
    host.Step(StepKind::kPrefill, moves);
  }
  host.Step(StepKind::kDecode, {{2, 1, 1}, {1, 1, 1}});
}

void RunForkAndTruncate(Ranks& ranks, const CacheSpec& spec, const TestHost::Options& options) {
  TestHost host(ranks, spec, options);
  const int64_t page = int64_t{spec.page_size} * ranks.size();
  const auto prompt = static_cast<int32_t>(page + page / 2 + 1);
  host.Open(1);
  host.Step(StepKind::kPrefill, {{1, prompt, prompt}});
  host.Fork(1, 2, prompt);    // in the middle of a page
  host.Fork(1, 3, page);      // at its end
  host.Fork(2, 4, page / 2);  // of a fork, within the first page
  host.Step(StepKind::kDecode, {{1, 1, 1}, {2, 1, 1}, {3, 1, 1}, {4, 1, 1}});
  host.Step(StepKind::kDecode, {{4, 4, 4}, {2, 4, 4}});

  host.Truncate(1, prompt - 3);
  host.Step(StepKind::kDecode, {{1, 2, 2}, {3, 2, 2}});
  host.Truncate(1, page / 2);
  // What the fork holds was not touched.
  host.Step(StepKind::kDecode, {{1, 1, 0, page / 2 - 1}, {4, 1, 1}});
  const auto more = static_cast<int32_t>(page + 2);
  host.Step(StepKind::kPrefill, {{1, more, more}, {2, 5, 5}});

  host.Close(3);
  host.Close(1);
  host.Open(5);
  host.Step(StepKind::kPrefill, {{5, more, more}});
  host.Step(StepKind::kDecode, {{5, 1, 1}, {2, 1, 1}, {4, 1, 1}});
  host.Truncate(5, 0);
  host.Step(StepKind::kDecode, {{5, 1, 1}});
}

void RunSharedForks(Ranks& ranks, const CacheSpec& spec, const TestHost::Options& options,
                    int32_t tokens, int32_t forks) {
  TestHost host(ranks, spec, options);
  host.set_row_stride(3);
  const auto more = static_cast<int32_t>(kSharedSlots * ranks.size());
  const SequenceId stranger = 1000;
  host.Open(1);
  host.Open(stranger);
  host.Step(StepKind::kAppend, {{1, 0, tokens}, {stranger, 0, 100}});
  host.Fork(1, 2, tokens);
  host.Step(StepKind::kAppend, {{2, 0, more + 3}});
  std::vector<Move> all;
  for (SequenceId id = 1; id <= static_cast<SequenceId>(forks); ++id) {
    // In the middle of a page.
    if (id > 2) host.Fork(1 + id % 2, id, id % 2 == 0 ? tokens - 5 : tokens + more + 1);
    all.push_back({id, 1, 1});
    if (id == 3) all.push_back({stranger, 1, 1});
  }
  // (From the second step on they can be graphs.)
  for (int step = 0; step < 3; ++step) host.Step(StepKind::kDecode, all);
  for (Move& move : all) {
    if (move.sequence % 3 == 0) move.query_rows = move.new_tokens = 4;
  }
  host.Step(StepKind::kDecode, all);
  std::vector<Move> drafts = all;
  for (Move& move : drafts) {
    move.query_rows = move.new_tokens = 1 + static_cast<int32_t>(move.sequence % 8);
  }
  for (int step = 0; step < 2; ++step) host.Step(StepKind::kDflash, drafts);
  host.Truncate(4, tokens / 2);
  host.Truncate(3, tokens - 20);
  host.Step(StepKind::kDecode, all);
  host.Close(1);
  std::erase_if(all, [](const Move& move) { return move.sequence == 1; });
  host.Step(StepKind::kDecode, all);
}

void RunMixedBatches(Ranks& ranks, const CacheSpec& spec, const TestHost::Options& options) {
  TestHost host(ranks, spec, options);
  for (SequenceId id = 1; id <= 6; ++id) host.Open(id);
  host.Step(StepKind::kPrefill, {{1, 40, 40}, {2, 3, 3}, {3, 65, 65}, {4, 17, 17}});
  host.Step(StepKind::kAppend, {{5, 0, 9}, {2, 0, 30}});

  // Decode, verify, a look back without tokens, tokens without rows, the first token of a sequence.
  host.Step(StepKind::kDecode, {{1, 1, 1}, {3, 4, 4}, {2, 3, 0, 10}, {4, 0, 5}, {6, 1, 1}});
  // The same kinds of entries in a prefill, where rows and tokens are then numbered apart.
  host.Step(StepKind::kPrefill,
            {{2, 3, 0, 10}, {1, 20, 20}, {4, 0, 5}, {3, 33, 33}, {5, 2, 0, 0}, {6, 7, 7}});

  // Repeats next to new work.
  host.Step(StepKind::kDecode, {{1, 1, 1, 40}, {3, 1, 1}, {4, 5, 5, 2}});
  host.Step(StepKind::kPrefill, {{1, 40, 40, 0}, {3, 8, 8}, {2, 3, 3, 0}});
  host.Step(StepKind::kAppend, {{5, 0, 9, 0}, {6, 0, 1}});

  // Repeats with other bytes are reported by their owner, and hurt nothing.
  Move changed_first{1, 1, 1, 40, 0};
  Move changed_later{4, 5, 5, 2, 4};
  host.Step(StepKind::kDecode, {{3, 1, 1}, changed_first, {2, 1, 1}, changed_later});
  host.Step(StepKind::kPrefill, {{3, 2, 2}, {1, 40, 40, 0, 39}, {2, 2, 2}});
  host.Step(StepKind::kAppend, {{5, 0, 9, 0, 8}});
  host.Step(StepKind::kDecode, {{1, 1, 1, 40}, {4, 5, 5, 2}, {5, 1, 1}, {3, 1, 1}});
}

void RunStepsInPasses(Ranks& ranks, const CacheSpec& spec, const TestHost::Options& options) {
  TestHost host(ranks, spec, options);
  for (SequenceId id = 1; id <= 3; ++id) host.Open(id);
  host.Step(StepKind::kPrefill, {{1, 60, 60}});
  host.Step(StepKind::kPrefill, {{1, 31, 31}, {2, 40, 40}});
  host.Step(StepKind::kPrefill, {{2, 90, 90}, {1, 3, 0, 5}, {3, 1, 1}});
  host.Step(StepKind::kDecode, {{2, 50, 50}, {1, 3, 3}});
}

void RunLongAndShort(Ranks& ranks, int32_t tokens, const TestHost::Options& options) {
  CacheSpec spec = SmallSpec();
  SetHeads(&spec, /*kv_heads=*/2, /*group=*/8, /*head_dim=*/128);
  spec.kv_dtype = DType::kFp8E4M3;
  spec.interleave = 8;
  spec.num_pages = 512 / ranks.size();
  spec.layers.resize(2);
  spec.layers[1].window.left = 1024;
  TestHost host(ranks, spec, options);
  for (SequenceId id = 1; id <= 4; ++id) host.Open(id);
  host.Step(StepKind::kAppend, {{1, 0, tokens}, {2, 0, 3}, {4, 0, 200}});
  host.Step(StepKind::kDecode, {{2, 1, 1}, {1, 1, 1}, {3, 1, 1}, {4, 4, 4}});
  host.Step(StepKind::kDecode, {{1, 16, 16}});
}

Results RunOneSequence(Ranks& ranks, const TestHost::Options& options) {
  CacheSpec spec = SmallSpec();
  SetHeads(&spec, /*kv_heads=*/2, /*group=*/4, /*head_dim=*/128);
  spec.kv_dtype = DType::kFp8E4M3;
  spec.layers[0].sinks = SinksFor(spec.q_heads);
  TestHost host(ranks, spec, options);
  host.Open(1);
  Results all;
  for (const auto& [kind, rows] : {std::pair{StepKind::kPrefill, 200},
                                   {StepKind::kPrefill, 100},
                                   {StepKind::kDecode, 1},
                                   {StepKind::kDecode, 4}}) {
    host.Step(kind, {{1, rows, rows}});
    all.o.insert(all.o.end(), host.last_o().begin(), host.last_o().end());
    all.lse.insert(all.lse.end(), host.last_lse().begin(), host.last_lse().end());
  }
  return all;
}

void RunDrafts(Ranks& ranks, const CacheSpec& spec, const TestHost::Options& options) {
  TestHost host(ranks, spec, options);
  const std::vector<int32_t> blocks = {1, 2, 8, 16, 32};
  std::vector<Move> all;
  SequenceId sequence = 1;
  for (const int64_t length : BoundaryLengths(spec, ranks.size())) {
    host.Open(sequence);
    if (length > 0) host.Step(StepKind::kAppend, {{sequence, 0, static_cast<int32_t>(length)}});
    const int32_t block = blocks[sequence % blocks.size()];
    all.push_back({sequence, block, block});
    ++sequence;
  }
  host.Step(StepKind::kDflash, all);
  for (const int32_t block : blocks) {
    for (Move& move : all) move.query_rows = move.new_tokens = block;
    host.Step(StepKind::kDflash, all);
  }

  // A draft leaves nothing behind: what follows finds the context alone.
  const SequenceId longest = sequence - 1;
  const int64_t length = host.length(longest);
  host.Step(StepKind::kDecode, {{longest, 5, 5}, {2, 1, 1}});
  host.Truncate(longest, length + 2);
  host.Step(StepKind::kDflash, {{2, 8, 8}, {longest, 16, 16}});
  host.Step(StepKind::kDflash, {{longest, 16, 16, length}, {2, 3, 3, 0}});  // as it was then
}

void RunTwoDrafts(Ranks& ranks, const CacheSpec& spec, const TestHost::Options& options) {
  TestHost host(ranks, spec, options);
  host.Open(1);
  host.Open(2);
  host.Step(StepKind::kAppend, {{1, 0, 77}});
  for (int again = 0; again < 3; ++again) host.Step(StepKind::kDflash, {{2, 8, 8}, {1, 16, 16}});
}

void RunPoisonedSlots(Ranks& ranks, const CacheSpec& spec, const TestHost::Options& options) {
  TestHost host(ranks, spec, options);
  host.Open(1);
  host.Open(2);
  const int32_t prompt = 2 * spec.page_size * ranks.size() + 3;
  host.set_nan_tokens(true);
  host.Step(StepKind::kAppend, {{1, 0, prompt}, {2, 0, prompt}});
  host.set_nan_tokens(false);
  host.Truncate(1, 0);
  host.Truncate(2, 0);
  host.Step(StepKind::kDecode, {{1, 1, 1}, {2, 3, 3}});
  host.Step(StepKind::kPrefill, {{2, 21, 21}, {1, 5, 5}});
  host.set_nan_tokens(true);
  host.Step(StepKind::kDecode, {{1, 5, 5}, {2, 9, 9}});
  host.set_nan_tokens(false);
  host.Truncate(1, 6);
  host.Truncate(2, 24);
  host.Step(StepKind::kDecode, {{1, 2, 2}, {2, 1, 1}});
}

}  // namespace tributary::worker::testing
