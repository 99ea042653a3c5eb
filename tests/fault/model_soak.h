// Hosts whose calls are drawn at random and checked against a model, and faults that follow from a
// seed, on a coordinator with a journal and workers that keep replicas.
//
// What is asserted: no answer is wrong; no token that was acknowledged is lost by any single fault;
// every call ends by its deadline; after each fault the service becomes whole again while hosts go
// on; at the end all pages are free, and the coordinator holds no more descriptors than at first.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/fault/fault_plan.h"
#include "tests/fault/fleet.h"
#include "tests/fault/link.h"
#include "tests/fault/machine.h"
#include "tests/fault/random_host.h"

namespace tributary::test {

struct ModelSoakOptions {
  uint64_t seed = 1;
  int hosts = 3;
  int faults = 0;                      // how many; 0: as many as come within `duration`
  std::chrono::seconds duration{600};  // where `faults` is 0
  std::vector<FaultKind> kinds;        // those that the machine does not permit are left out
};

// The directory of the journal, made before the fleet that is told of it.
class JournalDirectory {
 protected:
  JournalDirectory();
  ~JournalDirectory();
  // Makes it a small file system of its own, which needs root's rights. Why not, if it cannot be.
  std::string MakeSmallDisk();
  // Takes all space that the disk has left, or gives it back.
  void FillDisk();
  void EmptyDisk();

  TemporaryDirectory state_;

 private:
  bool mounted_ = false;
};

class ModelSoak : protected JournalDirectory, public Fleet {
 protected:
  static constexpr int kWorkers = 4;      // when no fault is under way
  static constexpr int kMostWorkers = 6;  // while their number changes

  ModelSoak();
  ~ModelSoak() override;

  void SetUp() override;
  // The whole soak.
  void Soak(const ModelSoakOptions& options);
  // A table of what was done; after Soak.
  void PrintCounts() const;

  std::string CoordinatorAddress(int rank) const override;
  Launcher CoordinatorLauncher() const override { return clock_.launcher(); }
  Launcher WorkerLauncher(int rank) const override { return peers_.launcher(rank); }
  std::string WorkerHost(int rank) const override { return peers_.host(rank); }

 private:
  // Leaves out what cannot be done here, and says why.
  std::vector<FaultKind> Possible(const std::vector<FaultKind>& kinds);
  void Inject(const Fault& fault);
  void KillWorker(int rank);
  void StopWorker(int rank, Build build);
  void EndCoordinator(int signal);
  void RollingRestart();
  void SpoilJournal(const Fault& fault);
  void PressMemory();
  void Resize(const Fault& fault);
  // Asks for so many workers. Those of the build before cannot do it.
  grpc::Status AskFor(int workers);
  // Until the group serves and every page has its replica.
  bool WaitWhole();
  // Until every host has done so much more.
  bool WaitForHosts(int64_t more);

  PeerNetwork peers_{kMostWorkers};
  MovableClock clock_;
  std::vector<std::unique_ptr<Link>> links_;  // by rank
  std::vector<std::unique_ptr<RandomHost>> hosts_;
  std::vector<std::thread> threads_;
  std::atomic<bool> stop_ = false;
  std::array<int64_t, kFaultKinds> injected_{};
  std::vector<Build> builds_;  // by rank
  std::chrono::milliseconds longest_recovery_{0};
};

}  // namespace tributary::test
