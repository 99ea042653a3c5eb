#include "collective/rendezvous/file_rendezvous.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <fstream>
#include <functional>
#include <sstream>
#include <system_error>
#include <thread>
#include <utility>

namespace tributary::collective {
namespace {

constexpr auto kPollInterval = std::chrono::milliseconds(2);

// Keys hold slashes and may hold anything; every other byte than these is written as %XX.
std::string FileName(const std::string& key) {
  static constexpr char kHex[] = "0123456789ABCDEF";
  std::string name;
  for (const unsigned char c : key) {
    if (std::isalnum(c) != 0 || c == '-' || c == '_') {
      name += static_cast<char>(c);
    } else {
      name += {'%', kHex[c >> 4], kHex[c & 15]};
    }
  }
  return name;
}

// No two writers share a temporary file, whether threads or processes (of hosts that share the
// directory).
std::string TemporaryName() {
  char host[256] = {};
  gethostname(host, sizeof(host) - 1);
  std::ostringstream name;
  name << ".tmp." << host << '.' << getpid() << '.' << std::this_thread::get_id();
  return name.str();
}

}  // namespace

FileRendezvous::FileRendezvous(std::filesystem::path directory)
    : directory_(std::move(directory)) {}

Status FileRendezvous::Set(const std::string& key, const std::string& value) {
  std::error_code error;
  std::filesystem::create_directories(directory_, error);
  const std::filesystem::path temporary = directory_ / TemporaryName();
  std::ofstream file(temporary, std::ios::binary | std::ios::trunc);
  file.write(value.data(), static_cast<std::streamsize>(value.size()));
  file.close();
  if (!file) {
    return {StatusCode::kUnavailable, "rendezvous: cannot write " + temporary.string()};
  }
  // A reader sees the whole value or no file.
  std::filesystem::rename(temporary, directory_ / FileName(key), error);
  if (error) {
    return {StatusCode::kUnavailable, "rendezvous: cannot set '" + key + "' in " +
                                          directory_.string() + ": " + error.message()};
  }
  return Status::Ok();
}

Status FileRendezvous::Get(const std::string& key, std::string* value, Deadline deadline) {
  const std::filesystem::path path = directory_ / FileName(key);
  while (true) {
    std::ifstream file(path, std::ios::binary);
    if (file) {
      std::ostringstream bytes;
      bytes << file.rdbuf();
      *value = bytes.str();
      return Status::Ok();
    }
    const Deadline now = std::chrono::steady_clock::now();
    if (now >= deadline) {
      return {StatusCode::kDeadlineExceeded,
              "rendezvous: '" + key + "' was not set in time in " + directory_.string()};
    }
    std::this_thread::sleep_for(std::min<Deadline::duration>(kPollInterval, deadline - now));
  }
}

}  // namespace tributary::collective
