#include "worker/parcel_lanes.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/process/boot_id.h"
#include "base/rpc/descriptor.h"
#include "base/status/status_macros.h"
#include "worker/status_conversion.h"

namespace tributary::worker {
namespace {

constexpr size_t kPlaces = 2;  // one is written while the other is read
constexpr size_t kHeadBytes = 4096;
constexpr size_t kPlaceBytes = (ParcelLanes::kParcelBytes + 4095) / 4096 * 4096;
constexpr size_t kLaneBytes = kHeadBytes + kPlaces * kPlaceBytes;
constexpr std::chrono::microseconds kNap{20};
// How long a parcel may take to be read before its reader counts as lost. (The communicator does
// not tell a rank that waits here that the group is over.)
constexpr std::chrono::seconds kLanePatience{5};

// The first bytes of a lane.
struct Head {
  std::array<uint8_t, 16> secret;
  // Of each place: 1 while a parcel lies there that has not been read.
  std::array<uint32_t, kPlaces> full;
};

// What a rank tells the others of its lane. Without a file it has none.
struct Address {
  char boot_id[40] = {};
  uint64_t pid_namespace = 0;
  int32_t pid = 0;
  int32_t file = -1;
  std::array<uint8_t, 16> secret = {};
};

std::atomic_ref<uint32_t> Word(uint32_t& word) { return std::atomic_ref<uint32_t>(word); }

uint64_t OwnPidNamespace() {
  struct stat found {};
  return stat("/proc/self/ns/pid", &found) == 0 ? found.st_ino : 0;
}

}  // namespace

struct ParcelLanes::Lane {
  Lane() = default;
  ~Lane() {
    if (data != nullptr) munmap(data, kLaneBytes);
  }
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  bool Map() {
    void* mapped = mmap(nullptr, kLaneBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE,
                        file.get(), 0);
    if (mapped == MAP_FAILED) return false;
    data = static_cast<std::byte*>(mapped);
    return true;
  }
  Head& head() const { return *reinterpret_cast<Head*>(data); }
  std::byte* place(uint32_t index) const { return data + kHeadBytes + index * kPlaceBytes; }

  Descriptor file;
  std::byte* data = nullptr;
};

namespace {

// Where the system refuses, the address has no file.
template <typename Lane>
Address MakeLane(Lane* lane) {
  Address address;
  lane->file = Descriptor(memfd_create("tributary-parcels", MFD_CLOEXEC));
  if (!lane->file.open() || ftruncate(lane->file.get(), kLaneBytes) != 0 || !lane->Map()) {
    return address;
  }
  if (getrandom(address.secret.data(), address.secret.size(), 0) !=
      static_cast<ssize_t>(address.secret.size())) {
    return address;
  }
  lane->head().secret = address.secret;
  const std::string boot = BootId();
  std::memcpy(address.boot_id, boot.data(), std::min(boot.size(), sizeof address.boot_id - 1));
  address.pid_namespace = OwnPidNamespace();
  address.pid = getpid();
  address.file = lane->file.get();
  return address;
}

// Whether the lane at this address is reached from here, and is the one that is meant.
template <typename Lane>
bool OpenLane(const Address& address, const Address& own, Lane* lane) {
  const bool near = address.file >= 0 && own.file >= 0 && own.boot_id[0] != 0 &&
                    std::memcmp(address.boot_id, own.boot_id, sizeof own.boot_id) == 0 &&
                    address.pid_namespace == own.pid_namespace && own.pid_namespace != 0;
  if (!near) return false;
  const std::string path = absl::StrCat("/proc/", address.pid, "/fd/", address.file);
  lane->file = Descriptor(open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK));
  struct stat found {};
  return lane->file.open() && fstat(lane->file.get(), &found) == 0 && S_ISREG(found.st_mode) &&
         static_cast<size_t>(found.st_size) == kLaneBytes && lane->Map() &&
         lane->head().secret == address.secret;
}

}  // namespace

