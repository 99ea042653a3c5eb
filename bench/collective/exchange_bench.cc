// The exchange and merge of partials in host memory, strategy beside strategy. See README.md.
#include <algorithm>
#include <barrier>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "collective/exchange/exchange.h"
#include "collective/in_process.h"
#include "collective/rendezvous/memory_rendezvous.h"
#include "collective/transport/transport.h"
#include "kernels/reference.h"

namespace tributary::collective {
namespace {

using Clock = std::chrono::steady_clock;
using Communicators = std::vector<std::unique_ptr<Communicator>>;

constexpr int kWarmUps = 3;
constexpr std::chrono::milliseconds kTimePerFigure(150);
constexpr int kFewest = 11;
constexpr int kMost = 2001;

struct Flags {
  int ranks = 4;
  std::vector<int32_t> rows = {1, 16, 64, 256, 1024};
  int32_t heads = 32;
  int32_t head_dim = 128;
  bool least = false;  // of the exchanges' times, in place of their median
};

Flags ParseFlags(int argc, char** argv) {
  Flags f;
  for (int i = 1; i < argc; i += 2) {
    const std::string flag = argv[i];
    const std::string value = i + 1 < argc ? argv[i + 1] : "";
    if (flag == "--ranks") {
      f.ranks = std::atoi(value.c_str());
    } else if (flag == "--rows") {
      f.rows.clear();
      std::istringstream list(value);
      for (std::string item; std::getline(list, item, ',');) f.rows.push_back(std::stoi(item));
    } else if (flag == "--heads") {
      f.heads = std::atoi(value.c_str());
    } else if (flag == "--head_dim") {
      f.head_dim = std::atoi(value.c_str());
    } else if (flag == "--figure" && (value == "least" || value == "median")) {
      f.least = value == "least";
    } else {
      std::fprintf(stderr, "unknown flag %s\n", flag.c_str());
      std::exit(2);
    }
  }
  if (f.ranks < 1 || f.rows.empty() || f.heads < 1 || f.head_dim < 1) {
    std::fprintf(stderr, "ranks, rows, heads and head_dim must be positive\n");
    std::exit(2);
  }
  return f;
}

void Check(const Status& status, const char* what) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s: %s\n", what, status.message().c_str());
  std::exit(1);
}

Deadline Soon() { return Clock::now() + std::chrono::seconds(60); }

void OnEveryRank(int ranks, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) threads.emplace_back([&body, r] { body(r); });
  for (std::thread& t : threads) t.join();
}

// A way between ranks, by the name that figures have.
struct Way {
  const char* name;
  Communicators ranks;
};

// None where this build does not have it.
Communicators ConnectBy(Transport transport, int ranks) {
  Communicators group(ranks);
  MemoryRendezvous rendezvous;
  std::vector<Status> status(ranks);
  OnEveryRank(ranks, [&](int r) {
    status[r] = CreatePeerCommunicator(transport, {.rank = r, .size = ranks, .epoch = 1},
                                       rendezvous, Soon(), &group[r]);
  });
  for (const Status& s : status) {
    if (s.code() == StatusCode::kFailedPrecondition) return {};
    Check(s, Describe(transport));
  }
  return group;
}

class Bench {
 public:
  explicit Bench(const Flags& flags) : flags_(flags), workspaces_(flags.ranks) {
    const size_t pairs =
        static_cast<size_t>(*std::max_element(flags.rows.begin(), flags.rows.end())) * flags.heads;
    for (int r = 0; r < flags.ranks; ++r) {
      std::mt19937 random(r);
      std::normal_distribution<float> normal;
      std::vector<float> o(pairs * flags.head_dim), lse(pairs);
      for (float& x : o) x = normal(random);
      for (float& x : lse) x = 3 * normal(random);
      o_.push_back(std::move(o));
      lse_.push_back(std::move(lse));
      out_.emplace_back(pairs * flags.head_dim);
    }
  }

  // Every figure of one way right after the same figure of the others.
  void Run(const std::vector<Way>& ways) {
    for (const Placement placement : {Placement::kScattered, Placement::kGathered}) {
      for (const Strategy strategy : {Strategy::kAllGather, Strategy::kAgRs, Strategy::kA2a}) {
        std::vector<std::string> lines(ways.size());
        for (const int32_t rows : flags_.rows) {
          const ExchangeShape shape{rows, flags_.heads, flags_.head_dim, flags_.ranks, placement};
          const char chosen = ChooseStrategy(shape, Strategy::kAuto) == strategy ? '*' : ' ';
          for (size_t way = 0; way < ways.size(); ++way) {
            const Communicators& ranks = ways[way].ranks;
            Verify(ranks, strategy, placement, rows);
            char figure[32];
            std::snprintf(figure, sizeof(figure), " %9.1f%c",
                          Time(ranks, strategy, placement, rows), chosen);
            lines[way] += figure;
          }
        }
        for (size_t way = 0; way < ways.size(); ++way) {
          std::printf("%-11s %-9s %-10s%s\n", ways[way].name, Name(placement), Name(strategy),
                      lines[way].c_str());
        }
        std::fflush(stdout);
      }
    }
  }

