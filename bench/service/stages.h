// Where the time of a call goes: its stages, and their percentiles over many calls.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tributary::service::bench {

using TimePoint = std::chrono::steady_clock::time_point;

// In the order in which a call passes through them; together they are the whole of it.
enum class Stage : uint8_t {
  kRpcIn,     // the client's call -> the message is there and the service begins with it
  kCheck,     // tensors, shapes and places are checked; accepted
  kQueue,     // waits for its turn at its sequences, for a slot and for company
  kCommand,   // positions and pages are planned, the command is built
  kWake,      // the command is handed to the rank's thread
  kPlan,      // the rank checks and plans the step
  kLaunch,    // staging, launches, and what the rank does besides
  kAttend,    // appending and attending: on a GPU, what the host waits for it
  kExchange,  // partials between ranks, where the host does it
  kCollect,   // the last rank's reply -> the step is over
  kReply,     // settled, results written, handed to gRPC
  kRpcOut,    // -> the client has the reply
};
inline constexpr size_t kStages = 12;
inline constexpr const char* kStageNames[kStages] = {"rpc in",   "check",   "queue",  "command",
                                                     "wake",     "plan",    "launch", "attend",
                                                     "exchange", "collect", "reply",  "rpc out"};

// Microseconds.
struct CallTimes {
  std::array<double, kStages> stages{};
  double total = 0;

  double& at(Stage stage) { return stages[static_cast<size_t>(stage)]; }
};

inline double Microseconds(TimePoint from, TimePoint to) {
  return std::chrono::duration<double, std::micro>(to - from).count();
}

// Of values in any order; 0 for none.
inline double Percentile(std::vector<double> values, double p) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(p * static_cast<double>(values.size() - 1))];
}

}  // namespace tributary::service::bench
