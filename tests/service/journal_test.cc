// What outlives the coordinator's process, and what becomes of a journal that is not as it was
// left.
#include "service/journal/journal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <future>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "base/status/errors.h"
#include "service/journal/owed_writes.h"
#include "service/journal/sqlite.h"
#include "tests/support/process.h"

namespace tributary::service {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::UnorderedElementsAre;

constexpr int kRanks = 2;

class JournalTest : public ::testing::Test {
 protected:
  absl::StatusOr<std::shared_ptr<Journal>> Open(int ranks = kRanks) {
    return Journal::Open(directory_.File("."), ranks, Log());
  }
  static std::shared_ptr<const telemetry::Logger> Log() {
    return std::make_shared<telemetry::Logger>(telemetry::LogLevel::kWarning,
                                               telemetry::LogFormat::kText);
  }
  std::shared_ptr<Journal> MustOpen(int ranks = kRanks) {
    auto journal = Open(ranks);
    EXPECT_TRUE(journal.ok()) << journal.status();
    return journal.ok() ? *std::move(journal) : nullptr;
  }
  static absl::Status Put(Journal& journal, const std::string& name, worker::CacheId id) {
    std::promise<absl::Status> written;
    v1::CacheSpec spec;
    spec.set_layers(static_cast<int32_t>(id));
    journal.PutCache({.name = name, .owner = "ann", .first_id = id, .spec = spec},
                     [&written](const absl::Status& status) { written.set_value(status); });
    return written.get_future().get();
  }
  static absl::Status Drop(Journal& journal, const std::string& name) {
    std::promise<absl::Status> written;
    journal.DropCache(name, [&written](const absl::Status& s) { written.set_value(s); });
    return written.get_future().get();
  }
  // A journal with something in it. Returns its group.
  uint64_t Fill() {
    const auto journal = MustOpen();
    journal->OnEpoch(5);
    journal->OnFormed(5, {11, ~uint64_t{0}});
    EXPECT_TRUE(Put(*journal, "model", 3).ok());
    return journal->identity().group_id;
  }
  std::string File() const { return directory_.File("./journal.db"); }
  void ExpectBegunAnew(uint64_t old_group) {
    const auto journal = MustOpen();
    ASSERT_NE(journal, nullptr);
    EXPECT_NE(journal->identity().group_id, old_group);
    EXPECT_EQ(journal->identity().epoch, 0u);
    EXPECT_THAT(journal->caches(), IsEmpty());
    EXPECT_TRUE(Put(*journal, "another", 1).ok()) << "it can be written to";
  }