ParcelLanes::ParcelLanes(int size) : lanes_(static_cast<size_t>(size)), size_(size) {}

ParcelLanes::~ParcelLanes() = default;

absl::StatusOr<std::unique_ptr<ParcelLanes>> ParcelLanes::Form(collective::Communicator& comm,
                                                               collective::Deadline deadline) {
  std::unique_ptr<ParcelLanes> formed(new ParcelLanes(comm.size()));
  const auto size = static_cast<size_t>(comm.size());
  formed->rank_ = comm.rank();
  auto& own = formed->lanes_[static_cast<size_t>(comm.rank())];
  own = std::make_unique<Lane>();
  const Address address = MakeLane(own.get());
  std::vector<Address> addresses(size);
  TRIBUTARY_RETURN_IF_ERROR(
      CollectiveStatus(comm.AllGather(&address, addresses.data(), sizeof address, deadline)));
  std::vector<uint8_t> reached(size);
  for (size_t peer = 0; peer < size; ++peer) {
    if (peer == static_cast<size_t>(comm.rank())) continue;
    auto lane = std::make_unique<Lane>();
    reached[peer] = OpenLane(addresses[peer], address, lane.get());
    if (reached[peer] != 0) formed->lanes_[peer] = std::move(lane);
  }
  std::vector<uint8_t> all(size * size);  // [to][from]
  TRIBUTARY_RETURN_IF_ERROR(
      CollectiveStatus(comm.AllGather(reached.data(), all.data(), size, deadline)));
  formed->reaches_.resize(size * size);
  for (size_t to = 0; to < size; ++to) {
    for (size_t from = 0; from < size; ++from) {
      formed->reaches_[from * size + to] = all[to * size + from] != 0;
    }
  }
  return formed;
}

bool ParcelLanes::Serves(int from, int to, size_t bytes) const {
  return bytes <= kParcelBytes &&
         reaches_[static_cast<size_t>(from) * static_cast<size_t>(size_) + static_cast<size_t>(to)];
}

absl::StatusOr<std::byte*> ParcelLanes::Begin(collective::Deadline deadline) {
  const Lane& lane = *lanes_[static_cast<size_t>(rank_)];
  deadline = std::min(deadline, std::chrono::steady_clock::now() + kLanePatience);
  while (Word(lane.head().full[next_]).load(std::memory_order_acquire) != 0) {
    if (std::chrono::steady_clock::now() >= deadline) {
      return absl::DeadlineExceededError("a peer has not read the pages that it was sent");
    }
    std::this_thread::sleep_for(kNap);
  }
  return lane.place(next_);
}

absl::StatusOr<std::byte*> ParcelLanes::Pass(collective::Communicator& comm, int from, int to,
                                             collective::Deadline deadline) {
  uint32_t place = next_;
  if (rank_ == from) {
    Lane& lane = *lanes_[static_cast<size_t>(rank_)];
    Word(lane.head().full[place]).store(1, std::memory_order_release);
    next_ = (next_ + 1) % kPlaces;
  }
  TRIBUTARY_RETURN_IF_ERROR(
      CollectiveStatus(comm.Pass(&place, &place, sizeof place, from, to, deadline)));
  if (rank_ != to) return nullptr;
  if (place >= kPlaces) return absl::InternalError("a peer names no place of its lane");
  Lane& lane = *lanes_[static_cast<size_t>(from)];
  received_ = &lane.head().full[place];
  if (Word(*received_).load(std::memory_order_acquire) != 1) {
    return absl::InternalError("a peer's lane has no parcel where it should");
  }
  return lane.place(place);
}

void ParcelLanes::Done() {
  if (received_ != nullptr) Word(*received_).store(0, std::memory_order_release);
  received_ = nullptr;
}

ParcelLanes::Memory ParcelLanes::of(int rank) const {
  const Lane* lane = lanes_[static_cast<size_t>(rank)].get();
  if (lane == nullptr || lane->data == nullptr) return {};
  return {lane->data, kLaneBytes};
}

}  // namespace tributary::worker
