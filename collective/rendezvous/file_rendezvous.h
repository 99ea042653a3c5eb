// A rendezvous through a directory that all ranks reach: processes of one machine, or a shared file
// system with atomic rename. Every key is a file; Get polls for it.
#pragma once

#include <filesystem>
#include <string>

#include "collective/rendezvous/rendezvous.h"

namespace tributary::collective {

class FileRendezvous final : public Rendezvous {
 public:
  // The directory is created when it is missing, and is left behind: it belongs to the caller.
  explicit FileRendezvous(std::filesystem::path directory);

  Status Set(const std::string& key, const std::string& value) override;
  Status Get(const std::string& key, std::string* value, Deadline deadline) override;

 private:
  const std::filesystem::path directory_;
};

}  // namespace tributary::collective
