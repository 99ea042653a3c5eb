#include "tests/worker/cuda/session_ranks.h"

#include <algorithm>
#include <chrono>
#include <variant>

#include "base/cuda/device_memory.h"
#include "worker/cuda/memory.h"
#include "worker/slot_bytes.h"

namespace tributary::worker::testing {
namespace {

constexpr int32_t kMostRows = 4096;  // of any scenario, and as many tokens
constexpr std::chrono::seconds kPatience{4};

ExecutorOptions WithLog(ExecutorOptions options, const std::shared_ptr<SessionLog>& log) {
  options.on_session_news = [log](const SessionNews& news) { log->Add(news); };
  return options;
}

// Sessions of several ranks exchange on GPUs.
CudaBackendOptions OnGpus(CudaBackendOptions options) {
  options.exchange = ExchangePlace::kAuto;
  return options;
}

// Heads of a layer that an endpoint has, and what a row of the slot has of them.
struct OwnHeads {
  int32_t first = 0;
  int32_t count = 0;
  int32_t all = 0;
};

OwnHeads HeadsOf(int32_t all, int32_t endpoint, int32_t endpoints) {
  if (all % endpoints != 0) return {0, endpoint == 0 ? all : 0, all};
  return {endpoint * (all / endpoints), all / endpoints, all};
}

client::StridedTensor Strided(const DeviceMemory& data, const TensorView& tensor, int32_t rows,
                              const OwnHeads& heads) {
  if (rows == 0 || heads.count == 0) return {};
  const auto head_bytes =
      static_cast<int32_t>(tensor.bytes / static_cast<size_t>(rows * heads.all));
  return {.data = data.data() + int64_t{heads.first} * head_bytes,
          .rows = rows,
          .heads = heads.count,
          .head_bytes = head_bytes,
          .row_stride = int64_t{heads.all} * head_bytes,
          .head_stride = head_bytes};
}

// All in the order of the stream: giving memory back in any other way would wait for the worker's
// launches, and these wait for the host.
void Upload(const TensorView& tensor, cudaStream_t stream, DeviceMemory* to) {
  ASSERT_TRUE(to->Reserve(tensor.bytes).ok());
  ASSERT_EQ(cudaMemcpyAsync(to->data(), tensor.data, tensor.bytes, cudaMemcpyHostToDevice, stream),
            cudaSuccess);
}

std::vector<float> Download(const DeviceMemory& from, size_t count, cudaStream_t stream) {
  std::vector<float> values(count);
  EXPECT_EQ(cudaMemcpyAsync(values.data(), from.data(), count * sizeof(float),
                            cudaMemcpyDeviceToHost, stream),
            cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  return values;
}

}  // namespace

void SessionLog::Add(const SessionNews& news) {
  const MutexLock lock(mutex_);
  SessionNews& newest = newest_[{news.session, news.rank}];
  const auto conflicts = std::move(newest.conflicts);
  newest = news;
  newest.conflicts.insert(newest.conflicts.begin(), conflicts.begin(), conflicts.end());
  changed_.NotifyAll();
}

SessionNews SessionLog::AwaitEnd(SessionId session, uint32_t count) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  const MutexLock lock(mutex_);
  while (true) {
    SessionNews all;
    int ended = 0;
    for (int rank = 0; rank < ranks_; ++rank) {
      const SessionNews& newest = newest_[{session, rank}];
      if (!newest.status.ok()) return newest;
      if (mailbox::Reached(newest.ended, count)) ++ended;
      all.ended = newest.ended;
    }
    if (ended == ranks_) return all;
    if (!changed_.WaitUntil(mutex_, deadline)) {
      ADD_FAILURE() << "session " << session << ": " << ended << " ranks came to " << count;
      return all;
    }
  }
}

std::vector<int32_t> SessionLog::ConflictsOf(SessionId session, int32_t rank,
                                             uint32_t first_count) {
  const MutexLock lock(mutex_);
  std::vector<int32_t> entries;
  for (const auto& [first, entry] : newest_[{session, rank}].conflicts) {
    if (first == first_count) entries.push_back(entry);
  }
  return entries;
}

HostSession::HostSession(const OpenSessionCommand& command, const DeviceMailbox& mailbox,
                         Waiting waiting, int32_t endpoint)
    : endpoint_(endpoint), endpoints_(command.endpoints) {
  EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
  EXPECT_EQ(counter_.Allocate(sizeof(client::HostCounter)), cudaSuccess);
  EXPECT_EQ(cudaMemset(counter_.data(), 0, sizeof(client::HostCounter)), cudaSuccess);
  EXPECT_EQ(failure_.Allocate(sizeof(client::HostFailure)), cudaSuccess);
  *failure_.as<client::HostFailure>() = {};
  EXPECT_EQ(client::LoadSessionKernels(), cudaSuccess);
  view_ = {.mailbox = reinterpret_cast<std::byte*>(mailbox.address),
           .layout = command.layout.OfEndpoint(endpoint),
           .counter = counter_.as<client::HostCounter>(),
           .failure = failure_.as<client::HostFailure>(),
           .bound = static_cast<uint64_t>(command.wait_timeout.count()),
           .one_gpu = true,
           .several_gpus = mailbox.several_gpus,
           .stream_waits = waiting == Waiting::kStreamMemoryOps};
}

HostSession::~HostSession() {
  memory_.clear();
  cudaStreamDestroy(stream_);
}

void HostSession::Launch(const HostLayer& layer) {
  const KvGeometry& kv = layer.geometry.kv;
  memory_.clear();
  for (int i = 0; i < 5; ++i) memory_.push_back(std::make_unique<DeviceMemory>(stream_));
  DeviceMemory &q = *memory_[0], &k = *memory_[1], &v = *memory_[2], &o = *memory_[3],
               &lse = *memory_[4];
  Upload(layer.q, stream_, &q);
  Upload(layer.k, stream_, &k);
  Upload(layer.v, stream_, &v);
  const OwnHeads q_heads = HeadsOf(layer.geometry.q_heads, endpoint_, endpoints_);
  const OwnHeads kv_heads = HeadsOf(kv.kv_heads, endpoint_, endpoints_);
  const bool no_result = layer.rows == 0 && !view_.stream_waits;
  client::HandOver how{.no_result = no_result};
  client::TakeBack back;
  if (endpoints_ > 1) {
    back.q = how.q = {q_heads.all, q_heads.first};
    how.kv = {kv_heads.all, kv_heads.first};
  }
  EXPECT_EQ(client::LaunchHandOver(view_, Strided(q, layer.q, layer.rows, q_heads),
                                   Strided(k, layer.k, layer.tokens, kv_heads),
                                   Strided(v, layer.v, layer.tokens, kv_heads), how, stream_),
            cudaSuccess);
  heads_ = static_cast<size_t>(layer.rows) * static_cast<size_t>(q_heads.count);
  elements_ = heads_ * static_cast<size_t>(kv.value_dim);
  if (layer.rows > 0) {
    EXPECT_TRUE(o.Reserve(elements_ * sizeof(float)).ok());
    EXPECT_TRUE(lse.Reserve(heads_ * sizeof(float)).ok());
    const client::ResultTarget target{.output = o.data(),
                                      .lse = lse.as<float>(),
                                      .element = client::Element::kF32,
                                      .rows = layer.rows,
                                      .heads = q_heads.count,
                                      .value_dim = kv.value_dim,
                                      .row_stride = int64_t{q_heads.count} * kv.value_dim,
                                      .head_stride = kv.value_dim};
    EXPECT_EQ(client::LaunchTakeBack(view_, target, back, stream_), cudaSuccess);
  } else if (!no_result) {
    EXPECT_EQ(client::LaunchTakeBack(view_, {}, back, stream_), cudaSuccess);
  }
}

HostSession::Results HostSession::Finish() {
  EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  Results results;
  if (elements_ > 0) {
    results.o = Download(*memory_[3], elements_, stream_);
    results.lse = Download(*memory_[4], heads_, stream_);
  }
  results.failure = failure_.as<client::HostFailure>()->status;
  return results;
}

SessionRanks::SessionRanks(const CudaBackendOptions& options, DType output, Waiting waiting,
                           int size, int32_t endpoints)
    : log_(std::make_shared<SessionLog>(size)),
      ranks_(size, OnGpus(options), WithLog(Poisoned(), log_)),
      output_(output),
      waiting_(waiting),
      endpoints_(endpoints) {}

Reply SessionRanks::Send(decltype(Command::body) body, CacheId cache) {
  Command command;
  command.epoch = epoch();
  command.number = ++number_;
  command.cache = cache;
  command.deadline = std::chrono::steady_clock::now() + kPatience;
  command.body = std::move(body);
  std::map<int, Reply> replies = ranks_.Execute(command);
  for (auto& [rank, reply] : replies) {
    if (!reply.status.ok()) return std::move(reply);
  }
  return std::move(replies.at(0));
}

OpenSessionCommand SessionRanks::Open(const CacheSpec& spec, int32_t max_rows, DType q, DType kv,
                                      std::chrono::nanoseconds wait_timeout, DeviceMailbox* mailbox,
                                      bool measures) {
  OpenSessionCommand open{.session = ++last_session_,
                          .max_rows = max_rows,
                          .max_new_tokens = max_rows,
                          .max_steps = 3,
                          .q_dtype = q,
                          .kv_dtype = kv,
                          .output_dtype = output_,
                          .return_lse = true,
                          .wait_timeout = wait_timeout,
                          .measures = measures,
                          .endpoints = endpoints_};
  // Results lie there in f32 while they are computed, whatever their type is in the end.
  std::vector<LayerGeometry> layers;
  for (const LayerSpec& layer : spec.layers) layers.push_back(GeometryOf(spec, layer));
  open.layout = mailbox::LayOut(2, MostSlotBytes(layers, open, max_rows, max_rows),
                                {.endpoints = endpoints_, .in_parts = endpoints_ == 1});
  cudaDeviceProp properties;
  EXPECT_EQ(cudaGetDeviceProperties(&properties, 0), cudaSuccess);
  open.host_gpu = cuda::UuidOf(properties);
  const Reply reply = Send(open);
  EXPECT_TRUE(reply.status.ok()) << reply.status;
  *mailbox = reply.mailbox;
  return open;
}

SessionRanks::Session& SessionRanks::SessionFor(const StepCommand& step) {
  Session& session = sessions_[{step.q.dtype, step.k.dtype}];
  if (session.hosts.empty()) {
    DeviceMailbox mailbox;
    session.command = Open(spec_, kMostRows, step.q.dtype, step.k.dtype, kPatience, &mailbox);
    for (int32_t e = 0; e < endpoints_; ++e) {
      session.hosts.push_back(std::make_unique<HostSession>(session.command, mailbox, waiting_, e));
    }
  }
  return session;
}

HostSession::Results SessionRanks::RunLayer(Session& session, const HostLayer& layer) {
  for (const auto& host : session.hosts) host->Launch(layer);
  if (session.hosts.size() == 1) return session.hosts.front()->Finish();
  const auto rows = static_cast<size_t>(layer.rows);
  const auto dim = static_cast<size_t>(layer.geometry.kv.value_dim);
  const auto all = static_cast<size_t>(layer.geometry.q_heads);
  const size_t each = all / session.hosts.size();
  HostSession::Results results;
  results.o.resize(rows * all * dim);
  results.lse.resize(rows * all);
  for (size_t e = 0; e < session.hosts.size(); ++e) {
    const HostSession::Results part = session.hosts[e]->Finish();
    results.failure = std::max(results.failure, part.failure);
    for (size_t row = 0; row < rows; ++row) {
      const size_t to = row * all + e * each;
      std::copy_n(part.o.begin() + static_cast<ptrdiff_t>(row * each * dim), each * dim,
                  results.o.begin() + static_cast<ptrdiff_t>(to * dim));
      std::copy_n(part.lse.begin() + static_cast<ptrdiff_t>(row * each), each,
                  results.lse.begin() + static_cast<ptrdiff_t>(to));
    }
  }
  return results;
}

std::map<int, Reply> SessionRanks::Step(const Command& command, const StepCommand& step) {
  std::map<int, Reply> replies;
  Session& session = SessionFor(step);
  const bool repeats = std::any_of(step.entries.begin(), step.entries.end(),
                                   [](const StepEntry& entry) { return entry.replay; });
  if (session.layers_left == 0) {
    SessionStepCommand submit{.session = session.command.session,
                              .kind = step.kind,
                              .first_count = session.count,
                              .changes = {{command.cache, step.page_copies, step.page_updates}},
                              .entries = step.entries,
                              .waiting = waiting_};
    const auto end = repeats ? step.layer + 1 : static_cast<int32_t>(spec_.layers.size());
    for (int32_t layer = step.layer; layer < end; ++layer) {
      submit.layers.push_back({command.cache, layer});
    }
    Reply accepted = Send(submit);
    if (!accepted.status.ok()) {
      replies.emplace(0, std::move(accepted));
      return replies;
    }
    session.layers_left = end - step.layer;
    session.count += static_cast<uint32_t>(session.layers_left);
  }
  int32_t rows = 0;
  int32_t tokens = 0;
  for (const StepEntry& entry : step.entries) {
    rows += entry.query_rows;
    tokens += entry.new_tokens;
  }
  EXPECT_LE(std::max(rows, tokens), kMostRows) << "a slot has no room for more";
  const LayerGeometry geometry = GeometryOf(spec_, spec_.layers[static_cast<size_t>(step.layer)]);
  HostSession::Results results =
      RunLayer(session, {geometry, step.q, step.k, step.v, rows, tokens});
  EXPECT_EQ(results.failure, 0u);
  for (int rank = 0; rank < size(); ++rank) {
    replies[rank] = {.epoch = command.epoch, .number = command.number, .rank = rank};
  }
  replies[0].o = std::move(results.o);
  replies[0].lse = std::move(results.lse);
  if (--session.layers_left > 0) return replies;
  const SessionNews news = log_->AwaitEnd(session.command.session, session.count);
  EXPECT_TRUE(news.status.ok()) << news.status;
  for (auto& [rank, reply] : replies) {
    reply.conflicts = log_->ConflictsOf(session.command.session, rank, session.count - 1);
  }
  return replies;
}

std::map<int, Reply> SessionRanks::Execute(const Command& command) {
  if (const auto* create = std::get_if<CreateCacheCommand>(&command.body)) spec_ = create->spec;
  const auto* step = std::get_if<StepCommand>(&command.body);
  if (step == nullptr) return ranks_.Execute(command);
  return Step(command, *step);
}

}  // namespace tributary::worker::testing
