// A full mesh of Gloo TCP connections, one to every peer. Internal to this room.
#pragma once

#include <gloo/transport/context.h>
#include <gloo/transport/device.h>

#include <chrono>
#include <exception>
#include <memory>
#include <string>

#include "collective/communicator.h"
#include "collective/peers/group_place.h"
#include "collective/rendezvous/rendezvous.h"
#include "kernels/status.h"

namespace tributary::collective {

struct GlooMesh {
  std::shared_ptr<gloo::transport::Device> device;  // one socket-polling thread
  std::shared_ptr<gloo::transport::Context> context;
};

// Publishes this rank's addresses, waits for those of its peers and connects to all of them.
Status ConnectMesh(const GroupPlace& place, Rendezvous& rendezvous, Deadline deadline,
                   GlooMesh* mesh);

// Closes every connection at once; peers see it without delay. May be called from any thread but
// Gloo's own.
void CloseMesh(GlooMesh& mesh);

// The code and text of what Gloo threw, without its file and line.
Status StatusOf(const std::exception& e);

// From now until the deadline, rounded up; never negative, and small enough that Gloo can add it to
// a time.
std::chrono::milliseconds TimeoutOf(Deadline deadline);

}  // namespace tributary::collective
