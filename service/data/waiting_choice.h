// How the two sides of a session on a GPU wait for each other, chosen by how long a round trip took
// either way.
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

// What was not timed (0) is not chosen, unless neither was. Stream memory operations are chosen
// where they are clearly faster, for each of them costs a launch more. `one_gpu`: host and worker
// share it; then a slow round trip of spinning warps means that they take turns.
WaitingChoice ChooseWaiting(const v1::ProbeResult& times, bool one_gpu);

// As the API shows it.
v1::Waiting PublicWaiting(worker::Waiting waiting);

}  // namespace tributary::service
