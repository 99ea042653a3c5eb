// Where the time of a layer of a session went whose mailbox lies on a GPU.
#pragma once

namespace tributary::client {

// In seconds. The first five follow each other. Where host and rank 0 compute on two GPUs, whose
// clocks differ, only the sum of `ring_seen` and `ring_back` is known, and each is half of it.
struct LayerTimes {
  double fill = 0;       // q, k and v were copied into the slot
  double ring_seen = 0;  // until the service's GPU knew of it (and until other endpoints had come)
  double attention = 0;  // append and attention of rank 0; with one rank all that it computes
  double exchange = 0;   // partials of the ranks met and were merged; 0 with one rank
  double ring_back = 0;  // until the host's GPU knew that the result was there
  double wait = 0;       // of the host, from its ring to the result: all but `fill`
};

}  // namespace tributary::client
