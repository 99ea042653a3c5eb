#include "service/cli/load.h"

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "base/status/rpc_errors.h"
#include "kernels/element.h"
#include "service/cli/load_session.h"
#include "service/cli/units.h"
#include "service/client/client.h"
#include "worker/rpc/dtype_conversion.h"

namespace tributary::cli {
namespace {

using Clock = std::chrono::steady_clock;
using client::Client;

// Tokens of one Append while filling: a message of a few MiB.
constexpr int64_t kFillTokens = 256;
// After an error: a service that refuses is not hammered.
constexpr std::chrono::milliseconds kErrorPause{50};
constexpr std::chrono::milliseconds kProgressInterval{100};

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

int64_t WindowTokens(const LoadOptions& options) { return options.rollback_steps * options.rows; }

v1::CacheSpec SpecOf(const LoadOptions& options, int64_t capacity_tokens) {
  v1::CacheSpec spec;
  spec.set_layers(options.layers);
  spec.set_q_heads(options.q_heads);
  spec.set_kv_heads(options.kv_heads);
  spec.set_head_dim(options.head_dim);
  spec.set_value_head_dim(options.value_head_dim);
  spec.set_page_size(options.page_size);
  spec.set_kv_dtype(ToProto(options.kv_dtype));
  spec.set_capacity_tokens(capacity_tokens);
  return spec;
}

// `count` normal numbers of the type.
std::vector<std::byte> RandomTensor(size_t count, DType dtype, uint32_t seed) {
  std::mt19937 dice(seed);
  std::normal_distribution<float> normal;
  std::vector<std::byte> bytes(BytesOf(dtype, static_cast<int64_t>(count)));
  for (size_t i = 0; i < count; ++i) StoreElement(dtype, bytes.data(), i, normal(dice));
  return bytes;
}

// What all loops share.
struct Shared {
  const LoadOptions& options;
  const std::string cache_id;
  const std::atomic<bool>& stop;  // the caller's
  std::atomic<bool> over{false};
  std::atomic<bool> recording{false};
  std::atomic<bool> failed{false};
  std::atomic<int64_t> filled{0};  // tokens of a layer
  std::atomic<int> ready{0};       // loops that have filled their sequences
  std::atomic<uint64_t> requests{0};

  bool ended() const { return stop || over || failed; }
};

class Loop {
 public:
  Loop(Shared& shared, Client& client, uint32_t seed) : shared_(shared), client_(client) {
    const LoadOptions& o = shared.options;
    const size_t rows = static_cast<size_t>(o.batch) * o.rows;
    const size_t kv_row = static_cast<size_t>(o.kv_heads) * std::max(o.head_dim, o.ValueDim());
    q_.values = RandomTensor(rows * o.q_heads * o.head_dim, o.dtype, seed);
    kv_.values = RandomTensor(std::max<size_t>(rows, kFillTokens) * kv_row, o.dtype, seed + 1);
    output_.values.resize(BytesOf(o.dtype, static_cast<int64_t>(rows) * o.q_heads * o.ValueDim()));
  }

  void Run() {
    absl::Status status = Fill();
    if (!status.ok()) {
      result_.first_error = StatusText(status);
      shared_.failed = true;
      return;
    }
    ++shared_.ready;
    while (!shared_.ended()) Step();
  }

  LoadResult& result() { return result_; }

 private:
  // The memory in which one tensor of all calls lies.
  struct Place {
    std::byte* data() { return shared == nullptr ? values.data() : shared->data(); }
    std::vector<std::byte> values;  // moved away when they are shared
    std::shared_ptr<client::SharedBuffer> shared;
  };

  // Tensors of calls lie where the service reads and writes them, as those of a host would.
  absl::Status Share() {
    for (Place* place : {&q_, &kv_, &output_}) {
      auto buffer = client_.AllocateShared(place->values.size());
      if (absl::IsFailedPrecondition(buffer.status())) return absl::OkStatus();  // several groups
      if (!buffer.ok()) return buffer.status();
      std::memcpy((*buffer)->data(), place->values.data(), place->values.size());
      place->shared = *std::move(buffer);
      place->values = {};
    }
    return absl::OkStatus();
  }

