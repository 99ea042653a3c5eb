#include "service/client/host_session.h"

#include <algorithm>
#include <cstddef>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/mailbox/layout_message.h"
#include "base/mailbox/pieces.h"
#include "base/rpc/unix_address.h"
#include "base/status/errors.h"
#include "base/status/status_macros.h"
#include "service/client/connect.h"
#include "service/client/layer_path.h"
#include "service/client/mailbox_memory.h"
#include "service/client/session_messages.h"
#include "service/client/session_stream.h"
#include "tributary/v1/attention.grpc.pb.h"

namespace tributary::client {
namespace {

using Clock = std::chrono::steady_clock;

// How long the stream of a session that is over may take to say why.
constexpr std::chrono::seconds kEndTimeout{2};

absl::Status CheckRows(absl::string_view field, const HeadRows& rows, int32_t count, int32_t heads,
                       int32_t dim) {
  const auto wrong = [field](absl::string_view what, int32_t is, int32_t wanted) {
    return InvalidField(absl::StrCat(field, ".", what),
                        absl::StrCat("must be ", wanted, ", is ", is));
  };
  if (rows.data == nullptr) {
    if (count == 0) return absl::OkStatus();
    return InvalidField(absl::StrCat(field, ".data"), "is missing");
  }
  if (rows.rows != count) return wrong("rows", rows.rows, count);
  if (rows.heads != heads) return wrong("heads", rows.heads, heads);
  if (rows.dim != dim) return wrong("dim", rows.dim, dim);
  return absl::OkStatus();
}

class ClientHostSession final : public HostSession {
 public:
  ClientHostSession(const ConnectOptions& connect, const HostSessionOptions& options)
      : options_(options), timeout_(connect.timeout), lease_(connect.lease) {}
  ~ClientHostSession() override { stream_.reset(); }  // its thread calls the path

  absl::Status Start(const ConnectOptions& connect) {
    if (options_.output_dtype == v1::DTYPE_NVFP4) {
      return InvalidField("options.output_dtype", "must be f32, bf16, f16 or fp8_e4m3");
    }
    TRIBUTARY_RETURN_IF_ERROR(Connect(connect));
    const absl::string_view path = UnixPath(connect.target);
    const bool any = options_.memory == v1::SESSION_MEMORY_UNSPECIFIED;
    if (!any || path.empty()) {
      return Begin(any ? v1::SESSION_MEMORY_MESSAGES : options_.memory, path);
    }
    const absl::Status begun = Begin(v1::SESSION_MEMORY_HOST, path);
    if (!absl::IsFailedPrecondition(begun) || FieldOf(begun) != "open.memory") return begun;
    return Begin(v1::SESSION_MEMORY_MESSAGES, path);
  }

  absl::Status StartAsEndpoint(const ConnectOptions& connect, const EndpointOptions& endpoint) {
    TRIBUTARY_RETURN_IF_ERROR(Connect(connect));
    v1::SessionRequest first;
    first.mutable_join()->set_session_id(endpoint.session_id);
    first.mutable_join()->set_secret(endpoint.secret);
    first.mutable_join()->set_endpoint(endpoint.endpoint);
    TRIBUTARY_RETURN_IF_ERROR(Begin(first));
    if (!opened().has_host()) {
      return InvalidField("join.session_id", "the session has no mailbox in shared memory");
    }
    const v1::OpenSession& terms = opened().terms();
    options_ = {.cache_id = terms.cache_id(),
                .max_rows = terms.max_rows(),
                .max_new_tokens = terms.max_new_tokens(),
                .dtype = terms.q_dtype(),
                .output_dtype = terms.output_dtype(),
                .return_lse = terms.return_lse(),
                .max_steps = terms.max_steps(),
                .wait_timeout = std::chrono::milliseconds(terms.wait_timeout_ms()),
                .memory = terms.memory(),
                .spin = endpoint.spin,
                .endpoints = terms.endpoints(),
                .kv_replicated = terms.kv_replicated()};
    return TakePath(UnixPath(connect.target));
  }

  absl::StatusOr<uint64_t> Submit(const SessionStep& step) override {
    AwaitRoom();
    ++last_step_;
    TRIBUTARY_ASSIGN_OR_RETURN(const v1::StepAccepted accepted,
                               opened().endpoint() > 0
                                   ? stream_->AwaitAccepted(last_step_, Until())
                                   : stream_->Submit(MessageOf(step, last_step_), Until()));
    Submitted submitted{.place = {.step_id = last_step_,
                                  .layer = step.first_layer,
                                  .count = accepted.first_count()},
                        .layers_left = step.layers,
                        .append_only = step.append_only};
    for (const SessionEntry& entry : step.entries) {
      submitted.rows += entry.query_rows;
      submitted.tokens += entry.new_tokens;
    }
    submitted.pieces = PiecesOf(step, options_.max_rows, options_.max_new_tokens);
    submitted_.push_back(submitted);
    running_.push_back(last_step_);
    return last_step_;
  }

