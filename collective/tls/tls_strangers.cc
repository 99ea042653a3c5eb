#include "collective/tls/tls_strangers.h"

#include <utility>

#include "base/rpc/descriptor.h"

namespace tributary::collective {

void TlsStrangers::Add(Descriptor socket) {
  if (strangers_.size() >= most_) strangers_.pop_front();
  auto connection = TlsConnection::Create(identity_, std::move(socket), TlsEnd::kAccepts, trusted_,
                                          records_per_key_);
  if (connection == nullptr) return;
  strangers_.push_back({std::move(connection), std::chrono::steady_clock::now() + kPatience});
}

void TlsStrangers::Advance(const std::function<void(std::unique_ptr<TlsConnection>)>& proved) {
  const Deadline now = std::chrono::steady_clock::now();
  for (auto s = strangers_.begin(); s != strangers_.end();) {
    const TlsConnection::Io io = s->connection->Handshake();
    if (io == TlsConnection::Io::kWaits && now < s->until) {
      ++s;
      continue;
    }
    if (io == TlsConnection::Io::kDone) proved(std::move(s->connection));
    s = strangers_.erase(s);
  }
}

void TlsStrangers::AppendTo(std::vector<pollfd>* waits) const {
  for (const Stranger& s : strangers_) {
    waits->push_back({.fd = s.connection->socket(), .events = s.connection->events()});
  }
}

Deadline TlsStrangers::next_look() const {
  return strangers_.empty() ? Deadline::max() : strangers_.front().until;
}

}  // namespace tributary::collective
