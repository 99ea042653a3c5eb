#include "tests/worker/test_host.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <utility>

#include "base/status/errors.h"
#include "kernels/element.h"
#include "tests/support/compare.h"
#include "tests/support/random.h"
#include "worker/choose_path.h"

namespace tributary::worker::testing {
namespace {

constexpr CacheId kCache = 7;
constexpr auto kPatience = std::chrono::seconds(60);

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

TestHost::TestHost(Ranks& ranks, const CacheSpec& spec, const Options& options)
    : ranks_(ranks),
      spec_(spec),
      options_(options),
      page_random_(options.seed + 1000),
      holders_(static_cast<size_t>(spec.num_pages), 0) {
  for (int32_t page = 0; page < spec.num_pages; ++page) free_pages_.push_back(page);
  ExecuteOk(Wrap(CreateCacheCommand{spec}));
}

Command TestHost::Wrap(decltype(Command::body) body) {
  Command command;
  command.epoch = ranks_.epoch();
  command.number = ++number_;
  command.cache = kCache;
  command.deadline = std::chrono::steady_clock::now() + kPatience;
  command.body = std::move(body);
  return command;
}

std::map<int, Reply> TestHost::ExecuteOk(const Command& command) {
  std::map<int, Reply> replies = ranks_.Execute(command);
  for (const auto& [rank, reply] : replies) {
    EXPECT_TRUE(reply.status.ok()) << "rank " << rank << ": " << reply.status;
    EXPECT_EQ(reply.number, command.number);
    EXPECT_EQ(reply.rank, rank);
  }
  return replies;
}

int32_t TestHost::TakePage() {
  if (free_pages_.empty()) {
    ADD_FAILURE() << "the test's cache has too few pages";
    return 0;
  }
  // Any page, so that neighbours in a table are not neighbours in memory.
  std::uniform_int_distribution<size_t> any(0, free_pages_.size() - 1);
  std::swap(free_pages_[any(page_random_)], free_pages_.back());
  const int32_t page = free_pages_.back();
  free_pages_.pop_back();
  holders_[static_cast<size_t>(page)] = 1;
  return page;
}

void TestHost::ReleasePage(int32_t page) {
  if (--holders_[static_cast<size_t>(page)] == 0) free_pages_.push_back(page);
}

void TestHost::Open(SequenceId sequence) {
  Sequence& made = sequences_[sequence];
  made.layers.resize(spec_.layers.size());
  std::uniform_int_distribution<int32_t> any(0, spec_.num_pages - 1);
  PageUpdate dead{sequence, 0, {}};
  for (int i = 0; i < std::min(5, spec_.num_pages); ++i) dead.pages.push_back(any(page_random_));
  ExecuteOk(Wrap(SetTablesCommand{{dead}}));
}

void TestHost::TruncateLayers(int64_t length, std::vector<DenseLayer>* layers) const {
  for (size_t i = 0; i < layers->size(); ++i) {
    TruncateDense(spec_, spec_.layers[i], length, &(*layers)[i]);
  }
}

void TestHost::Fork(SequenceId parent, SequenceId child, int64_t length) {
  const Sequence& from = sequences_.at(parent);
  Sequence& to = sequences_[child];
  to.length = length;
  to.layers = from.layers;
  TruncateLayers(length, &to.layers);
  const int64_t pages = CeilDiv(length, int64_t{spec_.page_size} * ranks_.size());
  to.pages.assign(from.pages.begin(), from.pages.begin() + pages);
  for (const int32_t page : to.pages) ++holders_[static_cast<size_t>(page)];
  ExecuteOk(Wrap(SetTablesCommand{{{child, 0, to.pages}}}));
}

void TestHost::Truncate(SequenceId id, int64_t length) {
  Sequence& sequence = sequences_.at(id);
  sequence.length = length;
  TruncateLayers(length, &sequence.layers);
  const auto keep = static_cast<size_t>(CeilDiv(length, int64_t{spec_.page_size} * ranks_.size()));
  // The ranks are told nothing: their tables keep entries that are now dead.
  while (sequence.pages.size() > keep) {
    ReleasePage(sequence.pages.back());
    sequence.pages.pop_back();
  }
}

void TestHost::Close(SequenceId id) {
  for (const int32_t page : sequences_.at(id).pages) ReleasePage(page);
  sequences_.erase(id);
  ExecuteOk(Wrap(DropTablesCommand{{id}}));
}

// Every page that tokens [first, end) go to belongs to this sequence alone.
void TestHost::MakeWritable(SequenceId id, int64_t first, int64_t end, Prepared* prepared) {
  std::vector<int32_t>& pages = sequences_.at(id).pages;
  const int64_t page_tokens = int64_t{spec_.page_size} * ranks_.size();
  for (int64_t i = first / page_tokens; i < CeilDiv(end, page_tokens); ++i) {
    const auto index = static_cast<size_t>(i);
    if (index == pages.size()) {
      pages.push_back(TakePage());
    } else if (holders_[static_cast<size_t>(pages[index])] > 1) {
      const int32_t copy = TakePage();
      prepared->copies.push_back({pages[index], copy});
      ReleasePage(pages[index]);
      pages[index] = copy;
    } else {
      continue;
    }
    prepared->updates.push_back({id, static_cast<int32_t>(i), {pages[index]}});
  }
}

TestHost::Prepared TestHost::Prepare(StepKind kind, const std::vector<Move>& moves) {
  Prepared prepared;
  for (const Move& move : moves) {
    const int64_t length = sequences_.at(move.sequence).length;
    StepEntry entry{.sequence = move.sequence,
                    .first_position = move.first_position < 0 ? length : move.first_position,
                    .query_rows = move.query_rows,
                    .new_tokens = move.new_tokens};
    const bool keeps = kind != StepKind::kDflash && move.new_tokens > 0;
    entry.replay = keeps && entry.first_position < length;
    if (keeps && !entry.replay) {
      MakeWritable(move.sequence, length, length + move.new_tokens, &prepared);
    }
    prepared.entries.push_back(entry);
  }
  return prepared;
}

void TestHost::Step(StepKind kind, const std::vector<Move>& moves) {
  ++steps_;
  const Prepared prepared = Prepare(kind, moves);
  for (size_t layer = 0; layer < spec_.layers.size(); ++layer) {
    StepLayer(kind, moves, prepared, static_cast<int32_t>(layer));
  }
  if (kind == StepKind::kDflash) return;
  for (const StepEntry& entry : prepared.entries) {
    if (!entry.replay) sequences_.at(entry.sequence).length += entry.new_tokens;
  }
}

void TestHost::Encode(Tensor* tensor) {
  tensor->bytes.resize(BytesOf(tensor->dtype, static_cast<int64_t>(tensor->values.size())));
  for (size_t i = 0; i < tensor->values.size(); ++i) {
    StoreElement(tensor->dtype, tensor->bytes.data(), i, tensor->values[i]);
    tensor->values[i] = LoadElement(tensor->dtype, tensor->bytes.data(), i);
  }
}

TestHost::Tensor TestHost::Random(DType dtype, const Prepared& prepared, int32_t StepEntry::*count,
                                  size_t row, uint64_t salt) const {
  Tensor tensor;
  tensor.dtype = dtype;
  for (const StepEntry& entry : prepared.entries) {
    const size_t values = static_cast<size_t>(entry.*count) * row;
    const std::vector<float> drawn =
        test::NormalValues(values, test::MixSeeds({options_.seed, steps_, entry.sequence, salt}));
    tensor.values.insert(tensor.values.end(), drawn.begin(), drawn.end());
  }
  Encode(&tensor);
  return tensor;
}

// New tokens are random and enter the model; repeated ones are what the model has.
void TestHost::FillTokens(const std::vector<Move>& moves, const Prepared& prepared, int32_t layer,
                          Tensor* k, Tensor* v) {
  const auto [k_token, v_token] = TokenElements(layer);
  size_t token_at = 0;
  for (size_t i = 0; i < moves.size(); ++i) {
    const StepEntry& entry = prepared.entries[i];
    const auto count = static_cast<size_t>(entry.new_tokens);
    DenseLayer& dense = sequences_.at(entry.sequence).layers[static_cast<size_t>(layer)];
    const auto new_k = std::span(k->values).subspan(token_at * k_token, count * k_token);
    const auto new_v = std::span(v->values).subspan(token_at * v_token, count * v_token);
    if (entry.replay) {
      const auto first = static_cast<size_t>(entry.first_position);
      std::copy_n(dense.k.begin() + static_cast<ptrdiff_t>(first * k_token), new_k.size(),
                  new_k.begin());
      std::copy_n(dense.v.begin() + static_cast<ptrdiff_t>(first * v_token), new_v.size(),
                  new_v.begin());
      if (moves[i].corrupt_token >= 0) {
        new_v[(static_cast<size_t>(moves[i].corrupt_token) + 1) * v_token - 1] += 8.0f;
      }
    } else {
      if (nan_tokens_) {
        std::fill(new_k.begin(), new_k.end(), std::numeric_limits<float>::quiet_NaN());
        std::fill(new_v.begin(), new_v.end(), std::numeric_limits<float>::quiet_NaN());
      }
      AppendDense(spec_, spec_.layers[static_cast<size_t>(layer)], new_k, new_v, &dense);
    }
    token_at += count;
  }
  Encode(k);
  Encode(v);
}

std::pair<size_t, size_t> TestHost::TokenElements(int32_t layer) const {
  const KvGeometry g = Geometry(layer).kv;
  const auto heads = static_cast<size_t>(g.kv_heads);
  return {heads * static_cast<size_t>(g.key_dim), heads * static_cast<size_t>(g.value_dim)};
}

void TestHost::StepLayer(StepKind kind, const std::vector<Move>& moves, const Prepared& prepared,
                         int32_t layer) {
  const LayerGeometry g = Geometry(layer);
  const size_t q_row = static_cast<size_t>(g.q_heads) * static_cast<size_t>(g.kv.key_dim);
  const auto [k_token, v_token] = TokenElements(layer);
  const uint64_t salt = 3 * static_cast<uint64_t>(layer);
  const Tensor q = Random(options_.q_dtype, prepared, &StepEntry::query_rows, q_row, salt);
  Tensor k = Random(options_.input_dtype, prepared, &StepEntry::new_tokens, k_token, salt + 1);
  Tensor v = Random(options_.input_dtype, prepared, &StepEntry::new_tokens, v_token, salt + 2);
  if (kind != StepKind::kDflash) FillTokens(moves, prepared, layer, &k, &v);

  StepCommand step{.layer = layer, .kind = kind, .entries = prepared.entries};
  step.q = q.view();
  step.k = k.view();
  step.v = v.view();
  step.bf16_partials = options_.bf16_partials;
  if (layer == 0) {
    step.page_copies = prepared.copies;
    step.page_updates = prepared.updates;
  }
  const std::map<int, Reply> replies = ExecuteOk(Wrap(step));
  CheckConflicts(moves, prepared, replies);
  const auto root = replies.find(0);
  if (root == replies.end() || !root->second.status.ok()) return;
  last_o_ = root->second.o;
  last_lse_ = root->second.lse;
  if (options_.checks_outputs) CheckOutputs(std::move(step), root->second);
  if (!nan_tokens_) CheckRows(kind, moves, prepared, layer, q, k, v, root->second);
}

void TestHost::CheckOutputs(StepCommand step, const Reply& first) {
  step.page_copies.clear();
  for (StepEntry& entry : step.entries) {
    entry.replay = step.kind != StepKind::kDflash && entry.new_tokens > 0;
  }
  std::vector<PagedBytes> inputs;
  for (TensorView* tensor : {&step.q, &step.k, &step.v}) {
    if (tensor->bytes == 0) continue;
    inputs.emplace_back(tensor->bytes, options_.pin);
    std::memcpy(inputs.back().data(), tensor->data, tensor->bytes);
    tensor->data = inputs.back().data();
    tensor->pinned = inputs.back().pinned();
  }
  const OutputCheck check(step.entries, Geometry(step.layer), outputs_turn_++, options_.pin);
  step.outputs = check.outputs();
  const std::map<int, Reply> replies = ExecuteOk(Wrap(std::move(step)));
  if (const auto root = replies.find(0); root != replies.end() && root->second.status.ok()) {
    check.Check(root->second, first.o, first.lse);
  }
}

void TestHost::CheckConflicts(const std::vector<Move>& moves, const Prepared& prepared,
                              const std::map<int, Reply>& replies) const {
  for (const auto& [rank, reply] : replies) {
    std::vector<int32_t> expected;
    for (size_t i = 0; i < moves.size(); ++i) {
      if (!prepared.entries[i].replay || moves[i].corrupt_token < 0) continue;
      const int64_t token = prepared.entries[i].first_position + moves[i].corrupt_token;
      const int64_t owner = token / spec_.interleave % ranks_.size();
      if (owner == rank) expected.push_back(static_cast<int32_t>(i));
    }
    EXPECT_EQ(reply.conflicts, expected) << "rank " << rank;
  }
}

DenseLayer TestHost::ModelOf(StepKind kind, const StepEntry& entry, int32_t layer, size_t token,
                             const Tensor& k, const Tensor& v) const {
  DenseLayer dense = sequences_.at(entry.sequence).layers[static_cast<size_t>(layer)];
  if (kind != StepKind::kDflash) return dense;
  const auto [k_token, v_token] = TokenElements(layer);
  const auto count = static_cast<size_t>(entry.new_tokens);
  const LayerSpec& spec = spec_.layers[static_cast<size_t>(layer)];
  TruncateDense(spec_, spec, entry.first_position, &dense);
  AppendDense(spec_, spec, std::span(k.values).subspan(token * k_token, count * k_token),
              std::span(v.values).subspan(token * v_token, count * v_token), &dense);
  return dense;
}

void TestHost::CheckRows(StepKind kind, const std::vector<Move>& moves, const Prepared& prepared,
                         int32_t layer, const Tensor& q, const Tensor& k, const Tensor& v,
                         const Reply& reply) {
  const LayerGeometry g = Geometry(layer);
  const auto heads = static_cast<size_t>(g.q_heads);
  const size_t q_size = heads * static_cast<size_t>(g.kv.key_dim);
  const size_t row_size = heads * static_cast<size_t>(g.kv.value_dim);
  ASSERT_EQ(reply.o.size() / row_size, q.values.size() / q_size);
  ASSERT_EQ(reply.lse.size() * static_cast<size_t>(g.kv.value_dim), reply.o.size());
  std::vector<double> o(row_size);
  std::vector<double> lse(heads);
  size_t row = 0;
  size_t token = 0;
  for (size_t e = 0; e < moves.size(); ++e) {
    const StepEntry& entry = prepared.entries[e];
    const DenseLayer dense = ModelOf(kind, entry, layer, token, k, v);
    token += static_cast<size_t>(entry.new_tokens);
    const bool draft = kind == StepKind::kDflash;
    const bool full_precision = draft
                                    ? entry.new_tokens > 0
                                    : kind == StepKind::kPrefill &&
                                          SeesTokensAsTheyCame(entry.query_rows, entry.new_tokens);
    if (full_precision && moves[e].corrupt_token >= 0) {
      row += static_cast<size_t>(entry.query_rows);  // attended to what it brought: no one's answer
      continue;
    }
    for (int32_t i = 0; i < entry.query_rows; ++i, ++row) {
      // The last row of an entry is always looked at.
      if (i % row_stride_ != 0 && i + 1 != entry.query_rows) continue;
      const int64_t position = entry.first_position + i;
      const DenseRow dense_row{
          .q = q.values.data() + row * q_size,
          .position = position,
          .given_from = full_precision ? entry.first_position : std::numeric_limits<int64_t>::max(),
          .anchor = draft ? entry.first_position : -1};
      DenseAttention(spec_, spec_.layers[static_cast<size_t>(layer)], dense, dense_row, o.data(),
                     lse.data());
      for (size_t at = 0; at < row_size; ++at) {
        worst_o_ = std::max(worst_o_, std::abs(double{reply.o[row * row_size + at]} - o[at]));
      }
      ASSERT_TRUE(
          test::AllClose(std::span(reply.o).subspan(row * row_size, row_size), o,
                         options_.o_tolerance.value_or(test::AttentionTolerance(options_.q_dtype)),
                         {g.q_heads, g.kv.value_dim}))
          << "o [head, dim] of sequence " << entry.sequence << " layer " << layer << " position "
          << position;
      ASSERT_TRUE(test::AllClose(std::span(reply.lse).subspan(row * heads, heads), lse,
                                 options_.lse_tolerance.value_or(test::kAttentionTolerance),
                                 {g.q_heads}))
          << "lse [head] of sequence " << entry.sequence << " layer " << layer << " position "
          << position;
    }
  }
}

}  // namespace tributary::worker::testing