  absl::Status Fill() {
    const LoadOptions& o = shared_.options;
    if (o.shared_memory_bytes > 0 && !o.session) {
      if (absl::Status status = Share(); !status.ok()) return status;
    }
    for (int i = 0; i < o.batch; ++i) {
      const auto sequence = client_.OpenSequence(shared_.cache_id);
      if (!sequence.ok()) return sequence.status();
      sequences_.push_back(*sequence);
      for (int64_t t = 0; t < o.context && !shared_.ended(); t += kFillTokens) {
        const auto tokens = static_cast<int32_t>(std::min(kFillTokens, o.context - t));
        for (int layer = 0; layer < o.layers; ++layer) {
          absl::Status status = client_.Append({.cache_id = shared_.cache_id,
                                                .layer = layer,
                                                .entries = {{*sequence, t, tokens}},
                                                .dtype = ToProto(o.dtype),
                                                .k = kv_.data(),
                                                .v = kv_.data(),
                                                .kv_heads = o.kv_heads,
                                                .head_dim = o.head_dim,
                                                .value_head_dim = o.value_head_dim});
          if (!status.ok()) return status;
        }
        shared_.filled += tokens;
      }
    }
    position_ = o.context;
    return absl::OkStatus();
  }

  void Step() {
    const LoadOptions& o = shared_.options;
    if (position_ - o.context >= WindowTokens(o)) RollBack();
    const bool recording = shared_.recording;
    const Clock::time_point start = Clock::now();
    const auto layer_done = [&](double seconds) {
      ++shared_.requests;
      // What straddles the beginning or the end is not counted.
      if (!recording || !shared_.recording) return;
      result_.request_latency.Add(seconds);
      ++result_.requests;
      result_.kv_bytes_read += KvBytes();
    };
    const absl::Status status = o.session ? RunStep(layer_done) : CallLayers(layer_done);
    if (!status.ok()) return Recover(status);
    for (const client::LayerTimes& times : TakeTimes()) {
      if (recording && shared_.recording) result_.breakdown.Add(times);
    }
    position_ += o.rows;
    if (!recording || !shared_.recording) return;
    result_.step_latency.Add(SecondsSince(start));
    ++result_.steps;
    result_.tokens += static_cast<uint64_t>(o.batch) * o.rows;
  }

  absl::Status CallLayers(const std::function<void(double)>& layer_done) {
    for (int layer = 0; layer < shared_.options.layers; ++layer) {
      const Clock::time_point asked = Clock::now();
      if (absl::Status status = client_.Attend(CallOf(layer)); !status.ok()) return status;
      layer_done(SecondsSince(asked));
    }
    return absl::OkStatus();
  }

  // The step that begins at position_, through the session.
  absl::Status RunStep(const std::function<void(double)>& layer_done) {
    const LoadOptions& o = shared_.options;
    if (session_ == nullptr) {
      auto opened = OpenLoadSession(o, shared_.cache_id, {q_.data(), kv_.data(), output_.data()});
      if (!opened.ok()) return opened.status();
      session_ = *std::move(opened);
    }
    client::SessionStep step{.layers = o.layers};
    for (const uint64_t sequence : sequences_) {
      step.entries.push_back({.sequence_id = sequence,
                              .first_position = position_,
                              .query_rows = o.rows,
                              .new_tokens = o.rows});
      if (position_ == o.context) step.entries.back().truncate_to = position_;
    }
    return session_->Run(step, layer_done);
  }

  std::vector<client::LayerTimes> TakeTimes() {
    return session_ == nullptr ? std::vector<client::LayerTimes>() : session_->TakeTimes();
  }

  client::AttendCall CallOf(int layer) {
    const LoadOptions& o = shared_.options;
    client::AttendCall call{.cache_id = shared_.cache_id,
                            .layer = layer,
                            .dtype = ToProto(o.dtype),
                            .q = q_.data(),
                            .k = kv_.data(),
                            .v = kv_.data(),
                            .q_heads = o.q_heads,
                            .kv_heads = o.kv_heads,
                            .head_dim = o.head_dim,
                            .value_head_dim = o.value_head_dim,
                            .output = output_.data()};
    for (const uint64_t sequence : sequences_) {
      call.entries.push_back({sequence, position_, o.rows, o.rows});
    }
    return call;
  }

  // K and V that one request's rows see.
  double KvBytes() const {
    const LoadOptions& o = shared_.options;
    const int64_t elements =
        (position_ + o.rows) * o.batch * o.kv_heads * (o.head_dim + o.ValueDim());
    return static_cast<double>(BytesOf(o.kv_dtype, elements) +
                               BlockScaleBytes(o.kv_dtype, elements));
  }

  void RollBack() {
    position_ = shared_.options.context;
    if (shared_.options.session) return;  // the next step does
    for (const uint64_t sequence : sequences_) {
      const auto length =
          client_.TruncateSequence(shared_.cache_id, sequence, shared_.options.context);
      if (!length.ok()) return Recover(length.status());
    }
  }

