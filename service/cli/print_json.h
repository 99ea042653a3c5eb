// A reply as JSON, for programs that read what commands print.
#pragma once

#include <string>

namespace google::protobuf {
class Message;
}

namespace tributary::cli {

// Prints `message` on stdout, fields by their names in the protos, those of zero too. The exit code
// of `command`.
int PrintJson(const std::string& command, const google::protobuf::Message& message);

}  // namespace tributary::cli
