// What the RPC adds to an Attend: the same call of one small layer, by the same coordinator with
// four embedded workers, (a) in process, (b) unary over a Unix socket, (c) on an open stream.
// Tensors lie in one shared memory region throughout.
#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "service/coordinator.h"
#include "service/embedded_group.h"
#include "service/server.h"
#include "tributary/v1/attention.grpc.pb.h"

namespace tributary::service {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kCalls = 2000;  // of each way, taken in turns
constexpr int kQHeads = 8, kKvHeads = 2, kHeadDim = 64;
constexpr size_t kRegionBytes = 1 << 20;
constexpr char kCache[] = "bench";

void Require(bool ok, const std::string& what) {
  if (ok) return;
  std::fprintf(stderr, "rpc_overhead_bench: %s\n", what.c_str());
  std::exit(1);
}

// Runs a callback-style call to its end, as a host in the same process would.
template <typename Reply, typename Call>
Reply Await(Call call) {
  std::mutex mutex;
  std::condition_variable changed;
  std::optional<absl::StatusOr<Reply>> result;
  call([&](absl::StatusOr<Reply> reply) {
    std::lock_guard lock(mutex);
    result = std::move(reply);
    changed.notify_one();
  });
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return result.has_value(); });
  Require(result->ok(), std::string(result->status().message()));
  return **std::move(result);
}