  // Counts the error and makes the sequences whole again: some layers may be a step ahead.
  void Recover(const absl::Status& status) {
    if (shared_.ended()) return;
    ++result_.errors[absl::StatusCodeToString(status.code())];
    if (result_.first_error.empty()) result_.first_error = StatusText(status);
    std::this_thread::sleep_for(kErrorPause);
    session_.reset();  // it ended with its first step that failed
    for (const uint64_t sequence : sequences_) {
      const auto length =
          client_.TruncateSequence(shared_.cache_id, sequence, shared_.options.context);
      // Lost or closed: this loop has nothing to attend over any more.
      if (!length.ok() && !absl::IsUnavailable(length.status())) shared_.failed = true;
    }
    position_ = shared_.options.context;
  }

  Shared& shared_;
  Client& client_;
  Place q_, kv_, output_;
  std::vector<uint64_t> sequences_;
  std::unique_ptr<LoadSession> session_;  // opened by the step that finds none
  int64_t position_ = 0;                  // tokens held by all layers
  LoadResult result_;
};

// Waits until `until` or `done()`, telling progress.
template <typename Done>
void Watch(const std::string& what, Clock::time_point until, const Done& done,
           const std::function<double()>& fraction, const std::function<std::string()>& note,
           const LoadProgress& progress) {
  while (!done() && Clock::now() < until) {
    progress(what, fraction(), note());
    std::this_thread::sleep_until(std::min(until, Clock::now() + kProgressInterval));
  }
}

v1::Statistics Difference(const v1::Statistics& before, const v1::Statistics& after) {
  v1::Statistics d;
  d.set_uptime_seconds(after.uptime_seconds() - before.uptime_seconds());
  d.set_steps(after.steps() - before.steps());
  d.set_requests(after.requests() - before.requests());
  d.set_plan_seconds(after.plan_seconds() - before.plan_seconds());
  d.set_append_seconds(after.append_seconds() - before.append_seconds());
  d.set_attend_seconds(after.attend_seconds() - before.attend_seconds());
  d.set_exchange_seconds(after.exchange_seconds() - before.exchange_seconds());
  d.set_queue_seconds(after.queue_seconds() - before.queue_seconds());
  return d;
}

v1::Statistics StatisticsOf(Client& client) {
  const auto topology = client.GetTopology({});
  return topology.ok() ? topology->statistics() : v1::Statistics();
}

void Combine(LoadResult& into, LoadResult& from) {
  into.requests += from.requests;
  into.steps += from.steps;
  into.tokens += from.tokens;
  into.kv_bytes_read += from.kv_bytes_read;
  into.request_latency.Merge(from.request_latency);
  into.step_latency.Merge(from.step_latency);
  into.breakdown.Merge(from.breakdown);
  for (const auto& [code, count] : from.errors) into.errors[code] += count;
  if (into.first_error.empty()) into.first_error = from.first_error;
}

absl::StatusOr<std::vector<std::unique_ptr<Client>>> ConnectAll(const LoadOptions& options) {
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < options.connections; ++i) {
    auto client = Client::Connect({.target = options.target,
                                   .security = options.security,
                                   .timeout = options.timeout,
                                   .shared_memory_bytes = options.shared_memory_bytes,
                                   .wait_for_service = false});
    if (!client.ok()) return client.status();
    clients.push_back(*std::move(client));
  }
  return clients;
}

}  // namespace

void LayerBreakdown::Add(const client::LayerTimes& times) {
  fill.Add(times.fill);
  ring_seen.Add(times.ring_seen);
  attention.Add(times.attention);
  exchange.Add(times.exchange);
  ring_back.Add(times.ring_back);
  wait.Add(times.wait);
}

void LayerBreakdown::Merge(const LayerBreakdown& other) {
  fill.Merge(other.fill);
  ring_seen.Merge(other.ring_seen);
  attention.Merge(other.attention);
  exchange.Merge(other.exchange);
  ring_back.Merge(other.ring_back);
  wait.Merge(other.wait);
}