  absl::Status Attend(const SessionLayer& layer) override {
    TRIBUTARY_RETURN_IF_ERROR(CheckNext(layer, /*append_only=*/false));
    const absl::Status done = RunLayer(layer);
    return done.ok() ? done : GiveUp(done);
  }

  absl::Status Append(const HeadRows& k, const HeadRows& v) override {
    const SessionLayer layer{.k = k, .v = v};
    TRIBUTARY_RETURN_IF_ERROR(CheckNext(layer, /*append_only=*/true));
    const absl::Status done = RunLayer(layer);
    return done.ok() ? done : GiveUp(done);
  }

  absl::Status Await(uint64_t step) override { return stream_->Await(step, Until()); }
  absl::Status Close() override { return stream_->Close(Until()); }
  absl::Status status() const override { return given_up_.ok() ? stream_->status() : given_up_; }
  const v1::SessionOpened& opened() const override { return stream_->opened(); }

 private:
  // A step whose layers have not all been handed over.
  struct Submitted {
    LayerPlace place;  // of the next layer
    int32_t layers_left = 0;
    int32_t rows = 0;
    int32_t tokens = 0;
    std::vector<mailbox::Piece> pieces;  // that each layer goes in
    bool append_only = false;
  };

  Clock::time_point Until() const { return Clock::now() + timeout_; }

  // As the service has taken the session's types.
  ElementBytes element_bytes() const {
    const v1::OpenSession& terms = opened().terms();
    return {.inputs = BytesOf(terms.q_dtype()), .output = BytesOf(terms.output_dtype())};
  }

  absl::Status Connect(const ConnectOptions& connect) {
    TRIBUTARY_RETURN_IF_ERROR(CheckConnectOptions(connect));
    absl::StatusOr<std::shared_ptr<grpc::Channel>> channel = MakeChannel(connect);
    TRIBUTARY_RETURN_IF_ERROR(channel.status());
    stub_ = v1::AttentionService::NewStub(*channel);
    return absl::OkStatus();
  }

  // `path`: of the service's Unix socket.
  absl::Status Begin(v1::SessionMemory memory, absl::string_view path) {
    v1::SessionRequest first;
    v1::OpenSession& open = *first.mutable_open();
    open.set_cache_id(options_.cache_id);
    open.set_memory(memory);
    open.set_max_rows(options_.max_rows);
    open.set_max_new_tokens(options_.max_new_tokens);
    open.set_q_dtype(options_.dtype);
    open.set_output_dtype(options_.output_dtype);
    open.set_return_lse(options_.return_lse);
    open.set_max_steps(options_.max_steps);
    open.set_wait_timeout_ms(static_cast<uint32_t>(options_.wait_timeout.count()));
    open.set_endpoints(options_.endpoints);
    open.set_kv_replicated(options_.kv_replicated);
    TRIBUTARY_RETURN_IF_ERROR(Begin(first));
    return TakePath(path);
  }

  absl::Status Begin(const v1::SessionRequest& first) {
    TRIBUTARY_ASSIGN_OR_RETURN(stream_, SessionStream::Open(stub_.get(), first, lease_, Until()));
    return opened().shapes().empty() ? absl::InternalError("the service told no shapes")
                                     : absl::OkStatus();
  }

  // How layers are to travel in the session that has been opened.
  absl::Status TakePath(absl::string_view path) {
    const v1::SessionOpened& opened = stream_->opened();
    const ElementBytes bytes = element_bytes();
    if (opened.has_host()) {
      // The service may see the folder of its socket under another name.
      const std::string socket = path.empty() ? opened.host().socket() : CompanionSocketOf(path);
      TRIBUTARY_ASSIGN_OR_RETURN(
          std::unique_ptr<MailboxMemory> mailbox,
          MailboxMemory::Fetch(socket, opened.host().token(), mailbox::ReadLayout(opened.layout()),
                               Until()));
      path_ = CreateMailboxPath(std::move(mailbox), bytes, options_.spin);
    } else {
      path_ = CreateMessagePath(stream_.get(), bytes);
    }
    stream_->OnEnd([this](const absl::Status& why) { path_->End(why); });
    return absl::OkStatus();
  }

  // The last results of a step are here before its end has been told. It makes room then.
  void AwaitRoom() {
    while (running_.size() >= static_cast<size_t>(opened().terms().max_steps())) {
      const bool handed_over =
          submitted_.empty() || submitted_.front().place.step_id > running_.front();
      if (!handed_over) return;  // the service refuses one more
      stream_->Await(running_.front(), Until()).IgnoreError();
      running_.pop_front();
    }
  }

