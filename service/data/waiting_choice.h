// How the two sides of a session on a GPU wait for each other. The choice rests on how long a round
// trip took by either way.
#pragma once

#include <string>

#include "tributary/v1/session.pb.h"
#include "worker/command.h"

namespace tributary::service {

struct WaitingChoice {
  worker::Waiting waiting = worker::Waiting::kSpinningWarp;
  double round_trip_seconds = 0;  // of the chosen way; 0: it was not timed
  std::string warning;            // what would make the session faster, or empty
};

// A way that was not timed (0) is chosen only if neither was. Stream memory operations must be
// clearly faster, because each costs another launch. `one_gpu`: host and worker share a GPU, so
// slow round trips of spinning warps mean that the two processes take turns on it.
WaitingChoice ChooseWaiting(const v1::ProbeResult& times, bool one_gpu);

// The same as a value of the API.
v1::Waiting PublicWaiting(worker::Waiting waiting);

}  // namespace tributary::service