 private:
  void Exchange(const Communicators& group, Strategy strategy, Placement placement, int32_t rows,
                int rank) {
    Check(ExchangeAndMerge({.o = o_[rank].data(),
                            .lse = lse_[rank].data(),
                            .rows = rows,
                            .heads = flags_.heads,
                            .value_dim = flags_.head_dim,
                            .placement = placement,
                            .strategy = strategy,
                            .out = out_[rank].data()},
                           *group[rank], workspaces_[rank], Soon()),
          "exchange");
  }

  void Verify(const Communicators& group, Strategy strategy, Placement placement, int32_t rows) {
    std::vector<const float*> o, lse;
    for (int r = 0; r < flags_.ranks; ++r) {
      o.push_back(o_[r].data());
      lse.push_back(lse_[r].data());
    }
    const ReferenceResult want = ReferenceMerge(
        {.o = o, .lse = lse, .rows = rows, .heads = flags_.heads, .value_dim = flags_.head_dim});
    OnEveryRank(flags_.ranks, [&](int r) {
      std::fill(out_[r].begin(), out_[r].end(), NAN);
      Exchange(group, strategy, placement, rows, r);
      const bool gathered = placement == Placement::kGathered;
      const HeadSlice slice = gathered ? HeadSlice{0, r == 0 ? flags_.heads : 0}
                                       : SliceOfRank(flags_.heads, flags_.ranks, r);
      const size_t dim = flags_.head_dim;
      for (size_t i = 0; i < rows * slice.count * dim; ++i) {
        const size_t unit = i / dim;
        const size_t pair = unit / slice.count * flags_.heads + slice.begin + unit % slice.count;
        if (!(std::abs(out_[r][i] - want.o[pair * dim + i % dim]) <= 1e-5)) {
          std::fprintf(stderr, "%s %s, %d rows: wrong on rank %d\n", Name(strategy),
                       Name(placement), rows, r);
          std::exit(1);
        }
      }
    });
  }

  // Microseconds.
  double Time(const Communicators& group, Strategy strategy, Placement placement, int32_t rows) {
    std::vector<std::vector<double>> times(flags_.ranks);
    std::barrier<> together(flags_.ranks);
    bool enough = false;  // written by rank 0 between two barriers
    OnEveryRank(flags_.ranks, [&](int r) {
      const Clock::time_point start = Clock::now();
      for (int i = -kWarmUps;; ++i) {
        if (r == 0) {
          enough = i >= kMost || (i >= kFewest && Clock::now() - start > kTimePerFigure);
        }
        together.arrive_and_wait();
        if (enough) break;
        const Clock::time_point begin = Clock::now();
        Exchange(group, strategy, placement, rows, r);
        const std::chrono::duration<double, std::micro> took = Clock::now() - begin;
        if (i >= 0) times[r].push_back(took.count());
        together.arrive_and_wait();
      }
    });
    std::vector<double> slowest = times[0];
    for (size_t i = 0; i < slowest.size(); ++i) {
      for (const auto& of_rank : times) slowest[i] = std::max(slowest[i], of_rank[i]);
    }
    const size_t which = flags_.least ? 0 : slowest.size() / 2;
    std::nth_element(slowest.begin(), slowest.begin() + which, slowest.end());
    return slowest[which];
  }

  const Flags flags_;
  std::vector<ExchangeWorkspace> workspaces_;
  std::vector<std::vector<float>> o_, lse_, out_;
};

int Main(int argc, char** argv) {
  const Flags flags = ParseFlags(argc, argv);
  std::printf(
      "%d ranks as threads on %u cores; %d heads of %d, f32; us, slowest rank, %s; "
      "* is what auto takes\n",
      flags.ranks, std::thread::hardware_concurrency(), flags.heads, flags.head_dim,
      flags.least ? "least" : "median");
  std::printf("%-32s", "rows");
  for (const int32_t rows : flags.rows) std::printf(" %9d ", rows);
  std::printf("\n");
  std::vector<Way> ways;
  ways.push_back({"in_process", CreateInProcessGroup(flags.ranks, 1)});
  for (const auto& [name, transport] :
       {std::pair("gloo", Transport::kGloo), std::pair("tls", Transport::kTls)}) {
    Communicators ranks = ConnectBy(transport, flags.ranks);
    if (ranks.empty()) {
      std::printf("%-11s skipped: this build does not have it\n", name);
    } else {
      ways.push_back({name, std::move(ranks)});
    }
  }
  Bench(flags).Run(ways);
  for (Way& way : ways) OnEveryRank(flags.ranks, [&](int r) { way.ranks[r].reset(); });
  return 0;
}

}  // namespace
}  // namespace tributary::collective

int main(int argc, char** argv) { return tributary::collective::Main(argc, argv); }
