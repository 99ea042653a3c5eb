#include "tests/service/test_service.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <utility>

#include "kernels/cpu/backend.h"
#include "service/data/resolve_spec.h"
#include "service/workers/embedded_group.h"
#include "tests/support/random.h"
#include "worker/rpc/dtype_conversion.h"

namespace tributary::service::testing {
namespace {

std::shared_ptr<const telemetry::Logger> QuietLogger() {
  return std::make_shared<const telemetry::Logger>(telemetry::LogLevel::kError,
                                                   telemetry::LogFormat::kText);
}

size_t Count(const std::vector<int64_t>& shape) {
  size_t count = 1;
  for (const int64_t extent : shape) count *= static_cast<size_t>(extent);
  return count;
}

v1::Tensor RandomTensor(const std::vector<int64_t>& shape, uint64_t seed) {
  return InlineTensor(DType::kF32, shape, RandomValues(Count(shape), seed));
}

template <typename Call>
grpc::Status WithDeadline(Call call) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(120));
  return call(&context);
}

}  // namespace

TestService::TestService(Options options)
    : TestService(options, CreateEmbeddedGroup({.workers = options.workers, .threads = 2})) {}

TestService::TestService(Options options, std::unique_ptr<WorkerGroup> group) {
  options.coordinator.on_readiness = [this](bool ready) { SetReady(ready); };
  coordinator_ =
      std::make_unique<Coordinator>(options.coordinator, std::move(group), QuietLogger());
  ServerOptions server_options = options.server;
  server_options.listen = {"unix:" + directory_.File("service.sock")};
  server_options.admin_listen = "unix:" + directory_.File("admin.sock");
  server_options.max_message_bytes = static_cast<int>(options.coordinator.max_message_bytes);
  server_options.max_calls_per_stream = options.max_calls_per_stream;
  auto server = Server::Start(server_options, coordinator_.get());
  if (!server.ok()) ADD_FAILURE() << server.status();
  {
    std::lock_guard lock(mutex_);
    server_ = *std::move(server);
  }
  stub_ = v1::AttentionService::NewStub(NewChannel());
  if (absl::Status started = coordinator_->Start(); !started.ok()) ADD_FAILURE() << started;
  WaitReady();
}

TestService::~TestService() {
  coordinator_->Stop();
  std::lock_guard lock(mutex_);
  server_.reset();
}

void TestService::SetReady(bool ready) {
  std::lock_guard lock(mutex_);
  ready_ = ready;
  if (server_ != nullptr) server_->SetReady(ready);
  changed_.notify_all();
}

void TestService::WaitReady() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return ready_; });
}

void TestService::WaitNotReady() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !ready_; });
}

std::shared_ptr<grpc::Channel> TestService::NewChannel() const {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetMaxSendMessageSize(-1);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a connection of its own
  return grpc::CreateCustomChannel(address(), grpc::InsecureChannelCredentials(), arguments);
}

