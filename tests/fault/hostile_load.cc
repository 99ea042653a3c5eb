// A hostile client at full speed beside two honest hosts: what the hosts
// notice, and what it costs the coordinator.
//
//   fault_hostile_load --each=40s --rounds=10 --threads=2
//
// Each attack runs by itself, then all of them together. An attack goes on and
// off in turns, --rounds times: so the hosts' times without it are of the same
// minute, and of a machine that is as busy with other things. The hosts check
// every answer against float64. It fails when one of their calls does, or when
// the coordinator takes more memory than --most_mib beyond what it had before.
// Times are printed; on a quiet machine --most_p99 judges them, too.
//
// The hostile client is a process of its own, this program with --strike, and
// where root starts it a user of its own. It runs when nobody else wants to
// (SCHED_IDLE), so that what the hosts notice is what it makes the service do,
// and not the work of a client, which would be another machine's. Being nice is
// not enough: whoever runs may keep a core to the next tick.
#include <fcntl.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/security/credentials.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/rpc/descriptor.h"
#include "base/rpc/pass_descriptor.h"
#include "base/rpc/unix_address.h"
#include "service/client/hand_over.h"
#include "tests/fault/load.h"
#include "tests/fault/programs.h"
#include "tests/service/raw_call.h"
#include "tests/service/test_service.h"
#include "tests/support/usage.h"

ABSL_FLAG(absl::Duration, each, absl::Seconds(40), "how long each attack goes on, in all rounds");
ABSL_FLAG(int, rounds, 10, "how often an attack goes on and off");
ABSL_FLAG(std::string, only, "",
          "numbers of attacks, with commas, -1 for all together; \"\": each");
ABSL_FLAG(int, threads, 2, "of the hostile client, for each attack");
ABSL_FLAG(int, ranks, 2, "embedded workers");
ABSL_FLAG(
    int64_t, most_mib, 4096 + 1024,
    "that the coordinator's memory may grow: by the caches that the client may have, and more");
ABSL_FLAG(double, most_p99, 0,
          "how many times longer than without the attack the hosts' p99 may be; 0: not judged");
ABSL_FLAG(std::string, strike, "", "be the hostile client of the service at this address");
ABSL_FLAG(int, attack, -1, "with --strike: the number of the attack; -1: all of them");

