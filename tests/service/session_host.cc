#include "tests/service/session_host.h"

#include <gtest/gtest.h>

#include <utility>

namespace tributary::service::testing {

void PrepareCache(TestService& service, const v1::CacheSpec& spec, int sequences) {
  EXPECT_TRUE(CreateCache(service.stub(), "m", spec).ok());
  for (int id = 1; id <= sequences; ++id) EXPECT_TRUE(Open(service.stub(), "m", id).ok());
}

std::unique_ptr<client::HostSession> OpenSessionAt(const std::string& target,
                                                   client::HostSessionOptions options) {
  options.cache_id = std::string("m");
  options.return_lse = true;
  auto session = client::HostSession::Open({.target = target}, options);
  EXPECT_TRUE(session.ok()) << session.status();
  return session.ok() ? *std::move(session) : nullptr;
}

client::SessionStep StepOf(const std::vector<v1::AttendRequest>& requests) {
  client::SessionStep step{.mode = requests.front().mode(),
                           .first_layer = requests.front().layer(),
                           .layers = static_cast<int32_t>(requests.size())};
  for (const v1::AttendEntry& entry : requests.front().entries()) {
    step.entries.push_back({.sequence_id = entry.sequence_id(),
                            .first_position = entry.first_position(),
                            .query_rows = entry.query_rows(),
                            .new_tokens = entry.new_tokens()});
  }
  return step;
}

client::HeadRows RowsOf(const v1::Tensor& tensor) {
  if (tensor.inline_().empty()) return {};
  return {.data = const_cast<char*>(tensor.inline_().data()),
          .rows = static_cast<int32_t>(tensor.shape(0)),
          .heads = static_cast<int32_t>(tensor.shape(1)),
          .dim = static_cast<int32_t>(tensor.shape(2))};
}

absl::Status AttendWith(client::HostSession& session, const v1::AttendRequest& request,
                        ModelHost* model) {
  const v1::LayerShape& shape = session.opened().shapes(0);
  const size_t q_bytes = request.q().inline_().size();
  v1::AttendReply reply;
  reply.mutable_output()->set_dtype(request.q().dtype());
  *reply.mutable_output()->mutable_shape() = request.q().shape();
  reply.mutable_output()->set_shape(2, shape.value_head_dim());
  reply.mutable_output()->mutable_inline_()->resize(q_bytes / shape.head_dim() *
                                                    shape.value_head_dim());
  reply.mutable_lse()->set_dtype(v1::DTYPE_F32);
  reply.mutable_lse()->add_shape(request.q().shape(0));
  reply.mutable_lse()->add_shape(request.q().shape(1));
  reply.mutable_lse()->mutable_inline_()->resize(request.q().shape(0) * request.q().shape(1) *
                                                 sizeof(float));
  const absl::Status done = session.Attend(
      {.q = RowsOf(request.q()),
       .k = RowsOf(request.k()),
       .v = RowsOf(request.v()),
       .output = RowsOf(reply.output()),
       .lse = reinterpret_cast<float*>(reply.mutable_lse()->mutable_inline_()->data())});
  if (!done.ok() || model == nullptr) return done;
  for (const v1::AttendEntry& entry : request.entries()) {
    const bool keeps = request.mode() != v1::ATTEND_MODE_DFLASH;  // a draft's tokens are not kept
    reply.add_lengths(entry.first_position() + (keeps ? entry.new_tokens() : 0));
  }
  model->Check(request, reply);
  return done;
}

void RunStep(client::HostSession& session, ModelHost& model,
             const std::vector<v1::AttendRequest>& requests) {
  const absl::StatusOr<uint64_t> step = session.Submit(StepOf(requests));
  ASSERT_TRUE(step.ok()) << step.status();
  for (const v1::AttendRequest& request : requests) {
    const absl::Status done = AttendWith(session, request, &model);
    ASSERT_TRUE(done.ok()) << done;
  }
  const absl::Status kept = session.Await(*step);
  EXPECT_TRUE(kept.ok()) << kept;
}

}  // namespace tributary::service::testing