v1::GetTopologyReply TestService::Topology() {
  v1::GetTopologyRequest request;
  request.set_with_sequences(true);
  request.set_max_sequences(100'000);
  v1::GetTopologyReply reply;
  const grpc::Status status =
      WithDeadline([&](auto* context) { return stub_->GetTopology(context, request, &reply); });
  EXPECT_TRUE(status.ok()) << status.error_message();
  return reply;
}

std::string TestService::State() {
  v1::GetTopologyReply reply = Topology();
  reply.clear_statistics();
  for (v1::WorkerInfo& worker : *reply.mutable_workers()) worker.clear_busy_seconds();
  for (v1::SessionInfo& session : *reply.mutable_sessions()) session.clear_age_seconds();
  return reply.DebugString();
}

v1::CacheSpec SmallSpec() {
  v1::CacheSpec spec;
  spec.set_layers(2);
  spec.set_q_heads(4);
  spec.set_kv_heads(2);
  spec.set_head_dim(64);
  spec.set_page_size(16);
  spec.set_kv_dtype(v1::DTYPE_BF16);
  spec.set_capacity_tokens(64 * 64);
  return spec;
}

v1::Tensor InlineTensor(DType dtype, const std::vector<int64_t>& shape,
                        const std::vector<float>& values) {
  v1::Tensor tensor;
  tensor.set_dtype(ToProto(dtype));
  tensor.mutable_shape()->Add(shape.begin(), shape.end());
  std::string* bytes = tensor.mutable_inline_();
  bytes->resize(values.size() * SizeOf(dtype));
  cpu::Convert(DType::kF32, values.data(), dtype, bytes->data(), values.size());
  return tensor;
}

std::vector<float> ValuesOf(const v1::Tensor& tensor) {
  const DType dtype = *FromProto(tensor.dtype());
  std::vector<float> values(tensor.inline_().size() / SizeOf(dtype));
  cpu::Convert(dtype, tensor.inline_().data(), DType::kF32, values.data(), values.size());
  return values;
}

std::vector<float> RandomValues(size_t count, uint64_t seed) {
  return test::NormalValues(count, seed);
}

v1::AttendRequest AttendOf(const v1::CacheSpec& spec, const std::string& cache, uint64_t sequence,
                           int64_t first, int32_t tokens, int32_t layer, uint64_t seed) {
  v1::AttendRequest request = QueryOf(spec, cache, sequence, first, tokens, layer, seed);
  request.mutable_entries(0)->set_new_tokens(tokens);
  const std::vector<int64_t> shape = {tokens, spec.kv_heads(), spec.head_dim()};
  *request.mutable_k() = RandomTensor(shape, 3 * seed + 1);
  *request.mutable_v() = RandomTensor(shape, 3 * seed + 2);
  return request;
}

v1::AttendRequest QueryOf(const v1::CacheSpec& spec, const std::string& cache, uint64_t sequence,
                          int64_t first, int32_t rows, int32_t layer, uint64_t seed) {
  v1::AttendRequest request;
  request.set_cache_id(cache);
  request.set_layer(layer);
  request.set_mode(v1::ATTEND_MODE_CAUSAL);
  v1::AttendEntry* entry = request.add_entries();
  entry->set_sequence_id(sequence);
  entry->set_first_position(first);
  entry->set_query_rows(rows);
  *request.mutable_q() = RandomTensor({rows, spec.q_heads(), spec.head_dim()}, 3 * seed);
  return request;
}

v1::AppendRequest AppendOf(const v1::CacheSpec& spec, const std::string& cache, uint64_t sequence,
                           int64_t first, int32_t tokens, int32_t layer, uint64_t seed) {
  v1::AppendRequest request;
  request.set_cache_id(cache);
  request.set_layer(layer);
  v1::AppendEntry* entry = request.add_entries();
  entry->set_sequence_id(sequence);
  entry->set_first_position(first);
  entry->set_tokens(tokens);
  const std::vector<int64_t> shape = {tokens, spec.kv_heads(), spec.head_dim()};
  *request.mutable_k() = RandomTensor(shape, 3 * seed + 1);
  *request.mutable_v() = RandomTensor(shape, 3 * seed + 2);
  return request;
}

grpc::Status CreateCache(v1::AttentionService::Stub& stub, const std::string& name,
                         const v1::CacheSpec& spec) {
  v1::CreateCacheRequest request;
  request.set_cache_id(name);
  *request.mutable_spec() = spec;
  v1::CreateCacheReply reply;
  return WithDeadline([&](auto* context) { return stub.CreateCache(context, request, &reply); });
}

grpc::Status Open(v1::AttentionService::Stub& stub, const std::string& cache, uint64_t sequence) {
  v1::OpenSequenceRequest request;
  request.set_cache_id(cache);
  request.set_sequence_id(sequence);
  v1::OpenSequenceReply reply;
  return WithDeadline([&](auto* context) { return stub.OpenSequence(context, request, &reply); });
}

grpc::Status Attend(v1::AttentionService::Stub& stub, const v1::AttendRequest& request,
                    v1::AttendReply* reply) {
  return WithDeadline([&](auto* context) { return stub.Attend(context, request, reply); });
}

grpc::Status Append(v1::AttentionService::Stub& stub, const v1::AppendRequest& request,
                    v1::AppendReply* reply) {
  return WithDeadline([&](auto* context) { return stub.Append(context, request, reply); });
}

std::string Me() { return "client:uid:" + std::to_string(getuid()); }

std::string FieldOf(const grpc::Status& status) {
  google::rpc::BadRequest bad;
  if (!DetailOf(status, &bad) || bad.field_violations_size() == 0) return "";
  return bad.field_violations(0).field();
}

}  // namespace tributary::service::testing
