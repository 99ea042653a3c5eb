// Certificates of a test's own making.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/rpc/tls.h"
#include "tests/support/process.h"

namespace tributary::test {

struct LeafOptions {
  std::vector<std::string> names = {"localhost"};  // subject alternative DNS names
  // Validity in seconds from now.
  long begins = -60;         // NOLINT(google-runtime-int): OpenSSL's type
  long ends = 24 * 60 * 60;  // NOLINT(google-runtime-int)
};

// Signs certificates; its files lie in a directory of its own.
class Authority {
 public:
  Authority();
  ~Authority();
  Authority(const Authority&) = delete;
  Authority& operator=(const Authority&) = delete;

  // Its own certificate, as a file.
  std::string file() const { return directory_.File("ca.pem"); }
  // Writes <name>.pem and <name>.key, in one go each, and says where; `authorities` is empty.
  TlsFiles Issue(const std::string& name, const LeafOptions& options = {});

 private:
  struct Keys;
  TemporaryDirectory directory_;
  std::unique_ptr<Keys> keys_;
};

}  // namespace tributary::test
