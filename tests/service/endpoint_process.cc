// An endpoint of a session, as a process: joins it, makes kWorkSteps and writes the outputs of its
// heads to a file. Ends with 0, or says on stderr why the session is over and ends with 1. See
// endpoint_process_test.cc.
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "tests/service/endpoint_work.h"

namespace tributary::service::testing {
namespace {

int Run(const std::vector<std::string>& arguments) {
  const std::string& target = arguments[0];
  const uint64_t sequence = std::stoull(arguments[4]);
  const int stop_at = std::stoi(arguments[5]);  // the step in whose midst it stops; -1: none
  const auto session =
      client::HostSession::Join({.target = target}, {.session_id = std::stoull(arguments[1]),
                                                     .secret = FromHex(arguments[2]),
                                                     .endpoint = std::stoi(arguments[3])});
  if (!session.ok()) {
    std::fprintf(stderr, "%s\n", session.status().ToString().c_str());
    return 1;
  }
  std::ofstream file(arguments[6], std::ios::binary);
  int64_t position = 0;
  int number = 0;
  for (const int32_t rows : kWorkSteps) {
    const absl::Status done = DriveEndpoint(
        **session, sequence, position, rows, [&](int32_t, const std::vector<float>& output) {
          file.write(reinterpret_cast<const char*>(output.data()),
                     static_cast<std::streamsize>(output.size() * sizeof(float)));
          file.flush();
          while (number == stop_at) pause();
        });
    if (!done.ok()) {
      std::fprintf(stderr, "%s\n", done.ToString().c_str());
      return 1;
    }
    position += rows;
    ++number;
  }
  return file.good() ? 0 : 1;
}

}  // namespace
}  // namespace tributary::service::testing

// TARGET SESSION SECRET ENDPOINT SEQUENCE STOP_AT RESULTS
int main(int argc, char** argv) {
  if (argc != 8) return 2;
  return tributary::service::testing::Run({argv + 1, argv + argc});
}
