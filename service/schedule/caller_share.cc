#include "service/schedule/caller_share.h"

#include <algorithm>

namespace tributary::service {

bool CallerShare::AreSeveral(const Peaks* last, const Peaks* before) {
  const size_t of_last = last == nullptr ? 0 : last->size();
  const size_t of_before = before == nullptr ? 0 : before->size();
  if (of_last > 1 || of_before > 1) return true;
  return of_last == 1 && of_before == 1 && last->begin()->first != before->begin()->first;
}

void CallerShare::OnCall(Clock::time_point now, absl::string_view caller, double waiting) {
  if (!callers_.remembers()) return;
  double& peak = callers_.Now(now).try_emplace(caller, waiting).first->second;
  peak = std::max(peak, waiting);
}

// It looks no further than the first who has little. Where all have much it looks at each of them,
// which is less than their calls cost.
double CallerShare::MostOfOne(Clock::time_point now) const {
  const Peaks* const last = callers_.last(now);
  const Peaks* const before = callers_.before(now);
  if (!AreSeveral(last, before)) return kNoLimit;
  double least = kNoLimit;
  for (const Peaks* peaks : {last, before}) {
    if (peaks == nullptr) continue;
    for (const auto& [caller, peak] : *peaks) {
      least = std::min(least, PeakOf(caller, now));
      if (least <= 1) return 1;
    }
  }
  return least;
}

double CallerShare::PeakOf(absl::string_view caller, Clock::time_point now) const {
  double peak = 0;
  for (const Peaks* peaks : {callers_.last(now), callers_.before(now)}) {
    if (peaks == nullptr) continue;
    if (const auto found = peaks->find(caller); found != peaks->end()) {
      peak = std::max(peak, found->second);
    }
  }
  return peak;
}

}  // namespace tributary::service
