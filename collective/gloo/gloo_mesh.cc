#include "collective/gloo/gloo_mesh.h"

#include <gloo/common/error.h>
#include <gloo/transport/address.h>
#include <gloo/transport/pair.h>
#include <gloo/transport/tcp/device.h>

#include <algorithm>
#include <thread>
#include <utility>
#include <vector>

#include "base/sync/mutex.h"
#include "collective/peers/announcement.h"
#include "collective/peers/own_address.h"

namespace tributary::collective {
namespace {

// Gloo would resolve names itself, but reads an uninitialised pointer when there is no such name,
// and leaks the addresses when it can bind none.
Status CreateDevice(const std::string& host, std::shared_ptr<gloo::transport::Device>* out) {
  std::string address;
  if (Status s = ResolveOwnAddress(host, &address); !s.ok()) return s;
  try {
    *out = gloo::transport::tcp::CreateDevice(gloo::transport::tcp::attr(address.c_str()));
  } catch (const std::exception& e) {
    return {StatusCode::kInternal, "host '" + host + "': " + StatusOf(e).message()};
  }
  return Status::Ok();
}

constexpr char kGlooTransport[] = "gloo";

// The address at which each peer reaches this rank. They are Gloo's own bytes, all of one length,
// in rank order without the own rank.
std::string EncodeAddresses(gloo::transport::Context& context) {
  std::string text;
  for (int peer = 0; peer < context.size; ++peer) {
    if (peer == context.rank) continue;
    const std::vector<char> bytes = context.getPair(peer)->address().bytes();
    text.append(bytes.begin(), bytes.end());
  }
  return text;
}

// The address in what `peer` published that is meant for `place`.
std::vector<char> DecodeAddress(const std::string& addresses, const GroupPlace& place, int peer) {
  const size_t length = addresses.size() / (place.size - 1);
  const size_t index = place.rank > peer ? place.rank - 1 : place.rank;
  const auto begin = addresses.begin() + index * length;
  return {begin, begin + length};
}

// Closes the connections under way when the deadline passes. Gloo bounds the wait for each single
// connection, and by five times its timeout; closing a connection ends that wait at once.
class ConnectWatchdog {
 public:
  ConnectWatchdog(GlooMesh& mesh, Deadline deadline)
      : thread_([this, &mesh, deadline] { Watch(mesh, deadline); }) {}

  ~ConnectWatchdog() {
    {
      const MutexLock lock(mutex_);
      done_ = true;
    }
    wake_.NotifyOne();
    thread_.join();
  }

 private:
  void Watch(GlooMesh& mesh, Deadline deadline) {
    const MutexLock lock(mutex_);
    while (!done_) {
      if (wake_.WaitUntil(mutex_, deadline) || done_) continue;
      CloseMesh(mesh);
      return;
    }
  }

  Mutex mutex_;
  CondVar wake_;
  bool done_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

Status ConnectToPeers(const GroupPlace& place, Rendezvous& rendezvous, Deadline deadline,
                      GlooMesh& mesh) {
  for (int peer = 0; peer < place.size; ++peer) {
    if (peer == place.rank) continue;
    const std::string who = "rank " + std::to_string(peer);
    std::string addresses;
    if (Status s = AwaitAnnouncement(kGlooTransport, place, peer, rendezvous, deadline, &addresses);
        !s.ok()) {
      return s;
    }
    Status status;
    try {
      mesh.context->getPair(peer)->connect(DecodeAddress(addresses, place, peer));
    } catch (const std::exception& e) {
      status = StatusOf(e);
    }
    // First: a connection that the watchdog closed looks connected, or broken.
    if (std::chrono::steady_clock::now() >= deadline) {
      return {StatusCode::kDeadlineExceeded, "no connection to " + who + " before the deadline"};
    }
    if (!status.ok()) return {status.code(), "no connection to " + who + ": " + status.message()};
  }
  return Status::Ok();
}

}  // namespace

Status ConnectMesh(const GroupPlace& place, Rendezvous& rendezvous, Deadline deadline,
                   GlooMesh* mesh) {
  if (Status s = CreateDevice(place.host, &mesh->device); !s.ok()) return s;
  try {
    mesh->context = mesh->device->createContext(place.rank, place.size);
    mesh->context->setTimeout(std::max(TimeoutOf(deadline), std::chrono::milliseconds(1)));
    for (int peer = 0; peer < place.size; ++peer) {
      if (peer != place.rank) mesh->context->createPair(peer);
    }
  } catch (const std::exception& e) {
    return StatusOf(e);
  }
  const ConnectWatchdog watchdog(*mesh, deadline);
  if (Status s = Announce(kGlooTransport, place, EncodeAddresses(*mesh->context), rendezvous);
      !s.ok()) {
    return s;
  }
  return ConnectToPeers(place, rendezvous, deadline, *mesh);
}

void CloseMesh(GlooMesh& mesh) {
  for (int peer = 0; peer < mesh.context->size; ++peer) {
    if (peer == mesh.context->rank) continue;
    try {
      mesh.context->getPair(peer)->close();
    } catch (const std::exception&) {
      // Closing the others matters more; a pair that cannot be closed is closed already.
    }
  }
}

Status StatusOf(const std::exception& e) {
  std::string text = e.what();
  // "[file:line] text"
  if (const size_t end = text.find("] "); !text.empty() && text[0] == '[' && end < text.size()) {
    text.erase(0, end + 2);
  }
  const bool io = dynamic_cast<const gloo::IoException*>(&e) != nullptr;
  return {io ? StatusCode::kUnavailable : StatusCode::kInternal, std::move(text)};
}

std::chrono::milliseconds TimeoutOf(Deadline deadline) {
  constexpr std::chrono::milliseconds kLongest = std::chrono::hours(24 * 365 * 10);
  const Deadline now = std::chrono::steady_clock::now();
  if (deadline <= now) return std::chrono::milliseconds(0);
  return std::min(std::chrono::ceil<std::chrono::milliseconds>(deadline - now), kLongest);
}

}  // namespace tributary::collective