  absl::Status CheckNext(const SessionLayer& layer, bool append_only) const {
    if (!given_up_.ok()) return given_up_;
    if (submitted_.empty()) {
      return absl::FailedPreconditionError("all layers of the steps submitted are handed over");
    }
    const Submitted& step = submitted_.front();
    if (step.append_only != append_only) {
      return absl::FailedPreconditionError(append_only ? "the step has query rows: see Attend"
                                                       : "the step is append-only: see Append");
    }
    const auto& shapes = opened().shapes();
    const v1::LayerShape& shape = shapes[shapes.size() == 1 ? 0 : step.place.layer];
    const int32_t q_heads = shape.q_heads();
    const int32_t kv_heads = shape.kv_heads();
    TRIBUTARY_RETURN_IF_ERROR(CheckRows("q", layer.q, step.rows, q_heads, shape.head_dim()));
    // Without KV heads of its own the endpoint leaves k and v out.
    const int32_t tokens = kv_heads == 0 ? 0 : step.tokens;
    TRIBUTARY_RETURN_IF_ERROR(CheckRows("k", layer.k, tokens, kv_heads, shape.head_dim()));
    TRIBUTARY_RETURN_IF_ERROR(CheckRows("v", layer.v, tokens, kv_heads, shape.value_head_dim()));
    if (layer.lse != nullptr && !options_.return_lse) {
      return InvalidField("lse", "is given, but the session was opened without return_lse");
    }
    if (layer.output.data == nullptr) return absl::OkStatus();
    return CheckRows("output", layer.output, step.rows, q_heads, shape.value_head_dim());
  }

  // The next layer, piece by piece: one is filled while the one before it is computed, where there
  // are slots for both.
  absl::Status RunLayer(const SessionLayer& layer) {
    Submitted& step = submitted_.front();
    const std::vector<mailbox::Piece> pieces = step.pieces;
    LayerPlace place = step.place;
    ++step.place.layer;
    step.place.count += static_cast<uint32_t>(pieces.size());
    const bool ahead = opened().terms().slots() > 1;
    const bool has_results = !step.append_only;
    if (--step.layers_left == 0) submitted_.pop_front();

    std::optional<std::pair<LayerPlace, SessionLayer>> last;  // its results are not taken yet
    const auto take_back = [&] {
      if (!last.has_value() || !has_results) return absl::OkStatus();
      const absl::Status taken = path_->TakeBack(last->first, last->second, WaitsUntil());
      last.reset();
      return taken;
    };
    for (const mailbox::Piece& piece : pieces) {
      const SessionLayer part = PartOf(layer, piece, element_bytes());
      if (!ahead) TRIBUTARY_RETURN_IF_ERROR(take_back());
      TRIBUTARY_RETURN_IF_ERROR(path_->HandOver(place, part, WaitsUntil()));
      TRIBUTARY_RETURN_IF_ERROR(take_back());
      last.emplace(place, part);
      ++place.piece;
      ++place.count;
    }
    return take_back();
  }

  // The service gives up first, and says what it waited for: another endpoint, say.
  Clock::time_point WaitsUntil() const {
    const auto more = std::max<std::chrono::milliseconds>(options_.wait_timeout / 10,
                                                          std::chrono::milliseconds(100));
    return Clock::now() + options_.wait_timeout + more;
  }

  // Why the session is over, which it is after the first layer that failed.
  absl::Status GiveUp(const absl::Status& failure) {
    given_up_ = failure;
    if (absl::IsCancelled(failure)) {
      const absl::Status why = stream_->AwaitEnd(Clock::now() + kEndTimeout);
      if (!why.ok()) given_up_ = why;
    }
    stream_->Cancel();
    return given_up_;
  }

  HostSessionOptions options_;
  const std::chrono::milliseconds timeout_;
  const std::string lease_;  // that the session presents; empty: none
  std::unique_ptr<v1::AttentionService::Stub> stub_;
  std::unique_ptr<LayerPath> path_;
  std::unique_ptr<SessionStream> stream_;
  std::deque<Submitted> submitted_;
  std::deque<uint64_t> running_;  // steps that may not have ended
  uint64_t last_step_ = 0;
  absl::Status given_up_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<HostSession>> HostSession::Open(const ConnectOptions& connect,
                                                               const HostSessionOptions& options) {
  auto session = std::make_unique<ClientHostSession>(connect, options);
  TRIBUTARY_RETURN_IF_ERROR(session->Start(connect));
  return session;
}

absl::StatusOr<std::unique_ptr<HostSession>> HostSession::Join(const ConnectOptions& connect,
                                                               const EndpointOptions& options) {
  auto session = std::make_unique<ClientHostSession>(connect, HostSessionOptions{});
  TRIBUTARY_RETURN_IF_ERROR(session->StartAsEndpoint(connect, options));
  return session;
}

}  // namespace tributary::client