  test::TemporaryDirectory directory_;
};

// As text: "cache/sequence=lease".
std::vector<std::string> LeasesOf(const Journal& journal) {
  std::vector<std::string> leases;
  for (const JournaledLease& lease : journal.leases()) {
    leases.push_back(lease.cache + "/" + std::to_string(lease.sequence) + "=" + lease.lease);
  }
  return leases;
}

TEST_F(JournalTest, LeasesAreFoundAgain) {
  Fill();
  {
    const auto journal = MustOpen();
    EXPECT_THAT(LeasesOf(*journal), IsEmpty());
    std::promise<absl::Status> written;
    journal->PutLeases({{"model", 1, "a"}, {"model", ~uint64_t{0}, "b"}, {"other", 1, "a"}},
                       [&written](const absl::Status& status) { written.set_value(status); });
    EXPECT_TRUE(written.get_future().get().ok());
    journal->PutLeases({{"model", 1, "c"}}, nullptr);
  }
  {
    const auto journal = MustOpen();
    EXPECT_THAT(LeasesOf(*journal),
                UnorderedElementsAre("model/1=c", "model/18446744073709551615=b", "other/1=a"));
    journal->DropLease("model", 1);
    EXPECT_TRUE(Drop(*journal, "other").ok());
  }
  EXPECT_THAT(LeasesOf(*MustOpen()), ElementsAre("model/18446744073709551615=b"));
}

TEST_F(JournalTest, WhatWasWrittenIsFoundAgain) {
  const uint64_t group = Fill();
  {
    const auto journal = MustOpen();
    EXPECT_EQ(journal->identity().group_id, group);
    EXPECT_EQ(journal->identity().epoch, 5u);
    EXPECT_EQ(journal->identity().formed_epoch, 5u);
    EXPECT_THAT(journal->identity().holders, ElementsAre(11, ~uint64_t{0}));
    ASSERT_THAT(journal->caches(), SizeIs(1));
    EXPECT_EQ(journal->caches()[0].name, "model");
    EXPECT_EQ(journal->caches()[0].owner, "ann");
    EXPECT_EQ(journal->caches()[0].first_id, 3u);
    EXPECT_EQ(journal->caches()[0].spec.layers(), 3);
    EXPECT_TRUE(Drop(*journal, "model").ok());
  }
  EXPECT_THAT(MustOpen()->caches(), IsEmpty());
}

TEST_F(JournalTest, ADirectoryIsOneCoordinators) {
  const auto journal = MustOpen();
  const absl::Status second = Open().status();
  EXPECT_EQ(second.code(), absl::StatusCode::kFailedPrecondition) << second;
  EXPECT_EQ(FieldOf(second), "state_dir");
}

TEST_F(JournalTest, ADirectoryThatIsNotThereIsAnError) {
  const auto opened = Journal::Open(directory_.File("none"), kRanks, Log());
  EXPECT_EQ(FieldOf(opened.status()), "state_dir");
}

TEST_F(JournalTest, AGroupKeepsItsNumberOfRanks) {
  const uint64_t group = Fill();
  const auto journal = MustOpen(kRanks + 1);
  EXPECT_EQ(journal->identity().group_id, group);
  EXPECT_EQ(journal->ranks(), kRanks);
}

TEST_F(JournalTest, TheNumberOfRanksChangesWithTheCaches) {
  Fill();
  std::vector<JournaledCache> caches;
  {
    const auto journal = MustOpen();
    caches = journal->caches();
    ASSERT_FALSE(caches.empty());
    // The group of the change has more ranks, and is not what counts.
    journal->OnFormed(8, {11, 12, 13, 14});
  }
  EXPECT_EQ(MustOpen()->ranks(), kRanks);
  {
    const auto journal = MustOpen();
    for (JournaledCache& cache : caches) cache.first_id += 100;
    absl::Status written = absl::UnknownError("");
    journal->ChangeRanks(4, caches, [&](const absl::Status& status) { written = status; });
    journal->Flush();
    EXPECT_TRUE(written.ok()) << written;
  }
  const auto journal = MustOpen();
  EXPECT_EQ(journal->ranks(), 4);
  EXPECT_THAT(journal->identity().holders, ElementsAre(11, 12, 13, 14));
  ASSERT_EQ(journal->caches().size(), caches.size());
  EXPECT_EQ(journal->caches().front().first_id, caches.front().first_id);
  EXPECT_EQ(journal->caches().front().name, caches.front().name);
}

TEST_F(JournalTest, GarbageIsPutAside) {
  const uint64_t group = Fill();
  std::ofstream(File(), std::ios::trunc) << std::string(100'000, 'x');
  ExpectBegunAnew(group);
  EXPECT_TRUE(std::filesystem::exists(File() + ".damaged-1")) << "for somebody to look at";
}

TEST_F(JournalTest, AJournalCutShortIsPutAside) {
  const uint64_t group = Fill();
  std::filesystem::resize_file(File(), std::filesystem::file_size(File()) / 2);
  ExpectBegunAnew(group);
}

TEST_F(JournalTest, ADamagedPageIsPutAside) {
  const uint64_t group = Fill();
  std::fstream file(File(), std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(4096 + 8);  // the second page: a table
  file << std::string(2000, '\xff');
  file.close();
  ExpectBegunAnew(group);
}

TEST_F(JournalTest, AJournalOfANewerBuildIsPutAside) {
  const uint64_t group = Fill();
  auto database = Sqlite::Open(File());
  ASSERT_TRUE(database.ok());
  ASSERT_TRUE(database->Execute("PRAGMA user_version = 1000").ok());
  database = absl::UnknownError("closed");
  ExpectBegunAnew(group);
}

// The end of the write-ahead log is what a crash may tear. What was committed before it stays.
TEST_F(JournalTest, ATornEndIsLeftOut) {
  uint64_t group = 0;
  {
    const auto journal = MustOpen();
    group = journal->identity().group_id;
    journal->OnEpoch(5);
    journal->OnEpoch(6);
    // As a crash leaves it: nothing is moved from the log into the database.
    for (const char* suffix : {"", "-wal"}) {
      std::filesystem::copy_file(File() + suffix, directory_.File("copy") + suffix);
    }
  }
  for (const char* suffix : {"", "-wal"}) {
    std::filesystem::copy_file(directory_.File("copy") + suffix, File() + suffix,
                               std::filesystem::copy_options::overwrite_existing);
  }
  std::filesystem::resize_file(File() + "-wal", std::filesystem::file_size(File() + "-wal") - 100);
  const auto journal = MustOpen();
  EXPECT_EQ(journal->identity().group_id, group);
  EXPECT_EQ(journal->identity().epoch, 5u) << "workers know of 6, and tell";
}

// Of a coordinator that dies now: the files as they are, under another name's directory.
TEST_F(JournalTest, AGroupIsInTheFileAsSoonAsItHasBegun) {
  const auto journal = MustOpen();
  std::filesystem::create_directory(directory_.File("copy"));
  std::filesystem::copy_file(File(), directory_.File("copy/journal.db"));
  testing::internal::CaptureStderr();
  const auto other = Journal::Open(directory_.File("copy"), kRanks, Log());
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_EQ((*other)->identity().group_id, journal->identity().group_id) << "without the WAL";
}

// Earlier builds left all that they wrote in the WAL.
TEST_F(JournalTest, WhatWasInTheLogAloneIsInTheFileAfterTheNextStart) {
  uint64_t group = 0;
  std::filesystem::create_directory(directory_.File("crashed"));
  const std::string crashed = directory_.File("crashed/journal.db");
  {
    const auto journal = MustOpen();
    group = journal->identity().group_id;
    journal->OnEpoch(5);
    for (const char* suffix : {"", "-wal"}) {
      std::filesystem::copy_file(File() + suffix, crashed + suffix);
    }
  }
  const auto next = Journal::Open(directory_.File("crashed"), kRanks, Log());
  ASSERT_TRUE(next.ok()) << next.status();
  std::filesystem::copy_file(crashed, directory_.File("copy.db"));
  auto copy = Sqlite::Open(directory_.File("copy.db"));
  ASSERT_TRUE(copy.ok()) << copy.status();
  const auto rows = copy->Query("SELECT epoch FROM group_identity");
  ASSERT_TRUE(rows.ok()) << rows.status();
  EXPECT_EQ(*rows, std::vector<SqlRow>{{int64_t{5}}});
  EXPECT_EQ((*next)->identity().group_id, group);
}

TEST_F(JournalTest, ANewGroupInOldFilesIsSaid) {
  const auto said = [&] {
    testing::internal::CaptureStderr();
    EXPECT_NE(MustOpen(), nullptr);
    return testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(said(), "") << "there was nothing";
  EXPECT_EQ(said(), "") << "the group goes on";

  std::filesystem::resize_file(File(), 0);
  std::string line = said();
  EXPECT_THAT(line, AllOf(HasSubstr("a new group begins"), HasSubstr(File()),
                          HasSubstr("why=it is empty\n")));
  EXPECT_EQ(said(), "");

  std::filesystem::resize_file(File(), 0);
  std::ofstream(File() + "-wal") << "what is left of a log";
  line = said();
  EXPECT_THAT(line, AllOf(HasSubstr("a new group begins"), HasSubstr("it is empty, and its log"),
                          HasSubstr(File() + "-wal")));

  std::filesystem::remove(File());
  std::ofstream(File() + "-wal") << "what is left of a log";
  EXPECT_THAT(said(), AllOf(HasSubstr("a new group begins"), HasSubstr("it is missing")));

  // As earlier builds left it when their WAL was lost: a header, and no table.
  std::filesystem::remove(File());
  {
    auto database = Sqlite::Open(File());
    ASSERT_TRUE(database.ok()) << database.status();
    ASSERT_TRUE(database->Execute("PRAGMA journal_mode=WAL").ok());
  }
  ASSERT_GT(std::filesystem::file_size(File()), 0u);
  EXPECT_THAT(said(), AllOf(HasSubstr("a new group begins"), HasSubstr("it holds no group"),
                            HasSubstr(File())));
}

std::string BytesOf(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// Whatever a refusal of it would have to say and leave alone.
void ExpectRefusedAsItIs(const std::string& file,
                         const absl::StatusOr<std::shared_ptr<Journal>>& opened,
                         const std::string& before) {
  EXPECT_EQ(opened.status().code(), absl::StatusCode::kInvalidArgument) << opened.status();
  EXPECT_EQ(FieldOf(opened.status()), "state_dir");
  EXPECT_THAT(std::string(opened.status().message()), HasSubstr(file));
  EXPECT_EQ(BytesOf(file), before) << "not a byte has changed";
}

TEST_F(JournalTest, AnotherProgramsDatabaseIsRefused) {
  for (const char* made : {"CREATE TABLE notes (text TEXT)",
                           "CREATE TABLE caches (name TEXT); PRAGMA user_version = 1",
                           "PRAGMA application_id = 77; CREATE TABLE notes (text TEXT)",
                           "PRAGMA application_id = 252006674; VACUUM",
                           "PRAGMA user_version = 12; CREATE TABLE notes (text TEXT)"}) {
    std::filesystem::remove(File());
    {
      auto database = Sqlite::Open(File());
      ASSERT_TRUE(database.ok()) << database.status();
      ASSERT_TRUE(database->Execute(made).ok()) << made;
    }
    const std::string before = BytesOf(File());
    ASSERT_NE(before, "") << made;
    ExpectRefusedAsItIs(File(), Open(), before);
    EXPECT_FALSE(std::filesystem::exists(File() + ".damaged-1")) << made;
  }
}

// Its owner has died, and what it wrote last is in the log.
TEST_F(JournalTest, AnotherProgramsLogIsLeftAloneToo) {
  {
    auto database = Sqlite::Open(directory_.File("theirs"));
    ASSERT_TRUE(database.ok()) << database.status();
    ASSERT_TRUE(database->Execute("PRAGMA journal_mode=WAL; CREATE TABLE notes (text TEXT)").ok());
    for (const char* suffix : {"", "-wal"}) {
      std::filesystem::copy_file(directory_.File("theirs") + suffix, File() + suffix);
    }
  }
  const std::string before = BytesOf(File());
  const std::string log_before = BytesOf(File() + "-wal");
  ASSERT_NE(log_before, "");
  ExpectRefusedAsItIs(File(), Open(), before);
  EXPECT_EQ(BytesOf(File() + "-wal"), log_before);
}

TEST_F(JournalTest, AJournalOfAnEarlierBuildIsTakenAndMarked) {
  const uint64_t group = Fill();
  const auto marked = [&](const char* statement) {
    auto database = Sqlite::Open(File());
    EXPECT_TRUE(database.ok()) << database.status();
    EXPECT_TRUE(database->Execute(statement).ok());
    const auto rows = database->Query("PRAGMA application_id");
    return rows.ok() ? std::get<int64_t>((*rows)[0][0]) : -1;
  };
  EXPECT_EQ(marked("SELECT 1"), 0x54726962);
  // With 17, an earlier build tried whether the disk takes anything.
  for (const char* earlier : {"PRAGMA application_id = 0", "PRAGMA application_id = 17"}) {
    EXPECT_LT(marked(earlier), 1000);
    EXPECT_EQ(MustOpen()->identity().group_id, group);
    EXPECT_EQ(marked("SELECT 1"), 0x54726962) << earlier;
  }
}

// Within its life no file of this process grows beyond so many bytes, as on a disk that is full.
class FullDisk {
 public:
  explicit FullDisk(uint64_t bytes) : before_(std::signal(SIGXFSZ, SIG_IGN)) {
    getrlimit(RLIMIT_FSIZE, &limit_);
    const rlimit low = {.rlim_cur = bytes, .rlim_max = limit_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &low);
  }
  ~FullDisk() {
    setrlimit(RLIMIT_FSIZE, &limit_);
    std::signal(SIGXFSZ, before_);
  }
  FullDisk(const FullDisk&) = delete;
  FullDisk& operator=(const FullDisk&) = delete;

 private:
  void (*before_)(int);
  rlimit limit_ = {};
};

// The group has gone on: it has another epoch, other holders, another cache. Only what its caller
// gave up is not made later.
TEST_F(JournalTest, WhatAFullDiskDidNotTakeIsWrittenWhenThereIsRoom) {
  Fill();
  {
    const auto journal = MustOpen();
    const FullDisk full(4096);
    journal->OnEpoch(7);
    journal->OnFormed(7, {21, 22});
    journal->OnFormed(8, {21, 23});
    EXPECT_FALSE(Put(*journal, "another", 9).ok());
    EXPECT_FALSE(Drop(*journal, "model").ok());
    std::promise<absl::Status> changed;
    journal->ChangeRanks(1, {}, [&](const absl::Status& status) { changed.set_value(status); });
    EXPECT_FALSE(changed.get_future().get().ok());
    journal->PutLeases({{.cache = "another", .sequence = 4, .lease = "l"},
                        {.cache = "another", .sequence = 5, .lease = "l"}},
                       nullptr);
    journal->DropLease("another", 5);
    journal->Flush();
  }
  const auto journal = MustOpen();
  EXPECT_EQ(journal->identity().epoch, 7u);
  EXPECT_EQ(journal->identity().formed_epoch, 8u);
  EXPECT_THAT(journal->identity().holders, ElementsAre(21, 23));
  ASSERT_THAT(journal->caches(), SizeIs(1));
  EXPECT_EQ(journal->caches()[0].name, "another");
  EXPECT_THAT(LeasesOf(*journal), ElementsAre("another/4=l"));
}

TEST_F(JournalTest, AFullDiskIsTriedAgainWithoutAnythingNew) {
  Fill();
  const auto journal = MustOpen();
  {
    const FullDisk full(4096);
    journal->OnEpoch(7);
  }
  EXPECT_TRUE(test::Eventually(std::chrono::seconds(30), [&] {
    // Of the file as a crash would leave it now.
    for (const char* suffix : {"", "-wal"}) {
      std::filesystem::copy_file(File() + suffix, directory_.File("copy.db") + suffix,
                                 std::filesystem::copy_options::overwrite_existing);
    }
    auto copy = Sqlite::Open(directory_.File("copy.db"));
    const auto rows = copy->Query("SELECT epoch FROM group_identity");
    return rows.ok() && *rows == std::vector<SqlRow>{{int64_t{7}}};
  }));
}

JournalWrite WriteOf(const std::string& key, int64_t value, bool dispensable = false) {
  return {.sql = "", .parameters = {value}, .key = key, .dispensable = dispensable};
}

// As text: "key=value".
std::vector<std::string> TextOf(const OwedWrites& owed) {
  std::vector<std::string> all;
  for (const auto& [number, write] : owed.writes()) {
    all.push_back(write.key + "=" + std::to_string(std::get<int64_t>(write.parameters[0])));
  }
  return all;
}

TEST(OwedWrites, KeepTheLastOfEachKeyInOrder) {
  OwedWrites owed(10);
  owed.Add({WriteOf("a", 1), WriteOf("b", 2), WriteOf("", 3), WriteOf("a", 4)});
  EXPECT_THAT(TextOf(owed), ElementsAre("b=2", "a=4"));
  owed.Add({WriteOf("c", 5), WriteOf("b", 6)});
  EXPECT_THAT(TextOf(owed), ElementsAre("a=4", "c=5", "b=6"));
  owed.Clear();
  EXPECT_TRUE(owed.empty());
}

TEST(OwedWrites, GiveUpTheOldestOfTooManyDispensableOnes) {
  OwedWrites owed(2);
  owed.Add(
      {WriteOf("l1", 1, true), WriteOf("kept", 0), WriteOf("l2", 2, true), WriteOf("l3", 3, true)});
  EXPECT_THAT(TextOf(owed), ElementsAre("kept=0", "l2=2", "l3=3"));
}

}  // namespace
}  // namespace tributary::service
