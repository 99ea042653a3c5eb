#include "service/journal/journal.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/process/random_id.h"
#include "base/status/errors.h"
#include "base/status/status_macros.h"

namespace tributary::service {
namespace {

constexpr char kField[] = "state_dir";
// Raised by a change that an older build would misread.
constexpr int64_t kFormat = 1;
// By this number in its header a file is known as a journal: "Trib". Never change it. Earlier
// builds left 0 there, or one of the numbers below 1000 with which they tried whether the disk
// takes anything.
constexpr int64_t kApplicationId = 0x54726962;
constexpr int64_t kEarlierApplicationIds = 1000;

constexpr char kTables[] =
    "CREATE TABLE group_identity (one INTEGER PRIMARY KEY CHECK (one = 1), group_id INTEGER NOT "
    "NULL, ranks INTEGER NOT NULL, epoch INTEGER NOT NULL, formed_epoch INTEGER NOT NULL);"
    "CREATE TABLE holders (rank INTEGER PRIMARY KEY, instance INTEGER NOT NULL);"
    "CREATE TABLE caches (name TEXT PRIMARY KEY, owner TEXT NOT NULL, first_id INTEGER NOT NULL, "
    "spec BLOB NOT NULL);";

// Builds that know nothing of leases leave the table alone, so it is added where it is missing.
constexpr char kLeaseTable[] =
    "CREATE TABLE IF NOT EXISTS leases (cache TEXT NOT NULL, sequence INTEGER NOT NULL, lease TEXT "
    "NOT NULL, PRIMARY KEY (cache, sequence)) WITHOUT ROWID";

// Of no use but to show whether the disk takes anything.
constexpr char kTryTable[] =
    "CREATE TABLE IF NOT EXISTS disk_tries (one INTEGER PRIMARY KEY, number INTEGER NOT NULL)";

constexpr std::chrono::milliseconds kTryAgain{100};
// Leases that are owed to a full disk: some tens of megabytes.
constexpr size_t kMostOwedLeases = 100'000;

// Beyond this, the number of ranks of a journal is not one that anybody wrote.
constexpr uint64_t kMostRanks = 65'536;

// SQLite's integers have a sign; ids use all 64 bits.
SqlValue Number(uint64_t value) { return static_cast<int64_t>(value); }

std::optional<uint64_t> ReadNumber(const SqlValue& value) {
  const auto* number = std::get_if<int64_t>(&value);
  if (number == nullptr) return std::nullopt;
  return static_cast<uint64_t>(*number);
}

std::string LeaseKey(const std::string& cache, worker::SequenceId sequence) {
  return absl::StrCat("lease/", sequence, "/", cache);
}

std::string MarkStatement() { return absl::StrCat("PRAGMA application_id = ", kApplicationId); }

absl::Status Misread() { return absl::DataLossError("a row is not what it should be"); }

// Why the files that are there, which SQLite has not opened yet, will turn out to hold no group if
// they hold none. Empty when there are none.
std::string WhyNoGroup(const std::string& path) {
  const auto bytes = [](const std::string& file) -> uintmax_t {
    std::error_code none;
    const uintmax_t size = std::filesystem::file_size(file, none);
    return none ? 0 : size;
  };
  std::error_code unknown;
  const bool there = std::filesystem::exists(path, unknown);
  if (there && bytes(path) > 0) {
    return absl::StrCat("it holds no group: it was made and not filled, or its log ", path,
                        "-wal has been lost or cut off");
  }
  if (bytes(path + "-wal") > 0) {
    return absl::StrCat(there ? "it is empty" : "it is missing", ", and its log ", path,
                        "-wal is of no use without it");
  }
  return there ? "it is empty" : "";
}

// Moves the files of a journal out of the way, under the first name that is free.
absl::Status PutAside(const std::string& path) {
  std::error_code failed;
  std::string aside;
  for (int n = 1; aside.empty() || std::filesystem::exists(aside); ++n) {
    aside = absl::StrCat(path, ".damaged-", n);
  }
  for (const char* suffix : {"", "-wal", "-shm"}) {
    if (!std::filesystem::exists(path + suffix)) continue;
    std::filesystem::rename(path + suffix, aside + suffix, failed);
    if (failed) return FieldError(absl::StatusCode::kUnavailable, kField, failed.message());
  }
  return absl::OkStatus();
}

}  // namespace

Journal::Journal(std::shared_ptr<const telemetry::Logger> log)
    : log_(std::move(log)), owed_(kMostOwedLeases) {}

absl::StatusOr<std::shared_ptr<Journal>> Journal::Open(
    const std::string& directory, int ranks, std::shared_ptr<const telemetry::Logger> log) {
  std::shared_ptr<Journal> journal(new Journal(std::move(log)));
  TRIBUTARY_RETURN_IF_ERROR(journal->Lock(directory));
  const std::string path = absl::StrCat(directory, "/journal.db");
  absl::Status loaded = journal->Load(path, ranks);
  if (absl::IsDataLoss(loaded)) {
    journal->log_->Error("the journal cannot be read and is put aside: the group begins anew",
                         {{"file", path}, {"error", loaded.message()}});
    journal->database_.reset();
    TRIBUTARY_RETURN_IF_ERROR(PutAside(path));
    loaded = journal->Load(path, ranks);
  }
  if (!loaded.ok()) return FieldError(loaded.code(), kField, loaded.message());
  journal->thread_ = std::thread([journal = journal.get()] { journal->Loop(); });
  return journal;
}

Journal::~Journal() {
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  if (thread_.joinable()) thread_.join();
  database_.reset();
  if (lock_file_ >= 0) close(lock_file_);
}

absl::Status Journal::Lock(const std::string& directory) {
  const std::string path = absl::StrCat(directory, "/lock");
  lock_file_ = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (lock_file_ < 0) {
    return FieldError(absl::StatusCode::kUnavailable, kField,
                      absl::StrCat(path, ": ", std::strerror(errno)));
  }
  if (flock(lock_file_, LOCK_EX | LOCK_NB) == 0) return absl::OkStatus();
  return FieldError(absl::StatusCode::kFailedPrecondition, kField,
                    absl::StrCat("another coordinator uses ", directory));
}

absl::Status Journal::Load(const std::string& path, int ranks) {
  const std::string why_none = WhyNoGroup(path);
  TRIBUTARY_ASSIGN_OR_RETURN(Sqlite database, Sqlite::Open(path));
  database_ = std::make_unique<Sqlite>(std::move(database));
  // The directory is ours alone, so the index of the WAL need not be shared with anybody.
  TRIBUTARY_RETURN_IF_ERROR(database_->Execute("PRAGMA locking_mode=EXCLUSIVE"));
  TRIBUTARY_ASSIGN_OR_RETURN(bool marked, CheckOurs(path));
  TRIBUTARY_RETURN_IF_ERROR(
      database_->Execute("PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;"));
  TRIBUTARY_ASSIGN_OR_RETURN(const std::vector<SqlRow> checked,
                             database_->Query("PRAGMA quick_check"));
  if (checked.empty() || checked.front() != SqlRow{std::string("ok")}) {
    return absl::DataLossError("its pages are damaged");
  }
  TRIBUTARY_ASSIGN_OR_RETURN(const std::vector<SqlRow> version,
                             database_->Query("PRAGMA user_version"));
  if (version.empty()) return Misread();
  const int64_t format = static_cast<int64_t>(ReadNumber(version.front().front()).value_or(0));
  if (format == 0) {
    TRIBUTARY_RETURN_IF_ERROR(MakeTables());
    marked = true;
  } else if (format != kFormat) {
    return absl::DataLossError(absl::StrCat("its format is ", format, ", this build's ", kFormat));
  }
  TRIBUTARY_RETURN_IF_ERROR(database_->Execute(kLeaseTable));
  TRIBUTARY_RETURN_IF_ERROR(LoadGroup(path, why_none, ranks));
  // Who the group is should not hang on the WAL, which somebody may take for a leftover. A full
  // disk holds up neither this nor the mark, which are tried again at the next start.
  absl::Status moved;
  if (!marked) moved = database_->Execute(MarkStatement().c_str());
  if (moved.ok()) moved = database_->Execute("PRAGMA wal_checkpoint(TRUNCATE)");
  if (!moved.ok()) {
    log_->Warning("what the journal's log holds could not be moved into the journal",
                  {{"file", path}, {"error", moved.message()}});
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> Journal::CheckOurs(const std::string& path) {
  // What is not ours is closed as it was found, its log included.
  database_->LeaveLogAtClose(true);
  TRIBUTARY_ASSIGN_OR_RETURN(const std::vector<SqlRow> ids,
                             database_->Query("PRAGMA application_id"));
  if (ids.empty()) return Misread();
  const auto* id = std::get_if<int64_t>(&ids.front().front());
  if (id == nullptr) return Misread();
  if (*id != kApplicationId) {
    TRIBUTARY_ASSIGN_OR_RETURN(const std::vector<SqlRow> tables,
                               database_->Query("SELECT name FROM sqlite_master"));
    TRIBUTARY_ASSIGN_OR_RETURN(
        const std::vector<SqlRow> ours,
        database_->Query("SELECT name FROM sqlite_master WHERE type = 'table' AND name IN "
                         "('group_identity', 'holders', 'caches')"));
    const bool earlier = *id >= 0 && *id < kEarlierApplicationIds && ours.size() == 3;
    const bool fresh = *id == 0 && tables.empty();
    if (!earlier && !fresh) {
      return absl::InvalidArgumentError(
          absl::StrCat(path,
                       " is the database of another program, and is left as it is: name a "
                       "directory of the coordinator's own, or move the file away"));
    }
  }
  database_->LeaveLogAtClose(false);
  return *id == kApplicationId;
}

absl::Status Journal::MakeTables() {
  TRIBUTARY_RETURN_IF_ERROR(database_->Execute("BEGIN"));
  TRIBUTARY_RETURN_IF_ERROR(database_->Execute(kTables));
  TRIBUTARY_RETURN_IF_ERROR(database_->Execute(MarkStatement().c_str()));
  TRIBUTARY_RETURN_IF_ERROR(
      database_->Execute(absl::StrCat("PRAGMA user_version = ", kFormat).c_str()));
  return database_->Execute("COMMIT");
}

absl::Status Journal::LoadGroup(const std::string& path, const std::string& why_none, int ranks) {
  TRIBUTARY_ASSIGN_OR_RETURN(
      const std::vector<SqlRow> groups,
      database_->Query("SELECT group_id, ranks, epoch, formed_epoch FROM group_identity"));
  if (groups.empty()) return BeginGroup(path, why_none, ranks);
  const SqlRow& row = groups.front();
  const auto group_id = ReadNumber(row[0]);
  const auto of_ranks = ReadNumber(row[1]);
  const auto epoch = ReadNumber(row[2]);
  const auto formed = ReadNumber(row[3]);
  if (!group_id || !of_ranks || !epoch || !formed || *group_id == 0) return Misread();
  if (*of_ranks != static_cast<uint64_t>(ranks)) {
    if (*of_ranks == 0 || *of_ranks > kMostRanks) return Misread();
    log_->Warning(
        "the group goes on with the number of workers that it has, and is to change to "
        "--workers when those are there",
        {{"workers", *of_ranks}, {"flag", ranks}});
    ranks = static_cast<int>(*of_ranks);
  }
  identity_ = {.group_id = *group_id, .epoch = *epoch, .formed_epoch = *formed, .holders = {}};
  identity_.holders.resize(static_cast<size_t>(ranks));
  TRIBUTARY_ASSIGN_OR_RETURN(const std::vector<SqlRow> holders,
                             database_->Query("SELECT rank, instance FROM holders"));
  for (const SqlRow& holder : holders) {
    const auto rank = ReadNumber(holder[0]);
    const auto instance = ReadNumber(holder[1]);
    if (!rank || !instance) return Misread();
    // Ranks of a larger group that there was, or was about to be.
    if (*rank >= identity_.holders.size()) continue;
    identity_.holders[*rank] = *instance;
  }
  return LoadCaches();
}

absl::Status Journal::LoadCaches() {
  TRIBUTARY_ASSIGN_OR_RETURN(const std::vector<SqlRow> rows,
                             database_->Query("SELECT name, owner, first_id, spec FROM caches"));
  caches_.clear();
  for (const SqlRow& row : rows) {
    JournaledCache cache;
    const auto* name = std::get_if<std::string>(&row[0]);
    const auto* owner = std::get_if<std::string>(&row[1]);
    const auto first_id = ReadNumber(row[2]);
    const auto* spec = std::get_if<Blob>(&row[3]);
    if (name == nullptr || owner == nullptr || !first_id || spec == nullptr ||
        !cache.spec.ParseFromString(spec->bytes)) {
      return Misread();
    }
    cache.name = *name;
    cache.owner = *owner;
    cache.first_id = static_cast<worker::CacheId>(*first_id);
    caches_.push_back(std::move(cache));
  }
  return LoadLeases();
}

absl::Status Journal::LoadLeases() {
  TRIBUTARY_ASSIGN_OR_RETURN(const std::vector<SqlRow> rows,
                             database_->Query("SELECT cache, sequence, lease FROM leases"));
  leases_.clear();
  for (const SqlRow& row : rows) {
    const auto* cache = std::get_if<std::string>(&row[0]);
    const auto sequence = ReadNumber(row[1]);
    const auto* lease = std::get_if<std::string>(&row[2]);
    if (cache == nullptr || !sequence || lease == nullptr) return Misread();
    leases_.push_back({.cache = *cache, .sequence = *sequence, .lease = *lease});
  }
  return absl::OkStatus();
}

absl::Status Journal::BeginGroup(const std::string& path, const std::string& why_none, int ranks) {
  if (!why_none.empty()) {
    log_->Warning(
        "a new group begins, since the journal holds none: sequences and caches of an earlier one "
        "are not found",
        {{"file", path}, {"why", why_none}});
  }
  identity_ = {.group_id = RandomId(), .epoch = 0, .formed_epoch = 0, .holders = {}};
  identity_.holders.resize(static_cast<size_t>(ranks));
  caches_.clear();
  leases_.clear();
  TRIBUTARY_RETURN_IF_ERROR(
      database_->Execute("BEGIN; DELETE FROM group_identity; DELETE FROM holders; "
                         "DELETE FROM caches; DELETE FROM leases;"));
  TRIBUTARY_RETURN_IF_ERROR(
      database_->Run("INSERT INTO group_identity VALUES (1, ?, ?, 0, 0)",
                     {Number(identity_.group_id), static_cast<int64_t>(ranks)}));
  return database_->Execute("COMMIT");
}

// ---------------------------------------------------------------------------------------- writing

void Journal::OnEpoch(uint64_t epoch) {
  EnqueueAndWait({{.sql = "UPDATE group_identity SET epoch = ?",
                   .parameters = {Number(epoch)},
                   .key = "epoch"}});
}

void Journal::OnFormed(uint64_t epoch, const std::vector<uint64_t>& holders) {
  std::vector<JournalWrite> writes;
  writes.push_back({.sql = "UPDATE group_identity SET formed_epoch = ?",
                    .parameters = {Number(epoch)},
                    .key = "formed"});
  for (size_t rank = 0; rank < holders.size(); ++rank) {
    writes.push_back({.sql = "INSERT OR REPLACE INTO holders VALUES (?, ?)",
                      .parameters = {static_cast<int64_t>(rank), Number(holders[rank])},
                      .key = absl::StrCat("holder/", rank)});
  }
  EnqueueAndWait(std::move(writes));
}

JournalWrite Journal::WriteOf(const JournaledCache& cache) {
  return {.sql = "INSERT OR REPLACE INTO caches VALUES (?, ?, ?, ?)",
          .parameters = {cache.name, cache.owner, static_cast<int64_t>(cache.first_id),
                         Blob{cache.spec.SerializeAsString()}}};
}

void Journal::PutCache(const JournaledCache& cache, Done done) {
  JournalWrite write = WriteOf(cache);
  write.key = absl::StrCat("cache/", cache.name);
  write.done = std::move(done);
  Enqueue({std::move(write)});
}

void Journal::ChangeRanks(int ranks, const std::vector<JournaledCache>& caches, Done done) {
  std::vector<JournalWrite> writes;
  for (const JournaledCache& cache : caches) writes.push_back(WriteOf(cache));
  writes.push_back({.sql = "DELETE FROM holders WHERE rank >= ?", .parameters = {int64_t{ranks}}});
  writes.push_back({.sql = "UPDATE group_identity SET ranks = ?",
                    .parameters = {int64_t{ranks}},
                    .done = std::move(done)});
  Enqueue(std::move(writes));
}

void Journal::DropCache(const std::string& name, Done done) {
  std::vector<JournalWrite> writes;
  writes.push_back({.sql = "DELETE FROM leases WHERE cache = ?",
                    .parameters = {name},
                    .key = absl::StrCat("leases-of/", name)});
  writes.push_back({.sql = "DELETE FROM caches WHERE name = ?",
                    .parameters = {name},
                    .key = absl::StrCat("cache/", name),
                    .done = std::move(done)});
  Enqueue(std::move(writes));
}

void Journal::PutLeases(const std::vector<JournaledLease>& leases, Done done) {
  std::vector<JournalWrite> writes;
  for (const JournaledLease& lease : leases) {
    writes.push_back({.sql = "INSERT OR REPLACE INTO leases VALUES (?, ?, ?)",
                      .parameters = {lease.cache, Number(lease.sequence), lease.lease},
                      .key = LeaseKey(lease.cache, lease.sequence),
                      .dispensable = true});
  }
  writes.back().done = std::move(done);
  Enqueue(std::move(writes));
}

void Journal::DropLease(const std::string& cache, worker::SequenceId sequence) {
  Enqueue({{.sql = "DELETE FROM leases WHERE cache = ? AND sequence = ?",
            .parameters = {cache, Number(sequence)},
            .key = LeaseKey(cache, sequence),
            .dispensable = true}});
}

void Journal::Flush() { EnqueueAndWait({{.sql = "SELECT 1"}}); }

void Journal::Enqueue(std::vector<JournalWrite> writes) {
  const MutexLock lock(mutex_);
  for (JournalWrite& write : writes) queue_.push_back(std::move(write));
  changed_.NotifyAll();
}

void Journal::EnqueueAndWait(std::vector<JournalWrite> writes) {
  struct Answer {
    Mutex mutex;
    CondVar given;
    bool done TRIBUTARY_GUARDED_BY(mutex) = false;
  };
  const auto answer = std::make_shared<Answer>();
  writes.back().done = [answer](const absl::Status&) {
    const MutexLock lock(answer->mutex);
    answer->done = true;
    answer->given.NotifyAll();
  };
  Enqueue(std::move(writes));
  const MutexLock lock(answer->mutex);
  while (!answer->done) answer->given.Wait(answer->mutex);
}

void Journal::Loop() {
  for (;;) {
    std::deque<JournalWrite> writes;
    bool stopping = false;
    {
      const MutexLock lock(mutex_);
      const auto again = std::chrono::steady_clock::now() + kTryAgain;
      while (queue_.empty() && !stopping_) {
        if (owed_.empty()) {
          changed_.Wait(mutex_);
        } else if (!changed_.WaitUntil(mutex_, again)) {
          break;
        }
      }
      stopping = stopping_ && queue_.empty();
      writes.swap(queue_);
    }
    if (!writes.empty() || !owed_.empty()) WriteAll(writes);
    if (!stopping) continue;
    if (!owed_.empty()) {
      log_->Error("stops without having been able to write to the journal",
                  {{"writes", owed_.writes().size()}});
    }
    return;
  }
}

void Journal::WriteAll(const std::deque<JournalWrite>& writes) {
  const size_t owed = owed_.writes().size();
  absl::Status status;
  if (owed > 0) status = TryDisk();
  if (status.ok()) status = Commit(writes);
  if (status.ok()) {
    owed_.Clear();
    if (owed > 0) log_->Info("the journal has what could not be written", {{"writes", owed}});
  } else if (!writes.empty()) {
    owed_.Add(writes);
    log_->Error(
        "not written to the journal: a restart will not find it unless it can be written until "
        "then",
        {{"writes", writes.size()}, {"error", status.message()}});
  }
  for (const JournalWrite& write : writes) {
    if (write.done) write.done(status);
  }
}

// What is owed may be much. A number that nobody reads shows whether the disk takes anything.
absl::Status Journal::TryDisk() {
  TRIBUTARY_RETURN_IF_ERROR(database_->Execute(kTryTable));
  return database_->Run("INSERT OR REPLACE INTO disk_tries VALUES (1, ?)", {int64_t{++tries_}});
}

absl::Status Journal::Commit(const std::deque<JournalWrite>& writes) {
  TRIBUTARY_RETURN_IF_ERROR(database_->Execute("BEGIN"));
  absl::Status status;
  const auto run = [&](const JournalWrite& write) {
    if (status.ok()) status = database_->Run(write.sql, write.parameters);
  };
  for (const auto& [number, write] : owed_.writes()) run(write);
  for (const JournalWrite& write : writes) run(write);
  if (status.ok()) status = database_->Execute("COMMIT");
  if (!status.ok()) database_->Execute("ROLLBACK").IgnoreError();
  return status;
}

}  // namespace tributary::service
