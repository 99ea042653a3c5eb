// Stamps that the GPUs of a session's two sides take of a layer, and the spans between them.
#pragma once

#include <cstdint>

#include "base/mailbox/layout.h"
#include "service/client/layer_times.h"

namespace tributary::client {

// When a layer came to a point, in nanoseconds: of the host's GPU by its clock, and of the
// service's by that GPU's.
struct LayerStamps {
  uint64_t begun = 0;           // the launch that hands it over had q, k and v before it
  uint64_t rung = 0;            // it was handed over
  mailbox::SlotStamps service;  // of the service's GPU
  uint64_t back = 0;            // the host's GPU knew that it was finished
};

// `one_clock`: both sides are on one GPU. Elsewhere their clocks differ, and what lies between a
// stamp of the one and of the other, there and back, is told as two halves of the sum.
inline LayerTimes TimesOf(const LayerStamps& stamps, bool one_clock) {
  const auto span = [](uint64_t from, uint64_t to) {
    return static_cast<double>(static_cast<int64_t>(to - from)) * 1e-9;
  };
  const mailbox::SlotStamps& service = stamps.service;
  const uint64_t attended = service.attended != 0 ? service.attended : service.finished;
  LayerTimes times{.fill = span(stamps.begun, stamps.rung),
                   .ring_seen = span(stamps.rung, service.seen),
                   .attention = span(service.seen, attended),
                   .exchange = span(attended, service.finished),
                   .ring_back = span(service.finished, stamps.back),
                   .wait = span(stamps.rung, stamps.back)};
  if (one_clock) return times;
  times.ring_seen = times.ring_back = (times.ring_seen + times.ring_back) / 2;
  return times;
}

}  // namespace tributary::client
