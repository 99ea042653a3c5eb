// A connection to an SQLite database: what the journal asks of it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

struct sqlite3;

namespace tributary::service {

// Bytes rather than text.
struct Blob {
  std::string bytes;
  friend bool operator==(const Blob&, const Blob&) = default;
};
using SqlValue = std::variant<int64_t, std::string, Blob>;
using SqlRow = std::vector<SqlValue>;

// Used from one thread at a time.
class Sqlite {
 public:
  // Creates the file if there is none. kDataLoss: there is one, and it is no database.
  static absl::StatusOr<Sqlite> Open(const std::string& path);

  // While it is on, closing leaves the file and the write-ahead log beside it as they are. By
  // itself, closing moves what the log holds into the file. Off at first.
  void LeaveLogAtClose(bool on);

  // Statements without parameters and results, separated by semicolons.
  absl::Status Execute(const char* sql);
  // One statement; `parameters` stand for its question marks.
  absl::Status Run(const char* sql, const std::vector<SqlValue>& parameters);
  absl::StatusOr<std::vector<SqlRow>> Query(const char* sql);

 private:
  struct Close {
    void operator()(sqlite3* database) const;
  };
  explicit Sqlite(sqlite3* database) : database_(database) {}
  absl::Status Failure(int code, const char* what) const;

  std::unique_ptr<sqlite3, Close> database_;
};

}  // namespace tributary::service
