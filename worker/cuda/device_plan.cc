#include "worker/cuda/device_plan.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "worker/cuda/step_graphs.h"

namespace tributary::worker {
namespace {

constexpr size_t kAlignment = 256;
// Slots of context that a prefill gathers at a time, at most: 128 MiB for 8 KV heads of 128.
constexpr int64_t kMostGatheredSlots = 32768;
static_assert(kMostGatheredSlots >= cuda::kInvariantSlots);

size_t RoundUp(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

// Room for a section: doublings, so that a sequence that grows seldom moves what comes after it.
size_t RoomFor(size_t count) { return std::bit_ceil(std::max<size_t>(count, 16)); }

// Of what is in the pass, which may be the rest of an entry.
int32_t MostRows(const RowPass& pass) {
  int32_t most = 1;
  for (const AttentionEntry& entry : pass.entries) most = std::max(most, entry.row_count);
  return most;
}

// As far as the last row of each sequence sees, which is about what all of them do.
int64_t TotalKeys(const RowPass& pass, std::span<const KeyRange> keys) {
  int64_t total = 0;
  for (const AttentionEntry& entry : pass.entries) {
    if (entry.row_count == 0) continue;
    const KeyRange last = keys[static_cast<size_t>(entry.row_begin + entry.row_count - 1)];
    if (!Empty(last)) total += last.hi - last.lo;
  }
  return total;
}

// As many as the pass's context takes, within the bound.
int64_t GatheredSlots(std::span<const AttentionEntry> entries, int32_t page_size) {
  int64_t slots = cuda::kGatherSlots;
  for (const AttentionEntry& entry : entries) {
    slots += static_cast<int64_t>(
        RoundUp(entry.pages.size() * static_cast<size_t>(page_size), cuda::kGatherSlots));
  }
  return std::min(slots, kMostGatheredSlots);
}

}  // namespace

int32_t PaddedCount(int32_t count) {
  if (count <= 8) return count;
  const auto step = static_cast<int32_t>(std::bit_ceil(static_cast<uint32_t>(count)) / 8);
  return (count + step - 1) / step * step;
}

template <typename T>
Section DevicePlan::Place(const T* data, size_t count, size_t room) {
  const Section section{bytes_, count};
  copies_.push_back({section, data, count * sizeof(T), room * sizeof(T)});
  bytes_ += RoundUp(room * sizeof(T), kAlignment);
  return section;
}

void DevicePlan::PlaceWriteSlots(const std::vector<int64_t>& slots) {
  append_places_ = padded_tokens_;
  // A list is longer or shorter from step to step, so a captured graph would seldom fit again.
  const bool may_be_graph = repeatable() && static_cast<int32_t>(slots.size()) <= kMostGraphRows;
  if (may_be_graph || !cuda::ListIfThatPays(slots, &append_list_)) {
    write_slots_ = Place(slots.data(), slots.size(), static_cast<size_t>(padded_tokens_));
    return;
  }
  const cuda::AppendList& list = append_list_;
  append_places_ = PaddedCount(static_cast<int32_t>(list.slots.size()));
  const auto room = static_cast<size_t>(append_places_);
  write_slots_ = Place(list.slots.data(), list.slots.size(), room);
  listed_tokens_ = Place(list.tokens.data(), list.tokens.size(), room);
}

void DevicePlan::Make(const CacheSpec& spec, const StepPlan& plan, const StepTypes& types,
                      const DevicePlanOptions& options) {
  id_ = 0;
  types_ = types;
  bytes_ = 0;
  partial_columns_ = 0;
  arrivals_ = 0;
  gathered_rows_ = 0;
  workspace_bytes_ = 0;
  copies_.clear();
  padded_tokens_ = PaddedCount(plan.new_tokens);
  padded_rows_ = PaddedCount(plan.query_rows);
  const auto tokens = static_cast<size_t>(padded_tokens_);
  write_slots_ = listed_tokens_ = compare_slots_ = entry_of_token_ = kept_slots_ = {};
  append_places_ = 0;
  entries_ = 0;
  if (!plan.compare_slots.empty()) {
    compare_slots_ = Place(plan.compare_slots.data(), plan.compare_slots.size(), tokens);
    entry_of_token_ = Place(plan.entry_of_token.data(), plan.entry_of_token.size(), tokens);
    entries_ = plan.entry_of_token.back() + 1;
  }
  if (!plan.kept_slots.empty()) {
    kept_slots_ = Place(plan.kept_slots.data(), plan.kept_slots.size(), tokens);
  }
  hosts_.resize(std::max(hosts_.size(), plan.passes.size() + 1));
  passes_.resize(plan.passes.size());
  for (size_t i = 0; i < passes_.size(); ++i) MakePass(spec, plan, plan.passes[i], options, i);
  if (!plan.write_slots.empty()) PlaceWriteSlots(plan.write_slots);
  // (A prefill whose rows all look back has no runs, and yet asks for this part.)
  const bool any_new_keys = !plan.new_keys.empty() && types.heads.count > 0;
  block_keys_ = {};
  if (types.draft && any_new_keys) MakeBlocks(plan);
  has_new_tokens_ = !types.draft && any_new_keys;
  if (has_new_tokens_) MakeNewTokens(plan, options);
  id_ = plan.id;
}

void DevicePlan::MakePass(const CacheSpec& spec, const StepPlan& plan, const RowPass& pass,
                          const DevicePlanOptions& options, size_t index) {
  Host& host = hosts_[index];
  host.tables.clear();
  plan_entries_.clear();
  prefill_entries_.clear();
  table_begins_.clear();
  for (const AttentionEntry& entry : pass.entries) {
    const auto table = static_cast<int32_t>(host.tables.size());
    table_begins_.push_back(table);
    plan_entries_.push_back({entry.row_begin, entry.row_count, table});
    prefill_entries_.push_back(
        {.row_begin = entry.row_begin, .row_count = entry.row_count, .page_table = table});
    host.tables.insert(host.tables.end(), entry.pages.begin(), entry.pages.end());
  }
  const auto keys =
      std::span(plan.context_keys)
          .subspan(static_cast<size_t>(pass.row_begin), static_cast<size_t>(pass.row_count));
  PassLaunch& launch = passes_[index];
  launch.many_rows = pass.many_rows;
  launch.shared = {};
  if (launch.many_rows) {
    MakeManyRows(spec, pass, keys, options, &launch.many, &host);
  } else {
    MakeFewRows(spec, pass, keys, options, &launch, &host);
  }
}

void DevicePlan::MakeFewRows(const CacheSpec& spec, const RowPass& pass,
                             std::span<const KeyRange> keys, const DevicePlanOptions& options,
                             PassLaunch* launch, Host* host) {
  cuda::AttentionShape& shape = launch->few.shape;
  shape = {.geometry = types_.geometry.kv,
           .q_heads = types_.geometry.q_heads,
           .page_size = spec.page_size,
           // Batch-invariant results take the same kernel in every call.
           .max_rows = options.kernels.batch_invariant ? 1 : MostRows(pass),
           .sequences = static_cast<int32_t>(std::max<size_t>(1, pass.entries.size()))};
  cuda::KernelOptions kernels = options.kernels;
  kernels.fp8_queries = RoundsQueries(spec, types_.geometry.kv.dtype);
  // (A result that is independent of the batch must not depend on who shares its pages.)
  cuda::SharedPlan& plan = host->shared;
  cuda::SharingCosts costs;
  const bool may_share = !pass.shared.empty() && !kernels.batch_invariant;
  if (may_share) {
    costs = cuda::SharingCostsFor(options.device, shape, kernels);
    cuda::PlanShared(costs, pass.entries, table_begins_, keys, pass.shared, &plan);
  }
  const bool shares = may_share && !plan.empty();
  if (shares) keys = plan.rest;
  shape.total_keys = TotalKeys(pass, keys);
  cuda::SharedChoice choice;
  if (shares) {
    launch->shared.launch.shape = cuda::ShapeOfShared(shape, plan);
    choice = cuda::ChooseShared(options.device, launch->shared.launch.shape, shape, kernels,
                                cuda::DealMultiprocessors(options.device, costs, plan));
  } else {
    choice.rest = cuda::ChooseKernel(options.device, shape, kernels);
    choice.rest_device = options.device;
  }
  launch->few.choice = choice.rest;
  Used used = MakeLaunch(choice.rest_device, plan_entries_, keys, &launch->few, &host->few);
  launch->few.tables =
      Place(host->tables.data(), host->tables.size(), RoomFor(host->tables.size()));
  if (shares) used = MakeShared(choice, used, &launch->shared, host);
  partial_columns_ = std::max(partial_columns_, used.partial_columns);
  arrivals_ = std::max(arrivals_, used.arrivals);
}

DevicePlan::Used DevicePlan::MakeShared(const cuda::SharedChoice& choice, Used of_rest,
                                        SharedLaunch* shared, Host* host) {
  const cuda::SharedPlan& plan = host->shared;
  shared->launch.choice = choice.shared;
  shared->side_by_side = choice.side_by_side;
  const Used used =
      MakeLaunch(choice.shared_device, plan.entries, plan.keys, &shared->launch, &host->gathered);
  shared->rows = PaddedCount(static_cast<int32_t>(plan.rows.size()));
  if (plan.InOrder()) {
    shared->first_row = plan.rows.front();
  } else {
    shared->gathered = Place(plan.rows.data(), plan.rows.size(), RoomFor(plan.rows.size()));
  }
  shared->parts = Place(plan.parts.data(), plan.parts.size(), RoomFor(plan.parts.size()));
  shared->part_rows =
      Place(plan.part_rows.data(), plan.part_rows.size(), RoomFor(plan.part_rows.size()));
  gathered_rows_ = std::max(gathered_rows_, shared->rows);
  if (!shared->side_by_side) {
    return {std::max(used.partial_columns, of_rest.partial_columns),
            std::max(used.arrivals, of_rest.arrivals)};
  }
  shared->first_partial_row = of_rest.partial_columns;
  shared->first_arrival = of_rest.arrivals;
  return {used.partial_columns + of_rest.partial_columns, used.arrivals + of_rest.arrivals};
}

DevicePlan::Used DevicePlan::MakeLaunch(const cuda::DeviceProperties& device,
                                        std::span<const cuda::PlanEntry> entries,
                                        std::span<const KeyRange> keys, AttentionLaunch* launch,
                                        cuda::Plan* made) {
  const cuda::DecodePlanShape shape =
      cuda::DecodePlanShapeFor(launch->choice, launch->shape, device);
  launch->blocks = shape.blocks;
  cuda::PlanAttention(shape, entries, keys, made);
  launch->items = Place(made->items.data(), made->items.size(), RoomFor(made->items.size()));
  launch->keys = Place(made->keys.data(), made->keys.size(), RoomFor(made->keys.size()));
  // What is cut into pieces changes with the lengths, and with them clusters and kernels of few
  // columns: not so that the workspace grows by more than StepSize allows for, nor so that what
  // lies in it moves (Signature) in most steps.
  const auto room_of = [&](int32_t count) {
    return static_cast<int32_t>(
        std::bit_ceil(static_cast<uint32_t>(std::max(count, device.multiprocessors))));
  };
  const int32_t columns = std::max(launch->choice.tile_rows, 32);
  return {int64_t{room_of(made->partials)} * columns, room_of(made->arrivals)};
}

void DevicePlan::MakeManyRows(const CacheSpec& spec, const RowPass& pass,
                              std::span<const KeyRange> keys, const DevicePlanOptions& options,
                              PrefillLaunch* launch, Host* host) {
  launch->shape = {.q = types_.q,
                   .geometry = types_.geometry.kv,
                   .q_heads = types_.geometry.q_heads,
                   .page_size = spec.page_size,
                   .head_begin = 0,
                   .head_count = types_.geometry.q_heads};
  const bool rounds_queries = RoundsQueries(spec, types_.geometry.kv.dtype);
  launch->choice = cuda::ChoosePrefill(options.device, launch->shape,
                                       {.portable = options.kernels.portable,
                                        .fp8_queries = rounds_queries,
                                        .fp8_weights = rounds_queries && spec.fp8_weights,
                                        .batch_invariant = options.kernels.batch_invariant});
  launch->workspace_slots = GatheredSlots(pass.entries, spec.page_size);
  const cuda::PrefillPlanShape shape = cuda::PrefillPlanShapeFor(
      launch->choice, launch->shape, options.device, launch->workspace_slots);
  cuda::PlanPrefillContext(shape, prefill_entries_, keys, &host->many);
  launch->tables = Place(host->tables.data(), host->tables.size(), RoomFor(host->tables.size()));
  PlacePrefill(host->many, pass.row_count, launch);
}

void DevicePlan::MakeNewTokens(const StepPlan& plan, const DevicePlanOptions& options) {
  prefill_entries_.clear();
  int32_t row = 0;
  // Rows outside of every run have no keys here, and get the empty partial.
  const auto rows_without_tokens = [&](int32_t end) {
    if (row < end) prefill_entries_.push_back({.row_begin = row, .row_count = end - row});
  };
  for (const NewTokensRun& run : plan.runs) {
    rows_without_tokens(run.row_begin);
    row = run.row_begin + run.count;
    for (const NewTokensEntry& entry : run.entries) {
      prefill_entries_.push_back({.row_begin = run.row_begin + entry.row_begin,
                                  .row_count = entry.row_count,
                                  .token_begin = run.token_begin + entry.row_begin,
                                  .token_count = entry.row_count});
    }
  }
  rows_without_tokens(plan.query_rows);
  KvGeometry geometry = types_.geometry.kv;
  geometry.dtype = types_.new_kv;
  PrefillLaunch& launch = new_tokens_;
  launch.shape = {.q = types_.q,
                  .geometry = geometry,
                  .q_heads = types_.geometry.q_heads,
                  .page_size = 0,
                  .head_begin = types_.heads.begin,
                  .head_count = types_.heads.count};
  launch.choice =
      cuda::ChoosePrefill(options.device, launch.shape, {.portable = options.kernels.portable});
  launch.workspace_slots = 0;
  const cuda::PrefillPlanShape shape =
      cuda::PrefillPlanShapeFor(launch.choice, launch.shape, options.device);
  Host& host = hosts_[passes_.size()];
  cuda::PlanPrefillNewTokens(shape, prefill_entries_, plan.new_keys, &host.many);
  PlacePrefill(host.many, plan.query_rows, &launch);
}

void DevicePlan::MakeBlocks(const StepPlan& plan) {
  block_rows_.assign(plan.new_keys.size(), cuda::RowKeys{});
  for (const NewTokensRun& run : plan.runs) {
    for (const NewTokensEntry& entry : run.entries) {
      const int32_t first_row = run.row_begin + entry.row_begin;
      const int32_t first_token = run.token_begin + entry.row_begin;
      for (int32_t row = first_row; row < first_row + entry.row_count; ++row) {
        const KeyRange& keys = plan.new_keys[static_cast<size_t>(row)];
        if (Empty(keys)) continue;
        block_rows_[static_cast<size_t>(row)] = {first_token + static_cast<int32_t>(keys.lo),
                                                 first_token + static_cast<int32_t>(keys.hi)};
      }
    }
  }
  block_keys_ = Place(block_rows_.data(), block_rows_.size(), RoomFor(block_rows_.size()));
  for (size_t i = 0; i < passes_.size(); ++i) {
    const int32_t begin = plan.passes[i].row_begin;
    const int32_t end = begin + plan.passes[i].row_count;
    std::vector<cuda::BlockEntry>& blocks = hosts_[i].blocks;
    blocks.clear();
    BlockLaunch& launch = passes_[i].block;
    launch.most_rows = 0;
    for (const NewTokensRun& run : plan.runs) {
      for (const NewTokensEntry& entry : run.entries) {
        const int32_t first = run.row_begin + entry.row_begin;
        const int32_t from = std::max(first, begin);
        const int32_t to = std::min(first + entry.row_count, end);
        if (from >= to) continue;
        blocks.push_back({.row_begin = from - begin,
                          .row_count = to - from,
                          .token_begin = run.token_begin + entry.row_begin,
                          .token_count = entry.row_count});
        launch.most_rows = std::max(launch.most_rows, to - from);
      }
    }
    launch.entries = Place(blocks.data(), blocks.size(), RoomFor(blocks.size()));
  }
}

void DevicePlan::PlacePrefill(const cuda::PrefillPlan& made, int64_t rows, PrefillLaunch* launch) {
  launch->rounds = made.passes;
  launch->items = Place(made.items.data(), made.items.size(), RoomFor(made.items.size()));
  launch->gathers = Place(made.gathers.data(), made.gathers.size(), RoomFor(made.gathers.size()));
  launch->keys = Place(made.keys.data(), made.keys.size(), RoomFor(made.keys.size()));
  launch->workspace_bytes =
      cuda::PrefillWorkspaceBytes(launch->choice, launch->shape, rows, launch->workspace_slots);
  workspace_bytes_ = std::max(workspace_bytes_, launch->workspace_bytes);
}

void DevicePlan::Write(std::byte* to) const {
  for (const Copy& copy : copies_) {
    std::byte* at = to + copy.section.offset;
    if (copy.bytes > 0) std::memcpy(at, copy.from, copy.bytes);
    std::memset(at + copy.bytes, 0xff, copy.padded_bytes - copy.bytes);
  }
}

bool DevicePlan::repeatable() const {
  return passes_.size() <= 1 && (passes_.empty() || !passes_[0].many_rows);
}

std::vector<uint64_t> DevicePlan::Signature() const {
  std::vector<uint64_t> values = {static_cast<uint64_t>(padded_tokens_),
                                  static_cast<uint64_t>(padded_rows_),
                                  write_slots_.offset,
                                  write_slots_.count > 0,
                                  listed_tokens_.offset,
                                  listed_tokens_.count > 0,
                                  static_cast<uint64_t>(append_places_),
                                  compare_slots_.offset,
                                  entry_of_token_.offset,
                                  kept_slots_.offset,
                                  kept_slots_.count > 0,
                                  static_cast<uint64_t>(entries_)};
  const auto add_launch = [&](const AttentionLaunch& launch) {
    for (const Section& s : {launch.items, launch.keys, launch.tables}) {
      values.push_back(s.offset);
    }
    const cuda::KernelChoice& c = launch.choice;
    values.push_back(static_cast<uint64_t>(c.kind) | uint64_t(c.tile_rows) << 8 |
                     uint64_t(c.blocks_per_multiprocessor) << 24 | uint64_t(c.share_strips) << 32 |
                     uint64_t(c.cluster_size) << 48 | uint64_t(c.fp8_queries) << 56);
    values.push_back(static_cast<uint64_t>(launch.blocks));
  };
  for (const PassLaunch& pass : passes_) {
    add_launch(pass.few);
    const SharedLaunch& shared = pass.shared;
    values.push_back(static_cast<uint64_t>(shared.rows));
    if (shared.rows == 0) continue;
    add_launch(shared.launch);
    values.push_back(shared.gathered.count > 0);
    values.push_back(static_cast<uint64_t>(shared.first_row));
    for (const Section& s : {shared.gathered, shared.parts, shared.part_rows}) {
      values.push_back(s.offset);
    }
    values.push_back(shared.side_by_side);
    values.push_back(static_cast<uint64_t>(shared.first_partial_row));
    values.push_back(static_cast<uint64_t>(shared.first_arrival));
  }
  if (block_keys_.count == 0) return values;
  values.push_back(block_keys_.offset);
  for (const PassLaunch& pass : passes_) {
    // A block is not padded: it is launched for as many rows as there are.
    values.push_back(pass.block.entries.offset);
    values.push_back(pass.block.entries.count);
    values.push_back(static_cast<uint64_t>(pass.block.most_rows));
  }
  return values;
}

}  // namespace tributary::worker
