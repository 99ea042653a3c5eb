// Groups of ranks as threads of the test, over any communicator.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "collective/communicator.h"
#include "collective/in_process.h"
#include "collective/rendezvous/memory_rendezvous.h"
#include "collective/transport/transport.h"

namespace tributary::collective {

enum class Kind { kInProcess, kGloo, kTls };

inline const char* Name(Kind kind) {
  return kind == Kind::kInProcess ? "InProcess" : kind == Kind::kGloo ? "Gloo" : "Tls";
}

// Of the kinds whose ranks may be processes.
inline Transport TransportOf(Kind kind) {
  return kind == Kind::kTls ? Transport::kTls : Transport::kGloo;
}

inline Deadline After(std::chrono::milliseconds d) { return std::chrono::steady_clock::now() + d; }

// For operations that are expected to end by themselves.
inline Deadline Far() { return After(std::chrono::minutes(2)); }

inline std::string Text(const Status& s) {
  return s.ok() ? "OK" : std::to_string(static_cast<int>(s.code())) + ": " + s.message();
}

using Group = std::vector<std::unique_ptr<Communicator>>;

// Runs body(rank) on one thread per rank and waits for all.
inline void OnEveryRank(int size, const std::function<void(int rank)>& body) {
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) threads.emplace_back([&body, r] { body(r); });
  for (std::thread& t : threads) t.join();
}

inline Group MakeGroup(Kind kind, int size, uint64_t epoch = 1) {
  if (kind == Kind::kInProcess) return CreateInProcessGroup(size, epoch);
  Group group(size);
  MemoryRendezvous rendezvous;
  OnEveryRank(size, [&](int rank) {
    const Status s =
        CreatePeerCommunicator(TransportOf(kind), {.rank = rank, .size = size, .epoch = epoch},
                               rendezvous, Far(), &group[rank]);
    EXPECT_TRUE(s.ok()) << Text(s);
  });
  return group;
}

// Leaves as ranks of a service do: each on its own thread.
inline void Destroy(Group& group) {
  OnEveryRank(static_cast<int>(group.size()), [&](int rank) { group[rank].reset(); });
}

struct GroupParam {
  Kind kind;
  int size;
};

inline void PrintTo(const GroupParam& p, std::ostream* out) {
  *out << Name(p.kind) << " x " << p.size;
}

inline std::string ParamName(const testing::TestParamInfo<GroupParam>& info) {
  return Name(info.param.kind) + std::to_string(info.param.size);
}

inline std::vector<GroupParam> AllGroups() {
  std::vector<GroupParam> params;
  for (const Kind kind : {Kind::kInProcess, Kind::kGloo, Kind::kTls}) {
    for (const int size : {1, 2, 3, 4, 8}) params.push_back({kind, size});
  }
  return params;
}

}  // namespace tributary::collective
