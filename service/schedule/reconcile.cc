#include "service/schedule/reconcile.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace tributary::service {
namespace {

using worker::CommandMark;
using worker::HeldCache;
using worker::HeldSequence;
using worker::SequenceId;
using worker::Undo;

using BySequence = absl::flat_hash_map<SequenceId, HeldSequence>;

// Takes back one change. False: the report contradicts itself.
bool TakeBack(const Undo& undo, HeldSequence* sequence) {
  if (undo.layer >= 0) {
    const auto layer = static_cast<size_t>(undo.layer);
    if (layer >= sequence->lengths.size() || layer >= sequence->last_step.size()) return false;
    sequence->lengths[layer] = std::min(sequence->lengths[layer], undo.length);
    sequence->last_step[layer] = std::min(sequence->last_step[layer], undo.last_step);
    return true;
  }
  if (undo.table_size < 0 || undo.first_index < 0) return false;
  if (sequence->pages.size() > static_cast<size_t>(undo.table_size)) {
    sequence->pages.resize(static_cast<size_t>(undo.table_size));
  }
  const size_t first = static_cast<size_t>(undo.first_index);
  if (first + undo.pages.size() > sequence->pages.size()) return undo.pages.empty();
  std::copy(undo.pages.begin(), undo.pages.end(),
            sequence->pages.begin() + static_cast<std::ptrdiff_t>(first));
  return true;
}

// A rank's sequences as they were after the command `last_of_all`. What contradicts itself ends up
// without lengths.
BySequence Rewound(const HeldCache& held, const CommandMark& last_of_all) {
  BySequence sequences;
  for (const HeldSequence& sequence : held.sequences) sequences[sequence.id] = sequence;
  for (auto undo = held.undo.rbegin(); undo != held.undo.rend(); ++undo) {
    if (undo->mark <= last_of_all) continue;
    const auto found = sequences.find(undo->sequence);
    if (found == sequences.end()) continue;
    if (!TakeBack(*undo, &found->second)) found->second.lengths.clear();
  }
  return sequences;
}

int64_t Greatest(const HeldSequence& sequence) {
  if (sequence.lengths.empty()) return 0;
  return *std::max_element(sequence.lengths.begin(), sequence.lengths.end());
}

// What a sequence must be like for anything to be done with it.
absl::Status Check(const HeldSequence& sequence, const HeldCache& cache) {
  const size_t layers = cache.spec.layers.size();
  if (sequence.lengths.size() != layers || sequence.last_step.size() != layers) {
    return absl::DataLossError("a worker's report contradicts itself");
  }
  const auto negative = [](int64_t length) { return length < 0; };
  if (std::any_of(sequence.lengths.begin(), sequence.lengths.end(), negative) ||
      std::any_of(sequence.last_step.begin(), sequence.last_step.end(), negative) ||
      sequence.given_up < 0) {
    return absl::DataLossError("a worker reports a negative length");
  }
  return absl::OkStatus();
}

// `all`: the sequence on every rank. On success the first of them is what all hold.
absl::Status Agree(std::vector<HeldSequence*>& all, const HeldCache& cache, int64_t page_tokens) {
  HeldSequence& common = *all.front();
  for (const HeldSequence* sequence : all) {
    if (absl::Status status = Check(*sequence, cache); !status.ok()) return status;
    common.given_up = std::max(common.given_up, sequence->given_up);
    for (size_t layer = 0; layer < common.lengths.size(); ++layer) {
      common.lengths[layer] = std::min(common.lengths[layer], sequence->lengths[layer]);
      common.last_step[layer] =
          std::min({common.last_step[layer], sequence->last_step[layer], common.lengths[layer]});
    }
  }
  const size_t needed = static_cast<size_t>((Greatest(common) + page_tokens - 1) / page_tokens);
  const size_t from = std::min(needed, static_cast<size_t>(common.given_up));
  for (const HeldSequence* sequence : all) {
    if (sequence->pages.size() < needed) {
      return absl::DataLossError("a worker's page table is shorter than the sequence");
    }
    if (!std::equal(common.pages.begin() + static_cast<std::ptrdiff_t>(from),
                    common.pages.begin() + static_cast<std::ptrdiff_t>(needed),
                    sequence->pages.begin() + static_cast<std::ptrdiff_t>(from))) {
      return absl::DataLossError("the workers' page tables differ");
    }
  }
  common.given_up = static_cast<int32_t>(from);
  common.pages.resize(needed);
  for (size_t i = from; i < needed; ++i) {
    if (common.pages[i] < 0 || common.pages[i] >= cache.spec.num_pages) {
      return absl::DataLossError("a worker's page table names a page that does not exist");
    }
  }
  return absl::OkStatus();
}

}  // namespace

CommandMark LastOfAll(const std::vector<const worker::Holdings*>& held) {
  CommandMark last;
  bool first = true;
  for (const worker::Holdings* holdings : held) {
    if (holdings == nullptr) continue;
    last = first ? holdings->last : std::min(last, holdings->last);
    first = false;
  }
  return last;
}

ReconciledCache Reconcile(const std::vector<const HeldCache*>& ranks,
                          const CommandMark& last_of_all, int64_t page_tokens) {
  ReconciledCache out;
  std::vector<BySequence> rewound;
  std::map<SequenceId, std::vector<HeldSequence*>> all;
  const HeldCache* any = nullptr;
  rewound.reserve(ranks.size());
  for (const HeldCache* held : ranks) {
    if (held == nullptr) continue;
    any = held;
    for (auto& [id, sequence] : rewound.emplace_back(Rewound(*held, last_of_all))) {
      all[id].push_back(&sequence);
    }
  }
  for (auto& [id, sequences] : all) {
    if (sequences.size() < ranks.size()) {
      out.absent.push_back(id);
      continue;
    }
    const absl::Status agreed = Agree(sequences, *any, page_tokens);
    if (agreed.ok()) {
      out.whole.push_back(std::move(*sequences.front()));
    } else {
      out.lost.push_back({std::move(*sequences.front()), std::string(agreed.message())});
    }
  }
  return out;
}

}  // namespace tributary::service
