// What outlives the coordinator's process: its group's identity, and its caches.
//
// A thread of the journal's own writes, and commits together whatever has come meanwhile. Each
// commit is on disk (fsync) before anybody is told so. What a full disk does not take is tried
// again until the disk takes it. A restart before then does not find it.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/sync/mutex.h"
#include "base/telemetry/log.h"
#include "service/journal/owed_writes.h"
#include "service/journal/sqlite.h"
#include "service/workers/group_store.h"
#include "tributary/v1/types.pb.h"
#include "worker/command.h"

namespace tributary::service {

struct JournaledCache {
  std::string name;
  std::string owner;             // the client that created it
  worker::CacheId first_id = 0;  // of its groups of layers
  v1::CacheSpec spec;            // as it was asked for
};

// What a sequence with a lease belongs to (service/schedule/leases.h). The workers keep sequences,
// and know nothing of leases.
struct JournaledLease {
  std::string cache;
  worker::SequenceId sequence = 0;
  std::string lease;
};

// Thread safe.
class Journal final : public GroupStore {
 public:
  // Takes the directory, which must exist, for this process alone, and reads what an earlier one
  // left there. A new group has `ranks`; one that there is keeps its own number, and the log says
  // so where it is another. A journal that is damaged or of a newer build is put aside, which the
  // log says, and the group begins anew: what cannot be read is not guessed. The log says so, too,
  // where there are files of a journal without a group in them. kFailedPrecondition: another
  // coordinator has the directory. kInvalidArgument: the file is somebody else's database, which
  // stays as it is. Errors name the field "state_dir".
  static absl::StatusOr<std::shared_ptr<Journal>> Open(
      const std::string& directory, int ranks, std::shared_ptr<const telemetry::Logger> log);
  ~Journal() override;

  // As an earlier process left them.
  int ranks() const { return static_cast<int>(identity_.holders.size()); }
  const GroupIdentity& identity() const { return identity_; }
  const std::vector<JournaledCache>& caches() const { return caches_; }
  const std::vector<JournaledLease>& leases() const { return leases_; }

  void OnEpoch(uint64_t epoch) override;
  void OnFormed(uint64_t epoch, const std::vector<uint64_t>& holders) override;

  // Called from any thread, with any lock held; `done` is called on the journal's thread, once,
  // with what became of the first try.
  using Done = std::function<void(const absl::Status&)>;
  void PutCache(const JournaledCache& cache, Done done);
  // From now on the group has so many ranks, and these caches take the place of those of their
  // names. After a failure nothing has changed, and it is not tried again.
  void ChangeRanks(int ranks, const std::vector<JournaledCache>& caches, Done done);
  // Its sequences go with it.
  void DropCache(const std::string& name, Done done);
  // The sequences belong to these leases from now on; at least one.
  void PutLeases(const std::vector<JournaledLease>& leases, Done done);
  // A sequence is gone, or belongs to no lease any more.
  void DropLease(const std::string& cache, worker::SequenceId sequence);
  // Returns when everything that was asked for has been done, and its `done` called.
  void Flush();

 private:
  static JournalWrite WriteOf(const JournaledCache& cache);

  explicit Journal(std::shared_ptr<const telemetry::Logger> log);

  absl::Status Lock(const std::string& directory);
  // What is in the file, or how it begins. kDataLoss: it cannot be read.
  absl::Status Load(const std::string& path, int ranks);
  // Whether the open database has the mark by which it is known as a journal: those of earlier
  // builds lack it, and an empty file does. kInvalidArgument: it is no journal. Changes nothing.
  absl::StatusOr<bool> CheckOurs(const std::string& path);
  // The tables of this format, and the mark.
  absl::Status MakeTables();
  // `why_none`: see BeginGroup.
  absl::Status LoadGroup(const std::string& path, const std::string& why_none, int ranks);
  absl::Status LoadCaches();
  absl::Status LoadLeases();
  // `why_none`: why the files that were there hold no group; empty when there were none.
  absl::Status BeginGroup(const std::string& path, const std::string& why_none, int ranks);
  void Enqueue(std::vector<JournalWrite> writes);
  void EnqueueAndWait(std::vector<JournalWrite> writes);
  void Loop();
  // Writes these, and before them what is owed; keeps what fails and has a key.
  void WriteAll(const std::deque<JournalWrite>& writes);
  absl::Status TryDisk();
  absl::Status Commit(const std::deque<JournalWrite>& writes);

  const std::shared_ptr<const telemetry::Logger> log_;
  int lock_file_ = -1;
  GroupIdentity identity_;
  std::vector<JournaledCache> caches_;
  std::vector<JournaledLease> leases_;
  // The thread's, once that runs.
  std::unique_ptr<Sqlite> database_;
  OwedWrites owed_;
  uint32_t tries_ = 0;

  Mutex mutex_;
  CondVar changed_;
  std::deque<JournalWrite> queue_ TRIBUTARY_GUARDED_BY(mutex_);
  bool stopping_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace tributary::service
