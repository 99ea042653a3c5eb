#include "service/schedule/step_split.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "base/status/status_macros.h"
#include "kernels/output_format.h"
#include "worker/choose_path.h"
#include "worker/opened_regions.h"

namespace tributary::service {
namespace {

// Rows of an entry, or tokens where it has no rows.
int32_t UnitsOf(const worker::StepEntry& entry) {
  return std::max(entry.query_rows, entry.new_tokens);
}

bool SeesTokensAsTheyCame(const worker::StepEntry& entry) {
  return worker::SeesTokensAsTheyCame(entry.query_rows, entry.new_tokens);
}

// For what a call is cut.
enum class Purpose {
  kLimits,  // pieces are within the limits
  kTurns,   // pieces are short, and rows see what they would see in one piece
};

// The fewest rows of a turn, but for the last of an entry: with fewer, workers read the cache once
// for next to no work.
constexpr int32_t kLeastTurn = 8;

class Splitter {
 public:
  Splitter(const worker::LayerGeometry& geometry, int64_t window_left, const StepLimits& limits,
           Purpose purpose)
      : geometry_(geometry), window_left_(window_left), limits_(limits), purpose_(purpose) {}

  absl::Status Add(const worker::StepEntry& entry, bool whole) {
    ++added_;
    const int32_t units = UnitsOf(entry);
    const int32_t least = whole ? units : LeastOf(entry);
    for (int32_t begin = 0; begin < units;) {
      const int32_t left = units - begin;
      int32_t count = Fitting(entry, begin, left);
      if (count < std::min(left, least) && !current_.entries.empty()) {
        Close();
        continue;
      }
      if (purpose_ == Purpose::kTurns) count = std::max(count, std::min(left, least));
      if (count == 0 || (whole && count < units)) {
        return CheckCost(CostOf(Cut(entry, 0, whole ? units : 1)), limits_);
      }
      // The rest must not be so short that its rows are served in another way.
      if (left - count > 0 && left - count < least && count >= 2 * least) count = left - least;
      Take(Cut(entry, begin, begin + count));
      begin += count;
      if (begin < units) Close();
    }
    return absl::OkStatus();
  }

  std::vector<StepPiece> Finish() {
    if (!current_.entries.empty()) Close();
    return std::move(pieces_);
  }

 private:
  int32_t LeastOf(const worker::StepEntry& entry) const {
    if (purpose_ == Purpose::kTurns) return kLeastTurn;
    return SeesTokensAsTheyCame(entry) ? worker::kMaxDecodeRows + 1 : 1;
  }

  // Whether pieces of the entry have all its tokens, and rows apart.
  bool RowsApart(const worker::StepEntry& entry) const {
    return purpose_ == Purpose::kTurns && SeesTokensAsTheyCame(entry);
  }
  // Units [begin, end) of an entry.
  worker::StepEntry Cut(const worker::StepEntry& entry, int32_t begin, int32_t end) const {
    worker::StepEntry cut = entry;
    cut.more_follows = end < UnitsOf(entry);
    if (entry.query_rows > 0) cut.query_rows = end - begin;
    if (RowsApart(entry)) {
      cut.first_row = begin;
      return cut;
    }
    cut.first_position += begin;
    if (entry.new_tokens > 0) cut.new_tokens = end - begin;
    return cut;
  }

  StepCost CostOf(const worker::StepEntry& entry) const {
    return service::CostOf(geometry_, window_left_, std::span(&entry, 1));
  }
  bool Fits(const worker::StepEntry& entry) const {
    const StepCost more = CostOf(entry);
    return StepCost{cost_.bytes + more.bytes, cost_.flops + more.flops}.Share(limits_) <= 1;
  }
  // How many of `left` units from `begin` on still fit into the current piece.
  int32_t Fitting(const worker::StepEntry& entry, int32_t begin, int32_t left) const {
    int32_t fits = 0;
    for (int32_t beyond = left + 1; fits + 1 < beyond;) {
      const int32_t middle = fits + (beyond - fits) / 2;
      (Fits(Cut(entry, begin, begin + middle)) ? fits : beyond) = middle;
    }
    return fits;
  }

