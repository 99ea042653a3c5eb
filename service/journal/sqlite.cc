#include "service/journal/sqlite.h"

#include <sqlite3.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status/status_macros.h"

namespace tributary::service {
namespace {

struct Finalize {
  void operator()(sqlite3_stmt* statement) const { sqlite3_finalize(statement); }
};
using Statement = std::unique_ptr<sqlite3_stmt, Finalize>;

int Bind(sqlite3_stmt* statement, int place, const SqlValue& value) {
  if (const auto* number = std::get_if<int64_t>(&value)) {
    return sqlite3_bind_int64(statement, place, *number);
  }
  if (const auto* text = std::get_if<std::string>(&value)) {
    return sqlite3_bind_text64(statement, place, text->data(), text->size(), SQLITE_TRANSIENT,
                               SQLITE_UTF8);
  }
  const std::string& bytes = std::get<Blob>(value).bytes;
  return sqlite3_bind_blob64(statement, place, bytes.data(), bytes.size(), SQLITE_TRANSIENT);
}

SqlValue Column(sqlite3_stmt* statement, int column) {
  const auto bytes = [&](const void* data) {
    const auto size = static_cast<size_t>(sqlite3_column_bytes(statement, column));
    return data == nullptr ? std::string() : std::string(static_cast<const char*>(data), size);
  };
  switch (sqlite3_column_type(statement, column)) {
    case SQLITE_INTEGER:
      return int64_t{sqlite3_column_int64(statement, column)};
    case SQLITE_BLOB:
      return Blob{bytes(sqlite3_column_blob(statement, column))};
    default:
      return bytes(sqlite3_column_text(statement, column));
  }
}

}  // namespace

void Sqlite::Close::operator()(sqlite3* database) const { sqlite3_close_v2(database); }

absl::Status Sqlite::Failure(int code, const char* what) const {
  const std::string message =
      absl::StrCat(what, ": ", database_ == nullptr ? "" : sqlite3_errmsg(database_.get()));
  const int kind = code & 0xff;  // extended codes have more above
  if (kind == SQLITE_CORRUPT || kind == SQLITE_NOTADB) return absl::DataLossError(message);
  if (kind == SQLITE_FULL) return absl::ResourceExhaustedError(message);
  if (kind == SQLITE_BUSY || kind == SQLITE_LOCKED) return absl::FailedPreconditionError(message);
  return absl::UnavailableError(message);
}

absl::StatusOr<Sqlite> Sqlite::Open(const std::string& path) {
  sqlite3* opened = nullptr;
  const int code =
      sqlite3_open_v2(path.c_str(), &opened,
                      SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_NOMUTEX, nullptr);
  Sqlite database(opened);
  if (code != SQLITE_OK) return database.Failure(code, path.c_str());
  return database;
}

void Sqlite::LeaveLogAtClose(bool on) {
  sqlite3_db_config(database_.get(), SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, on ? 1 : 0, nullptr);
}

absl::Status Sqlite::Execute(const char* sql) {
  const int code = sqlite3_exec(database_.get(), sql, nullptr, nullptr, nullptr);
  return code == SQLITE_OK ? absl::OkStatus() : Failure(code, sql);
}

absl::Status Sqlite::Run(const char* sql, const std::vector<SqlValue>& parameters) {
  sqlite3_stmt* prepared = nullptr;
  int code = sqlite3_prepare_v2(database_.get(), sql, -1, &prepared, nullptr);
  const Statement statement(prepared);
  for (size_t i = 0; i < parameters.size() && code == SQLITE_OK; ++i) {
    code = Bind(prepared, static_cast<int>(i) + 1, parameters[i]);
  }
  if (code != SQLITE_OK) return Failure(code, sql);
  code = sqlite3_step(prepared);
  return code == SQLITE_DONE || code == SQLITE_ROW ? absl::OkStatus() : Failure(code, sql);
}

absl::StatusOr<std::vector<SqlRow>> Sqlite::Query(const char* sql) {
  sqlite3_stmt* prepared = nullptr;
  int code = sqlite3_prepare_v2(database_.get(), sql, -1, &prepared, nullptr);
  const Statement statement(prepared);
  if (code != SQLITE_OK) return Failure(code, sql);
  std::vector<SqlRow> rows;
  while ((code = sqlite3_step(prepared)) == SQLITE_ROW) {
    SqlRow& row = rows.emplace_back();
    for (int column = 0; column < sqlite3_column_count(prepared); ++column) {
      row.push_back(Column(prepared, column));
    }
  }
  if (code != SQLITE_DONE) return Failure(code, sql);
  return rows;
}

}  // namespace tributary::service
