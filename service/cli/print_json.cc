#include "service/cli/print_json.h"

#include <cstdio>

#include "google/protobuf/util/json_util.h"
#include "service/cli/command.h"

namespace tributary::cli {

int PrintJson(const std::string& command, const google::protobuf::Message& message) {
  std::string text;
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  if (!google::protobuf::util::MessageToJsonString(message, &text, options).ok()) {
    return Fail(command, "the reply cannot be written as JSON");
  }
  std::fputs(text.c_str(), stdout);
  return kDone;
}

}  // namespace tributary::cli
