#include "collective/rendezvous/gathered_rendezvous.h"

#include <cstdint>
#include <cstring>
#include <vector>

namespace tributary::collective {
namespace {

constexpr uint32_t kTooLong = ~uint32_t{0};

struct Word {
  uint32_t bytes = 0;
  char text[GatheredRendezvous::kMostBytes] = {};
};

}  // namespace

Status GatheredRendezvous::Set(const std::string& key, const std::string& value) {
  Word own;
  const bool fits = value.size() <= kMostBytes;
  own.bytes = fits ? static_cast<uint32_t>(value.size()) : kTooLong;
  if (fits) std::memcpy(own.text, value.data(), value.size());
  std::vector<Word> all(static_cast<size_t>(comm_.size()));
  if (Status s = comm_.AllGather(&own, all.data(), sizeof(Word), deadline_); !s.ok()) return s;
  const std::string prefix = key.substr(0, key.rfind('/') + 1);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].bytes > kMostBytes) {
      return InvalidArgument("rendezvous: the value of rank " + std::to_string(rank) + " for " +
                             prefix + " has more than " + std::to_string(kMostBytes) + " bytes");
    }
    values_[prefix + std::to_string(rank)].assign(all[rank].text, all[rank].bytes);
  }
  return Status::Ok();
}

Status GatheredRendezvous::Get(const std::string& key, std::string* value, Deadline) {
  const auto found = values_.find(key);
  if (found == values_.end()) return {StatusCode::kInternal, "rendezvous: nobody set " + key};
  *value = found->second;
  return Status::Ok();
}

}  // namespace tributary::collective