absl::Status CheckLoad(const LoadOptions& o) {
  const auto positive = [](const char* flag, int64_t value) {
    if (value > 0) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("--", flag, " must be > 0, is ", value));
  };
  const std::pair<const char*, int64_t> counts[] = {{"connections", o.connections},
                                                    {"sequences", o.sequences},
                                                    {"batch", o.batch},
                                                    {"layers", o.layers},
                                                    {"context", o.context},
                                                    {"rows", o.rows},
                                                    {"q_heads", o.q_heads},
                                                    {"kv_heads", o.kv_heads},
                                                    {"head_dim", o.head_dim},
                                                    {"page_size", o.page_size},
                                                    {"duration", o.duration.count()},
                                                    {"rollback_steps", o.rollback_steps}};
  for (const auto& [flag, value] : counts) {
    if (absl::Status status = positive(flag, value); !status.ok()) return status;
  }
  if (o.value_head_dim < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--value_head_dim must be >= 0, is ", o.value_head_dim));
  }
  const bool on_gpu = o.session && o.session_memory == v1::SESSION_MEMORY_DEVICE;
  if (o.breakdown && !on_gpu) {
    return absl::InvalidArgumentError("--breakdown is of --session --session_memory=device");
  }
  if (o.slot_rows < 0) {
    return absl::InvalidArgumentError(absl::StrCat("--slot_rows must be >= 0, is ", o.slot_rows));
  }
  if (o.sequences % o.batch != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--sequences (", o.sequences, ") must be a multiple of --batch (", o.batch, ")"));
  }
  return absl::OkStatus();
}

absl::StatusOr<LoadResult> RunLoad(const LoadOptions& options, const std::atomic<bool>& stop,
                                   const LoadProgress& progress) {
  if (absl::Status status = CheckLoad(options); !status.ok()) return status;
  auto clients = ConnectAll(options);
  if (!clients.ok()) return clients.status();
  Client& first = *clients->front();

  const auto topology = first.GetTopology({});
  if (!topology.ok()) return topology.status();
  // Whole virtual pages, of page_size tokens per rank, for each sequence.
  const int64_t page =
      static_cast<int64_t>(options.page_size) * std::max(1, topology->workers_size());
  // Tokens that a session's step cuts off keep their pages until the step is over, and those that
  // it brings begin a page anew.
  const int64_t cut_off = options.session ? 2 * int64_t{options.rows} + page : 0;
  const int64_t most = options.context + WindowTokens(options) + cut_off;
  const int64_t capacity = options.sequences * ((most + page - 1) / page * page);

  absl::BitGen dice;
  Shared shared{options, absl::StrCat("bench-", absl::Hex(absl::Uniform<uint64_t>(dice))), stop};
  auto cache = first.CreateCache(shared.cache_id, SpecOf(options, capacity));
  if (!cache.ok()) return cache.status();
  const absl::Cleanup remove = [&] { (void)first.DeleteCache(shared.cache_id); };

  std::vector<std::unique_ptr<Loop>> loops;
  const int loop_count = options.sequences / options.batch;
  for (int i = 0; i < loop_count; ++i) {
    Client& client = *(*clients)[i % clients->size()];
    loops.push_back(std::make_unique<Loop>(shared, client, static_cast<uint32_t>(2 * i)));
  }
  std::vector<std::thread> threads;
  for (const auto& loop : loops) threads.emplace_back([&loop] { loop->Run(); });

  const double tokens = static_cast<double>(options.context) * options.sequences;
  Watch(
      "filling", Clock::time_point::max(),
      [&] { return shared.ended() || shared.ready == loop_count; },
      [&] { return static_cast<double>(shared.filled) / tokens; },
      [&] { return absl::StrCat(Count(shared.filled), " tokens"); }, progress);

  const auto run = [&](const std::string& what, std::chrono::milliseconds length) {
    const Clock::time_point start = Clock::now();
    const uint64_t before = shared.requests;
    Watch(
        what, start + length, [&] { return shared.ended(); },
        [&] { return SecondsSince(start) / std::chrono::duration<double>(length).count(); },
        [&] {
          const double rate =
              static_cast<double>(shared.requests - before) / std::max(1e-3, SecondsSince(start));
          return absl::StrCat(Rate(rate), " requests/s");
        },
        progress);
    return SecondsSince(start);
  };
  run("warm-up", options.warmup);
  LoadResult total;
  const v1::Statistics before = StatisticsOf(first);
  shared.recording = true;
  total.seconds = run("running", options.duration);
  shared.recording = false;
  total.service = Difference(before, StatisticsOf(first));
  shared.over = true;
  for (std::thread& thread : threads) thread.join();

  for (const auto& loop : loops) Combine(total, loop->result());
  total.cache = *std::move(cache);
  if (shared.failed && total.requests == 0) {
    return absl::AbortedError(absl::StrCat("the load could not run: ", total.first_error));
  }
  return total;
}

}  // namespace tributary::cli