// A region by name, filled with small numbers.
void MakeRegion(const std::string& key) {
  const int fd = shm_open(key.c_str(), O_CREAT | O_TRUNC | O_RDWR, 0600);
  Require(fd >= 0 && ftruncate(fd, kRegionBytes) == 0, "cannot make a shared memory object");
  auto* values =
      static_cast<float*>(mmap(nullptr, kRegionBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
  Require(values != MAP_FAILED, "cannot map the shared memory object");
  for (size_t i = 0; i < kRegionBytes / sizeof(float); ++i) values[i] = 0.01f * (i % 100);
  munmap(values, kRegionBytes);
  close(fd);
}

v1::Tensor InRegion(uint64_t offset, int64_t heads) {
  v1::Tensor tensor;
  tensor.set_dtype(v1::DTYPE_F32);
  for (const int64_t extent : {int64_t{1}, heads, int64_t{kHeadDim}}) tensor.add_shape(extent);
  tensor.mutable_shared_memory()->set_region("r");
  tensor.mutable_shared_memory()->set_offset(offset);
  return tensor;
}

v1::AttendRequest OneToken(int64_t position) {
  v1::AttendRequest request;
  request.set_request_id(position + 1);
  request.set_cache_id(kCache);
  request.set_mode(v1::ATTEND_MODE_CAUSAL);
  v1::AttendEntry* entry = request.add_entries();
  entry->set_sequence_id(1);
  entry->set_first_position(position);
  entry->set_query_rows(1);
  entry->set_new_tokens(1);
  *request.mutable_q() = InRegion(0, kQHeads);
  *request.mutable_k() = InRegion(65'536, kKvHeads);
  *request.mutable_v() = InRegion(131'072, kKvHeads);
  *request.mutable_output() = InRegion(196'608, kQHeads);
  return request;
}

struct Way {
  const char* name;
  std::function<void(const v1::AttendRequest&)> call;
  std::vector<double> microseconds;
};

void Print(Way& way, double base) {
  std::sort(way.microseconds.begin(), way.microseconds.end());
  const auto at = [&](double p) {
    return way.microseconds[static_cast<size_t>(p * (way.microseconds.size() - 1))];
  };
  std::printf("%-34s %8.1f %8.1f %8.1f %+10.1f\n", way.name, at(0.5), at(0.9), at(0.99),
              at(0.5) - base);
}

int Main() {
  const std::string name = "tributary-bench-" + std::to_string(getpid());
  const std::string key = "/" + name;
  const std::string address = "unix:/tmp/" + name + ".sock";
  std::mutex mutex;
  std::condition_variable changed;
  bool ready = false;
  CoordinatorOptions options;
  options.on_readiness = [&](bool now) {
    std::lock_guard lock(mutex);
    ready = now;
    changed.notify_all();
  };
  Coordinator coordinator(options, CreateEmbeddedGroup({.workers = 4}),
                          std::make_shared<const telemetry::Logger>(telemetry::LogLevel::kWarning,
                                                                    telemetry::LogFormat::kText));
  Require(coordinator.Start().ok(), "cannot start");
  {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return ready; });
  }
  auto server = Server::Start({.listen = {address}}, &coordinator);
  Require(server.ok(), std::string(server.status().message()));

  MakeRegion(key);
  v1::RegisterSharedMemoryRequest region;
  region.set_name("r");
  region.mutable_system()->set_key(key);
  region.set_byte_size(kRegionBytes);
  Await<v1::RegisterSharedMemoryReply>(
      [&](auto done) { coordinator.RegisterSharedMemory(region, done); });
  shm_unlink(key.c_str());

  v1::CreateCacheRequest create;
  create.set_cache_id(kCache);
  create.mutable_spec()->set_layers(1);
  create.mutable_spec()->set_q_heads(kQHeads);
  create.mutable_spec()->set_kv_heads(kKvHeads);
  create.mutable_spec()->set_head_dim(kHeadDim);
  create.mutable_spec()->set_capacity_tokens(4 * kCalls);
  Await<v1::CreateCacheReply>([&](auto done) { coordinator.CreateCache(create, done); });
  v1::OpenSequenceRequest open;
  open.set_cache_id(kCache);
  open.set_sequence_id(1);
  Await<v1::OpenSequenceReply>([&](auto done) { coordinator.OpenSequence(open, {}, done); });

  const auto stub = v1::AttentionService::NewStub(
      grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  grpc::ClientContext stream_context;
  const auto stream = stub->AttendStream(&stream_context);
  std::vector<Way> ways = {
      {"in process",
       [&](const v1::AttendRequest& request) {
         Await<v1::AttendReply>([&](auto done) {
           coordinator.Attend(std::make_shared<const v1::AttendRequest>(request), {}, done);
         });
       }},
      {"unary, Unix socket",
       [&](const v1::AttendRequest& request) {
         grpc::ClientContext context;
         v1::AttendReply reply;
         const grpc::Status status = stub->Attend(&context, request, &reply);
         Require(status.ok(), status.error_message());
       }},
      {"stream, Unix socket", [&](const v1::AttendRequest& request) {
         v1::AttendReply reply;
         Require(stream->Write(request) && stream->Read(&reply), "the stream ended");
         Require(reply.status().code() == 0, reply.status().message());
       }}};
  int64_t position = 0;
  for (int call = 0; call < kCalls; ++call) {
    for (Way& way : ways) {
      const v1::AttendRequest request = OneToken(position++);
      const Clock::time_point begin = Clock::now();
      way.call(request);
      if (call < kCalls / 10) continue;  // warming up
      way.microseconds.push_back(
          std::chrono::duration<double, std::micro>(Clock::now() - begin).count());
    }
  }
  stream->WritesDone();
  stream->Finish();

  std::printf(
      "Attend of one layer, %d/%d heads of %d, one token, 4 embedded workers; microseconds\n",
      kQHeads, kKvHeads, kHeadDim);
  std::printf("%-34s %8s %8s %8s %10s\n", "", "p50", "p90", "p99", "p50 added");
  std::sort(ways[0].microseconds.begin(), ways[0].microseconds.end());
  const double base = ways[0].microseconds[ways[0].microseconds.size() / 2];
  for (Way& way : ways) Print(way, base);
  (*server)->Drain(Clock::now() + std::chrono::seconds(10));
  coordinator.Stop();
  return 0;
}

}  // namespace
}  // namespace tributary::service

int main() { return tributary::service::Main(); }