  void Take(const worker::StepEntry& entry) {
    const StepCost more = CostOf(entry);
    cost_ = {cost_.bytes + more.bytes, cost_.flops + more.flops};
    rows_ += entry.query_rows;
    if (!entry.more_follows || !RowsApart(entry)) tokens_ += entry.new_tokens;
    if (current_.entries.empty()) current_.first_entry = added_ - 1;
    current_.entries.push_back(entry);
  }
  void Close() {
    pieces_.push_back(std::move(current_));
    current_ = StepPiece{.entries = {}, .first_row = rows_, .first_token = tokens_};
    cost_ = {};
  }

  const worker::LayerGeometry& geometry_;
  const int64_t window_left_;
  const StepLimits& limits_;
  const Purpose purpose_;
  std::vector<StepPiece> pieces_;
  StepPiece current_;
  StepCost cost_;
  int32_t added_ = 0;  // entries, with the one that is being added
  int64_t rows_ = 0;
  int64_t tokens_ = 0;
};

int64_t RowsOf(const StepPiece& piece) {
  int64_t rows = 0;
  for (const worker::StepEntry& entry : piece.entries) rows += entry.query_rows;
  return rows;
}

int64_t TokensOf(const StepPiece& piece) {
  int64_t tokens = 0;
  for (const worker::StepEntry& entry : piece.entries) tokens += entry.new_tokens;
  return tokens;
}

// Rows [first, first + count) of a tensor of `of` rows.
std::optional<InputTensor> RowsOf(const std::optional<InputTensor>& tensor, int64_t first,
                                  int64_t count, int64_t of) {
  if (!tensor.has_value() || count == 0) return std::nullopt;
  InputTensor cut = *tensor;
  const size_t row = tensor->view.bytes / static_cast<size_t>(of);
  const size_t begin = static_cast<size_t>(first) * row;
  cut.view.bytes = static_cast<size_t>(count) * row;
  if (cut.view.in_regions()) {
    worker::RegionPart& part = cut.view.parts.front();
    part.offset += begin;
    part.bytes = cut.view.bytes;
  } else {
    cut.view.data += begin;
  }
  return cut;
}

int64_t Elements(const OutputTensor& output, int64_t rows) {
  int64_t elements = rows;
  for (size_t i = 1; i < output.shape.size(); ++i) elements *= output.shape[i];
  return elements;
}

std::optional<OutputTensor> RowsOf(const std::optional<OutputTensor>& output, int64_t first,
                                   int64_t count) {
  if (!output.has_value()) return std::nullopt;
  OutputTensor cut{.dtype = output->dtype, .scale = output->scale, .shape = output->shape};
  cut.shape.front() = count;
  cut.bytes = OutputBytes(cut.dtype, Elements(*output, count));
  if (output->device == nullptr) return cut;
  cut.device = output->device;
  cut.reference = output->reference;
  cut.part = output->part;
  cut.part.offset += OutputBytes(cut.dtype, Elements(*output, first));
  cut.part.bytes = cut.bytes;
  return cut;
}

void Place(const OutputTensor& output, int64_t first_row, const v1::Tensor& rows,
           v1::Tensor* reply) {
  reply->set_dtype(rows.dtype());
  if (reply->shape().empty()) {
    reply->mutable_shape()->Add(output.shape.begin(), output.shape.end());
  }
  const bool in_region = output.device != nullptr || output.region != nullptr;
  if (in_region) *reply->mutable_shared_memory() = *output.reference;
  if (output.device != nullptr) return;  // it lies there
  const std::string& from = rows.inline_();
  const int64_t before = Elements(output, first_row);
  const int64_t count = Elements(output, rows.shape(0));
  const size_t elements = BytesOf(output.dtype, count);
  const size_t begin = BytesOf(output.dtype, before);
  if (!in_region && output.dtype != DType::kNvfp4) {
    // It grows with the pieces, which come in order. To fill megabytes ahead of the first one takes
    // as long as several of them, on a thread that answers others.
    std::string* bytes = reply->mutable_inline_();
    bytes->reserve(output.bytes);
    bytes->resize(begin);
    bytes->append(from, 0, elements);
    return;
  }
  char* destination = reinterpret_cast<char*>(output.region);
  if (!in_region) {
    std::string* bytes = reply->mutable_inline_();
    bytes->resize(output.bytes);
    destination = bytes->data();
  }
  std::copy_n(from.data(), elements, destination + begin);
  if (output.dtype != DType::kNvfp4) return;
  // The scales come after all elements.
  const size_t scales = Nvfp4ScalesOffset(Elements(output, output.shape.front())) +
                        static_cast<size_t>(before / kNvfp4Block);
  std::copy_n(from.data() + elements, from.size() - elements, destination + scales);
}

}  // namespace

absl::StatusOr<std::vector<StepPiece>> SplitStep(const worker::LayerGeometry& geometry,
                                                 int64_t window_left, worker::StepKind kind,
                                                 const std::vector<worker::StepEntry>& entries,
                                                 const StepLimits& limits) {
  Splitter splitter(geometry, window_left, limits, Purpose::kLimits);
  for (const worker::StepEntry& entry : entries) {
    TRIBUTARY_RETURN_IF_ERROR(splitter.Add(entry, kind == worker::StepKind::kDflash));
  }
  return splitter.Finish();
}

std::vector<StepPiece> CutIntoTurns(const worker::LayerGeometry& geometry, int64_t window_left,
                                    const std::vector<worker::StepEntry>& entries, double flops) {
  const StepLimits limits{.bytes = std::numeric_limits<int64_t>::max(), .flops = flops};
  Splitter splitter(geometry, window_left, limits, Purpose::kTurns);
  for (const worker::StepEntry& entry : entries) {
    // Where a turn has room for less, it has as many rows as one has at least.
    splitter.Add(entry, /*whole=*/false).IgnoreError();
  }
  return splitter.Finish();
}

bool CanBeCut(const StepRequest& request, const std::vector<StepPiece>& pieces,
              const worker::LayerGeometry& geometry) {
  const auto on_device = [](const std::optional<OutputTensor>& output) {
    return output.has_value() && output->device != nullptr;
  };
  if (on_device(request.output) && request.output->dtype == DType::kNvfp4) return false;
  if (!on_device(request.lse)) return true;
  return std::all_of(pieces.begin(), pieces.end(), [&](const StepPiece& piece) {
    const int64_t before = piece.first_row * geometry.q_heads * int64_t{sizeof(float)};
    return before % static_cast<int64_t>(worker::kRegionAlignment) == 0;
  });
}

StepRequest PieceOf(const StepRequest& request, const StepPiece& piece) {
  StepRequest cut;
  cut.key = request.key;
  cut.entries = piece.entries;
  cut.query_rows = static_cast<int32_t>(RowsOf(piece));
  cut.new_tokens = static_cast<int32_t>(TokensOf(piece));
  cut.q = RowsOf(request.q, piece.first_row, cut.query_rows, request.query_rows);
  cut.k = RowsOf(request.k, piece.first_token, cut.new_tokens, request.new_tokens);
  cut.v = RowsOf(request.v, piece.first_token, cut.new_tokens, request.new_tokens);
  cut.output = RowsOf(request.output, piece.first_row, cut.query_rows);
  cut.lse = RowsOf(request.lse, piece.first_row, cut.query_rows);
  cut.message = request.message;
  return cut;
}

void PlacePiece(const StepRequest& request, const StepPiece& piece, const v1::AttendReply& results,
                v1::AttendReply* reply) {
  if (request.output.has_value()) {
    Place(*request.output, piece.first_row, results.output(), reply->mutable_output());
  }
  if (request.lse.has_value()) {
    Place(*request.lse, piece.first_row, results.lse(), reply->mutable_lse());
  }
}

}  // namespace tributary::service
