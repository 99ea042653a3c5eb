#include "worker/exchange_choice.h"

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "base/status/errors.h"

namespace tributary::worker {

const char* Name(ExchangePlace place) { return place == ExchangePlace::kHost ? "host" : "auto"; }

bool Parse(std::string_view text, ExchangePlace* out) {
  for (const ExchangePlace place : {ExchangePlace::kHost, ExchangePlace::kAuto}) {
    if (text != Name(place)) continue;
    *out = place;
    return true;
  }
  return false;
}

absl::Status CheckExchange(Device device, collective::Strategy strategy, ExchangePlace place) {
  if (device != Device::kCuda) {
    if (strategy == collective::Strategy::kDirect) {
      return InvalidField("exchange", absl::StrCat("direct is between the memories of GPUs, and "
                                                   "workers compute on device ",
                                                   Name(device)));
    }
    return absl::OkStatus();
  }
  if (strategy == collective::Strategy::kDirect && place == ExchangePlace::kHost) {
    return InvalidField("exchange",
                        "direct needs device_exchange=auto; now partials meet in host memory");
  }
  return absl::OkStatus();
}

const char* Name(DeviceTransport transport) {
  return transport == DeviceTransport::kDirect ? "direct" : "NCCL";
}

std::vector<DeviceTransport> TransportsFor(collective::Strategy strategy) {
  switch (strategy) {
    case collective::Strategy::kAuto:
      // `direct` serves every call where it is there (ChooseDeviceStrategy), so that connections of
      // NCCL, which take seconds to make, would lie idle beside it.
      return {DeviceTransport::kDirect, DeviceTransport::kNccl};
    case collective::Strategy::kDirect:
      return {DeviceTransport::kDirect};
    case collective::Strategy::kAllGather:
    case collective::Strategy::kAgRs:
    case collective::Strategy::kA2a:
      return {DeviceTransport::kNccl};
  }
  return {};
}

std::string WhyNotOnGpus(const std::vector<std::string>& gpus) {
  absl::flat_hash_map<std::string, size_t> ranks;
  for (size_t rank = 0; rank < gpus.size(); ++rank) {
    const auto [held, first] = ranks.emplace(gpus[rank], rank);
    if (!first) return absl::StrCat("ranks ", held->second, " and ", rank, " share a GPU");
  }
  return "";
}

}  // namespace tributary::worker