namespace tributary::test {
namespace {

using service::testing::AppendOf;
using service::testing::AttendOf;
using service::testing::QueryOf;
using service::testing::SmallSpec;
using Clock = std::chrono::steady_clock;
using Stub = v1::AttentionService::Stub;

constexpr std::chrono::seconds kPatience{60};
// As whom root's hostile client runs.
constexpr uid_t kSomebody = 4711;

struct Attack {
  std::string name;
  // One blow; `thread` and `blow` number it.
  std::function<void(Stub& stub, const std::shared_ptr<grpc::Channel>& channel, int thread,
                     int64_t blow)>
      strike;
};

void SetDeadline(grpc::ClientContext& context) {
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
}

std::string NameOf(int thread, int64_t blow) {
  return "hostile" + std::to_string(thread) + "-" + std::to_string(blow);
}

// 6, 7: caches of a gigabyte come and go.
void CreateAndDelete(Stub& stub, int thread, int64_t blow, int64_t tokens) {
  v1::CacheSpec spec = SmallSpec();
  spec.set_capacity_tokens(tokens);
  service::testing::CreateCache(stub, NameOf(thread, blow), spec);
  grpc::ClientContext context;
  SetDeadline(context);
  v1::DeleteCacheRequest request;
  request.set_cache_id(NameOf(thread, blow));
  v1::DeleteCacheReply reply;
  stub.DeleteCache(&context, request, &reply);
}

// 9, 10: as many rows per call as a message takes, over one sequence.
void LongCall(Stub& stub, int thread) {
  const std::string cache = "long" + std::to_string(thread);
  v1::CacheSpec spec = SmallSpec();
  service::testing::CreateCache(stub, cache, spec);
  service::testing::Open(stub, cache, 1);
  v1::AttendReply reply;
  service::testing::Attend(stub, AttendOf(spec, cache, 1, 0, 1024), &reply);
  service::testing::Attend(stub, QueryOf(spec, cache, 1, 0, 1024), &reply);
}

// 9, 10: as many tokens per call as a message takes.
void LongAppend(Stub& stub, int thread, int64_t blow) {
  const std::string cache = "append" + std::to_string(thread);
  constexpr int32_t kTokens = 1 << 15;
  v1::CacheSpec spec = SmallSpec();
  spec.set_capacity_tokens(2 * kTokens);
  if (blow == 0) service::testing::CreateCache(stub, cache, spec);
  const auto sequence = static_cast<uint64_t>(blow + 1);
  service::testing::Open(stub, cache, sequence);
  v1::AppendReply reply;
  service::testing::Append(stub, AppendOf(spec, cache, sequence, 0, kTokens), &reply);
  grpc::ClientContext context;
  SetDeadline(context);
  v1::CloseSequenceRequest close;
  close.set_cache_id(cache);
  close.set_sequence_id(sequence);
  v1::CloseSequenceReply closed;
  stub.CloseSequence(&context, close, &closed);
}

// 8, 13: memory handed over that nobody registers, that is not sealed, and connections that say
// half of what they should.
void HandOverNothing(const std::string& address, Stub& stub, int64_t blow) {
  const std::string path(UnixPath(address));
  const Descriptor memory(memfd_create("hostile", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory.open() || ftruncate(memory.get(), 1 << 20) != 0) return;
  const auto secret = client::HandOver(path, memory.get(), Clock::now() + std::chrono::seconds(1));
  if (secret.ok() && blow % 2 == 0) {
    grpc::ClientContext context;
    SetDeadline(context);
    v1::RegisterSharedMemoryRequest request;
    request.set_name("hostile");
    request.mutable_memfd()->set_secret(*secret);
    request.set_byte_size(1 << 20);
    v1::RegisterSharedMemoryReply reply;
    stub.RegisterSharedMemory(&context, request, &reply);
  }
  const auto connection = ConnectToUnix(CompanionSocketOf(path), 0);
  if (!connection.ok()) return;
  const Descriptor half(*connection);
  SendWithDescriptor(half.get(), "half", memory.get());
}

// 14: a session whose messages are none, and one that is opened and left alone.
void JunkSession(Stub& stub, int64_t blow) {
  grpc::ClientContext context;
  SetDeadline(context);
  const auto stream = stub.AttendSession(&context);
  v1::SessionRequest request;
  if (blow % 2 == 0) {
    request.mutable_open()->set_cache_id("hostile");
    request.mutable_open()->set_memory(v1::SESSION_MEMORY_MESSAGES);
    request.mutable_open()->set_max_rows(64);
    request.mutable_open()->set_max_new_tokens(64);
    request.mutable_open()->set_q_dtype(v1::DTYPE_BF16);
  } else {
    request.mutable_layer();
  }
  stream->Write(request);
  v1::SessionReply reply;
  stream->Read(&reply);
  context.TryCancel();
  stream->Finish();
}

// 15: calls that nobody waits for, cancelled or out of time as soon as they are sent.
void AbandonedCalls(Stub& stub) {
  grpc::ClientContext context;
  SetDeadline(context);
  const auto stream = stub.AttendStream(&context);
  v1::AttendRequest request = QueryOf(SmallSpec(), "hostile", 1, 0, 1);
  for (uint64_t id = 0; id < 200; ++id) {
    request.set_request_id(id);
    request.set_timeout_ms(static_cast<int64_t>(id % 3));
    request.set_yield_ms(static_cast<int32_t>(id % 5));
    v1::AttendRequest cancel;
    cancel.set_request_id(id);
    cancel.set_cancel(true);
    if (!stream->Write(request) || !stream->Write(cancel)) break;
  }
  stream->WritesDone();
  v1::AttendReply reply;
  while (stream->Read(&reply)) {
  }
  stream->Finish();
}

// 12: what belongs to the hosts. (Whoever knows a cache's name may use it: no attack.)
void TouchOthers(Stub& stub) {
  const auto call = [&](auto method, const auto& request, auto reply) {
    grpc::ClientContext context;
    SetDeadline(context);
    (stub.*method)(&context, request, &reply);
  };
  v1::UnregisterSharedMemoryRequest region;
  region.set_name("hostile");
  call(&Stub::UnregisterSharedMemory, region, v1::UnregisterSharedMemoryReply());
  v1::CloseSequenceRequest sequence;
  sequence.set_cache_id(kCacheId);
  sequence.set_sequence_id(1'000'000'007);
  call(&Stub::CloseSequence, sequence, v1::CloseSequenceReply());
  if (geteuid() != kSomebody) return;  // it would be its own cache
  v1::DeleteCacheRequest cache;
  cache.set_cache_id(kCacheId);
  call(&Stub::DeleteCache, cache, v1::DeleteCacheReply());
}

// 8: shared memory that is cut short while a call uses it.
void CutShort(Stub& stub, int thread, int64_t blow) {
  const std::string name = NameOf(thread, blow);
  const std::string key = "/" + name + "-" + std::to_string(getpid());
  const int fd = shm_open(key.c_str(), O_CREAT | O_RDWR, 0600);
  if (fd < 0) return;
  constexpr int64_t kBytes = 1 << 20;
  bool made = ftruncate(fd, kBytes) == 0;
  grpc::ClientContext context;
  SetDeadline(context);
  v1::RegisterSharedMemoryRequest request;
  request.set_name(name);
  request.mutable_system()->set_key(key);
  request.set_byte_size(kBytes);
  v1::RegisterSharedMemoryReply registered;
  stub.RegisterSharedMemory(&context, request, &registered);
  made = made && ftruncate(fd, 0) == 0;
  v1::AttendRequest attend = QueryOf(SmallSpec(), "hostile", 1, 0, 1);
  attend.mutable_q()->mutable_shared_memory()->set_region(name);
  v1::AttendReply reply;
  if (made) service::testing::Attend(stub, attend, &reply);
  close(fd);
  shm_unlink(key.c_str());
}

// 9: a stream that is written to and never read from.
void UnreadStream(Stub& stub) {
  grpc::ClientContext context;
  SetDeadline(context);
  const auto stream = stub.AttendStream(&context);
  v1::AttendRequest request = QueryOf(SmallSpec(), "hostile", 1, 0, 1);
  request.set_return_lse(true);
  for (uint64_t id = 0; id < 1000; ++id) {
    request.set_request_id(id);
    if (!stream->Write(request)) break;
  }
  context.TryCancel();
  stream->Finish();
}

// 9, 10: as many calls at a time as a stream takes, of sequences that do not wait for each other.
void ManyAtATime(Stub& stub, int thread, int64_t blow) {
  constexpr uint64_t kSequences = 128;
  const auto id = [&](uint64_t i) { return 2'000'000 + 1000 * static_cast<uint64_t>(thread) + i; };
  const v1::CacheSpec spec = SmallSpec();
  for (uint64_t i = 0; blow == 0 && i < kSequences; ++i) {
    service::testing::Open(stub, "hostile", id(i));
    v1::AttendReply reply;
    for (int32_t layer = 0; layer < spec.layers(); ++layer) {
      service::testing::Attend(stub, AttendOf(spec, "hostile", id(i), 0, 8, layer), &reply);
    }
  }
  grpc::ClientContext context;
  SetDeadline(context);
  const auto stream = stub.AttendStream(&context);
  std::thread reader([&] {
    v1::AttendReply reply;
    while (stream->Read(&reply)) {
    }
  });
  for (uint64_t call = 0; call < 8 * kSequences; ++call) {
    v1::AttendRequest request =
        QueryOf(spec, "hostile", id(call % kSequences), 0, 8, static_cast<int32_t>(call % 2));
    request.set_request_id(call);
    if (!stream->Write(request)) break;
  }
  stream->WritesDone();
  reader.join();
  stream->Finish();
}

std::vector<Attack> Attacks(const std::string& address) {
  using Channel = std::shared_ptr<grpc::Channel>;
  return {
      {"caches of 1 GiB (6, 7)",
       [](Stub& stub, const Channel&, int thread, int64_t blow) {
         CreateAndDelete(stub, thread, blow, int64_t{1} << 20);
       }},
      {"caches no machine has (6)",
       [](Stub& stub, const Channel&, int thread, int64_t blow) {
         CreateAndDelete(stub, thread, blow, int64_t{1} << 36);
       }},
      {"memory cut short (8)",
       [](Stub& stub, const Channel&, int thread, int64_t blow) { CutShort(stub, thread, blow); }},
      {"memory handed over (8, 13)",
       [address](Stub& stub, const Channel&, int, int64_t blow) {
         HandOverNothing(address, stub, blow);
       }},
      {"streams not read (9)",
       [](Stub& stub, const Channel&, int, int64_t) { UnreadStream(stub); }},
      {"long calls (9, 10)",
       [](Stub& stub, const Channel&, int thread, int64_t) { LongCall(stub, thread); }},
      {"long appends (9, 10)", [](Stub& stub, const Channel&, int thread,
                                  int64_t blow) { LongAppend(stub, thread, blow); }},
      {"sequences and listings (12)",
       [](Stub& stub, const Channel&, int thread, int64_t blow) {
         TouchOthers(stub);
         service::testing::Open(stub, "hostile",
                                static_cast<uint64_t>(1000000 * thread + blow + 2));
         grpc::ClientContext context;
         SetDeadline(context);
         v1::GetTopologyRequest request;
         request.set_with_sequences(true);
         request.set_max_sequences(1 << 20);
         v1::GetTopologyReply reply;
         if (blow % 100 == 0) stub.GetTopology(&context, request, &reply);
       }},
      {"no messages (14)",
       [](Stub&, const Channel& channel, int, int64_t) {
         service::testing::RawCall(channel, "/tributary.v1.AttentionService/Attend", "\x0a",
                                   kPatience);
       }},
      {"sessions of junk (14)",
       [](Stub& stub, const Channel&, int, int64_t blow) { JunkSession(stub, blow); }},
      {"calls abandoned (15)",
       [](Stub& stub, const Channel&, int, int64_t) { AbandonedCalls(stub); }},
      {"many calls at a time (9, 10)", [](Stub& stub, const Channel&, int thread,
                                          int64_t blow) { ManyAtATime(stub, thread, blow); }},
      {"messages too large (15)",
       [](Stub&, const Channel& channel, int, int64_t) {
         service::testing::RawCall(channel, "/tributary.v1.AttentionService/Attend",
                                   std::string(size_t{70} << 20, '\xff'), kPatience);
       }},
  };
}

// The hostile client: strikes for --each, then prints how often.
int Strike(const std::string& address, int attack) {
  const auto stub = ConnectTo(address);
  const grpc::Status created = service::testing::CreateCache(*stub, "hostile", SmallSpec());
  if (!created.ok()) {
    std::printf("the service gives it no cache: %s\n", created.error_message().c_str());
    return EXIT_FAILURE;
  }
  service::testing::Open(*stub, "hostile", 1);
  v1::AttendReply reply;
  service::testing::Attend(*stub, AttendOf(SmallSpec(), "hostile", 1, 0, 8), &reply);
  const Clock::time_point end =
      Clock::now() + absl::ToChronoMilliseconds(absl::GetFlag(FLAGS_each));
  const std::vector<Attack> all = Attacks(address);
  std::atomic<int64_t> blows = 0;
  std::vector<std::thread> threads;
  for (size_t i = 0; i < all.size(); ++i) {
    if (attack >= 0 && i != static_cast<size_t>(attack)) continue;
    for (int thread = 0; thread < absl::GetFlag(FLAGS_threads); ++thread) {
      threads.emplace_back([&, i, thread] {
        const auto channel = grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
        Stub hostile(channel);
        for (int64_t blow = 0; Clock::now() < end; ++blow, ++blows) {
          all[i].strike(hostile, channel, thread, blow);
        }
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  std::printf("%lld\n", static_cast<long long>(blows.load()));
  return EXIT_SUCCESS;
}

// This process becomes the hostile client, before it has threads.
bool TurnHostile() {
  const sched_param none = {};
  if (sched_setscheduler(0, SCHED_IDLE, &none) != 0) return false;
  if (geteuid() != 0) return true;
  if (setresgid(kSomebody, kSomebody, kSomebody) != 0) return false;
  if (setresuid(kSomebody, kSomebody, kSomebody) != 0) return false;
  return prctl(PR_SET_PDEATHSIG, SIGKILL) == 0;  // which another user has to ask for again
}

class HonestHosts {
 public:
  explicit HonestHosts(const std::string& address) {
    for (uint64_t id = 1; id <= 2; ++id) {
      hosts_.push_back(std::make_unique<SequenceHost>(ConnectTo(address), id));
      EXPECT_TRUE(hosts_.back()->Open().ok());
    }
  }

  // For so long: adds the seconds that the service took for their steps to `all`.
  void Run(Clock::duration time, std::vector<double>* all) {
    const Clock::time_point end = Clock::now() + time;
    std::vector<std::vector<double>> seconds(hosts_.size());
    std::vector<std::thread> threads;
    for (size_t i = 0; i < hosts_.size(); ++i) {
      threads.emplace_back([&, i] {
        SequenceHost& host = *hosts_[i];
        while (Clock::now() < end) {
          if (host.length() > 200) {
            EXPECT_TRUE(host.Truncate(100).ok());
          }
          const grpc::Status status = host.Step(1);
          seconds[i].push_back(host.last_call().count());
          EXPECT_TRUE(status.ok()) << status.error_code() << " " << status.error_message();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const auto& of_host : seconds) all->insert(all->end(), of_host.begin(), of_host.end());
  }

 private:
  std::vector<std::unique_ptr<SequenceHost>> hosts_;
};

double Percentile(std::vector<double>* seconds, double share) {
  if (seconds->empty()) return 0;
  std::sort(seconds->begin(), seconds->end());
  return (*seconds)[static_cast<size_t>(share * static_cast<double>(seconds->size() - 1))];
}

// What the hosts noticed of one attack.
struct Noticed {
  std::vector<double> calm, attacked;  // seconds of steps
  int64_t blows = 0;
};

void Print(const std::string& name, Noticed* noticed, size_t peak_mib) {
  const double calm = Percentile(&noticed->calm, 0.99);
  const double attacked = Percentile(&noticed->attacked, 0.99);
  std::printf("%-28s %8lld %8zu %8.2f %8.2f %8.2f %8.2f %6.2f %10zu\n", name.c_str(),
              static_cast<long long>(noticed->blows), noticed->attacked.size(),
              1e3 * Percentile(&noticed->calm, 0.5), 1e3 * calm,
              1e3 * Percentile(&noticed->attacked, 0.5), 1e3 * attacked, attacked / calm, peak_mib);
  std::fflush(stdout);
}

class Rig {
 public:
  void Start();
  // `attack` -1: all of them.
  void Run(const std::string& name, int attack);
  size_t grown_mib() const { return (UsageOf(coordinator_->pid()).peak - before_) >> 20; }
  const std::string& address() const { return address_; }

 private:
  // Returns its blows.
  int64_t EndOf(ChildProcess* hostile, const std::string& attack);

  const TemporaryDirectory directory_;
  const std::string address_ = PublicAddress(directory_);
  std::unique_ptr<ChildProcess> coordinator_;
  std::unique_ptr<HonestHosts> hosts_;
  size_t before_ = 0;
  int runs_ = 0;
};

void Rig::Start() {
  ASSERT_EQ(chmod(directory_.File("").c_str(), 0711), 0);
  coordinator_ = StartEmbedded(directory_, absl::GetFlag(FLAGS_ranks),
                               {"--threads=2", "--max_cache_bytes_per_client=4294967296",
                                "--shared_memory_prefixes=/hostile", "--socket_mode=0666"});
  ASSERT_TRUE(Eventually(kPatience,
                         [&] { return coordinator_->Log().find(" ready") != std::string::npos; }));
  ASSERT_TRUE(service::testing::CreateCache(*ConnectTo(address_), kCacheId, PublicSpec()).ok());
  hosts_ = std::make_unique<HonestHosts>(address_);
  before_ = UsageOf(coordinator_->pid()).peak;
}

int64_t Rig::EndOf(ChildProcess* hostile, const std::string& attack) {
  EXPECT_EQ(hostile->Wait(kPatience), 0) << attack;
  int64_t blows = 0;
  EXPECT_TRUE(absl::SimpleAtoi(hostile->Log(), &blows)) << hostile->Log();
  return blows;
}

void Rig::Run(const std::string& name, int attack) {
  const absl::Duration round = absl::GetFlag(FLAGS_each) / absl::GetFlag(FLAGS_rounds);
  Noticed noticed;
  for (int i = 0; i < absl::GetFlag(FLAGS_rounds); ++i) {
    hosts_->Run(absl::ToChronoNanoseconds(round), &noticed.calm);
    ChildProcess hostile(
        {"/proc/self/exe", absl::StrCat("--strike=", address_), absl::StrCat("--attack=", attack),
         absl::StrCat("--each=", absl::FormatDuration(round)),
         absl::StrCat("--threads=", absl::GetFlag(FLAGS_threads))},
        directory_.File(absl::StrCat("hostile-", runs_++)));
    hosts_->Run(absl::ToChronoNanoseconds(round), &noticed.attacked);
    noticed.blows += EndOf(&hostile, name);
  }
  EXPECT_FALSE(noticed.attacked.empty());
  Print(name, &noticed, grown_mib());
  const double most = absl::GetFlag(FLAGS_most_p99);
  EXPECT_TRUE(most == 0 ||
              Percentile(&noticed.attacked, 0.99) <= most * Percentile(&noticed.calm, 0.99))
      << name;
}

TEST(HostileLoad, HonestHostsAreServedAndMemoryIsBounded) {
  Rig rig;
  ASSERT_NO_FATAL_FAILURE(rig.Start());
  const std::vector<Attack> attacks = Attacks(rig.address());
  std::vector<int> which;
  for (const absl::string_view number :
       absl::StrSplit(absl::GetFlag(FLAGS_only), ',', absl::SkipEmpty())) {
    ASSERT_TRUE(absl::SimpleAtoi(number, &which.emplace_back())) << number;
  }
  if (which.empty()) {
    for (size_t i = 0; i < attacks.size(); ++i) which.push_back(static_cast<int>(i));
    which.push_back(-1);
  }
  std::printf("%-28s %8s %8s %17s %17s %6s %10s\n%45s %8s %8s %8s %8s\n", "", "", "", "without",
              "beside it", "", "peak", "attack                          blows    steps", "p50 ms",
              "p99 ms", "p50 ms", "p99 ms   ratio      + MiB");
  for (const int attack : which) {
    rig.Run(attack < 0 ? "all together" : attacks.at(static_cast<size_t>(attack)).name, attack);
  }
  EXPECT_LT(rig.grown_mib(), static_cast<size_t>(absl::GetFlag(FLAGS_most_mib)));
}

}  // namespace
}  // namespace tributary::test

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  absl::ParseCommandLine(argc, argv);
  const std::string strike = absl::GetFlag(FLAGS_strike);
  if (strike.empty()) return RUN_ALL_TESTS();
  if (!tributary::test::TurnHostile()) {
    std::perror("becoming the hostile client");
    return EXIT_FAILURE;
  }
  return tributary::test::Strike(strike, absl::GetFlag(FLAGS_attack));
}
