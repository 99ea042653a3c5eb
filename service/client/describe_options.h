// The options of a client and of its sessions as data, for a log, a report or a page of settings.
#pragma once

#include <string>
#include <vector>

#include "service/client/client.h"
#include "service/client/host_session.h"
#include "service/client/session.h"

namespace tributary::client {

struct OptionValue {
  std::string name;   // as in the options' struct; of a struct within it "security.token_file"
  std::string value;  // with its unit; "" where the option is not set
};

// Every option with its value, in the order in which the struct has them. What opens a door to
// others, a lease or a session's secret, is shown as "(set)"; files are shown by their paths.
std::vector<OptionValue> Describe(const ConnectOptions& options);
std::vector<OptionValue> Describe(const HostSessionOptions& options);
std::vector<OptionValue> Describe(const DeviceSessionOptions& options);
std::vector<OptionValue> Describe(const EndpointOptions& options);

// One line for each, "name: value\n".
std::string OptionsText(const std::vector<OptionValue>& options);

}  // namespace tributary::client
