// What the communicator under TLS promises beyond the others: nobody but the ranks takes part, and
// nobody else reads or changes what travels.
#include "collective/tls/tls.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <sstream>

#include "base/rpc/descriptor.h"
#include "collective/tls/tls_connection.h"
#include "collective/tls/tls_identity.h"
#include "tests/collective/group.h"

namespace tributary::collective {
namespace {

using std::chrono::milliseconds;
using testing::AnyOf;
using testing::Eq;
using testing::HasSubstr;

// What a rank announces: "size\naddress port fingerprint".
struct Announced {
  std::string size, address, port, fingerprint;

  static Announced Of(const std::string& text) {
    Announced announced;
    std::istringstream(text) >> announced.size >> announced.address >> announced.port >>
        announced.fingerprint;
    return announced;
  }
  std::string text() const { return size + "\n" + address + " " + port + " " + fingerprint; }
  int port_number() const { return std::stoi(port); }
};

// Shows one rank what its peers announced, with changes.
class EditedRendezvous final : public Rendezvous {
 public:
  using Edit = std::function<void(Announced*)>;
  EditedRendezvous(Rendezvous& store, Edit edit) : store_(store), edit_(std::move(edit)) {}

  Status Set(const std::string& key, const std::string& value) override {
    return store_.Set(key, value);
  }
  Status Get(const std::string& key, std::string* value, Deadline deadline) override {
    if (Status s = store_.Get(key, value, deadline); !s.ok()) return s;
    Announced announced = Announced::Of(*value);
    edit_(&announced);
    *value = announced.text();
    return Status::Ok();
  }

 private:
  Rendezvous& store_;
  const Edit edit_;
};

Descriptor ConnectTo(int port) {
  Descriptor fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  return fd;
}

// Whether the other end closes the connection, which it may do by an error.
bool IsClosed(int fd) {
  pollfd wait = {.fd = fd, .events = POLLIN};
  if (poll(&wait, 1, 20'000) != 1) return false;
  char byte;
  ssize_t got = 1;
  while (got > 0) got = read(fd, &byte, 1);
  return true;
}

Group MakeTlsGroup(int size, const std::function<Rendezvous&(int rank)>& rendezvous,
                   std::vector<Status>* statuses, Deadline deadline,
                   uint64_t records_per_key = TlsOptions().records_per_key) {
  Group group(static_cast<size_t>(size));
  statuses->resize(static_cast<size_t>(size));
  OnEveryRank(size, [&](int rank) {
    (*statuses)[rank] = CreateTlsCommunicator(
        {.place = {.rank = rank, .size = size}, .records_per_key = records_per_key},
        rendezvous(rank), deadline, &group[rank]);
  });
  return group;
}

TEST(TlsTest, StrangersAreSentAwayAndTheGroupFormsAllTheSame) {
  MemoryRendezvous store;
  // The strangers are there before rank 1 is: rank 0 hears of it when they have all connected.
  Group group(2);
  Status of_rank_0;
  std::thread rank_0([&] {
    of_rank_0 = CreateTlsCommunicator({.place = {.rank = 0, .size = 2}}, store, Far(), &group[0]);
  });
  std::string announced;
  ASSERT_TRUE(store.Get("tributary/tls/0/0", &announced, Far()).ok());
  const int port = Announced::Of(announced).port_number();

  std::vector<Descriptor> silent;
  for (int i = 0; i < 100; ++i) silent.push_back(ConnectTo(port));
  const Descriptor plain = ConnectTo(port);
  const std::string request = "GET / HTTP/1.1\r\nHost: tributary\r\n\r\n";
  ASSERT_EQ(write(plain.get(), request.data(), request.size()),
            static_cast<ssize_t>(request.size()));
  // One that speaks TLS, and whose certificate says that it is rank 1.
  std::unique_ptr<TlsIdentity> stranger;
  ASSERT_TRUE(TlsIdentity::Create({.rank = 1, .size = 2}, &stranger).ok());
  const Descriptor other = ConnectTo(port);
  const std::vector<Fingerprint> nobody;
  const SslPtr tls = stranger->NewConnection(other.get(), TlsEnd::kConnects, &nobody);
  SSL_set_verify(tls.get(), SSL_VERIFY_NONE, nullptr);

  Status of_rank_1 =
      CreateTlsCommunicator({.place = {.rank = 1, .size = 2}}, store, Far(), &group[1]);
  // Whatever its own end made of the handshake, nothing comes of it.
  char byte;
  EXPECT_TRUE(SSL_do_handshake(tls.get()) != 1 || SSL_read(tls.get(), &byte, 1) <= 0);
  rank_0.join();
  ASSERT_TRUE(of_rank_0.ok()) << Text(of_rank_0);
  ASSERT_TRUE(of_rank_1.ok()) << Text(of_rank_1);
  EXPECT_TRUE(IsClosed(plain.get()));
  for (const Descriptor& fd : silent) EXPECT_TRUE(IsClosed(fd.get()));
  OnEveryRank(2, [&](int rank) {
    std::vector<int> all(2);
    const Status s = group[rank]->AllGather(&rank, all.data(), sizeof(int), Far());
    EXPECT_TRUE(s.ok()) << Text(s);
    EXPECT_THAT(all, testing::ElementsAre(0, 1));
  });
}

TEST(TlsTest, WhoHasAnotherCertificateThanAnnouncedIsNoPeer) {
  for (const int misled : {0, 1}) {
    SCOPED_TRACE(testing::Message() << "rank " << misled << " was told another fingerprint");
    MemoryRendezvous store;
    EditedRendezvous edited(
        store, [](Announced* a) { a->fingerprint[0] = a->fingerprint[0] == '0' ? '1' : '0'; });
    std::vector<Status> statuses;
    const Group group = MakeTlsGroup(
        2,
        [&](int rank) -> Rendezvous& {
          return rank == misled ? edited : static_cast<Rendezvous&>(store);
        },
        &statuses, After(milliseconds(500)));
    for (int rank : {0, 1}) {
      EXPECT_EQ(group[rank], nullptr);
      EXPECT_THAT(statuses[rank].code(),
                  AnyOf(Eq(StatusCode::kUnavailable), Eq(StatusCode::kDeadlineExceeded)))
          << Text(statuses[rank]);
      EXPECT_THAT(statuses[rank].message(), HasSubstr("rank " + std::to_string(1 - rank)));
    }
    if (misled == 1) {
      EXPECT_THAT(statuses[1].message(), HasSubstr("certificate verify failed"));
    }
  }
}

TEST(TlsTest, KeysAreRenewedWithoutNotice) {
  MemoryRendezvous store;
  std::vector<Status> statuses;
  Group group = MakeTlsGroup(
      3, [&](int) -> Rendezvous& { return store; }, &statuses, Far(), /*records_per_key=*/2);
  OnEveryRank(3, [&](int rank) {
    ASSERT_TRUE(statuses[rank].ok()) << Text(statuses[rank]);
    std::vector<uint32_t> send(100'000, 7 * rank), recv(3 * send.size());
    for (int round = 0; round < 5; ++round) {
      const Status s =
          group[rank]->AllGather(send.data(), recv.data(), send.size() * sizeof(uint32_t), Far());
      ASSERT_TRUE(s.ok()) << Text(s);
      for (size_t i = 0; i < recv.size(); ++i) ASSERT_EQ(recv[i], 7 * (i / send.size()));
    }
  });
}

// Stands between one rank and another, and hands on what both say.
class Relay {
 public:
  explicit Relay(int to) : listening_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(bind(listening_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(listen(listening_.get(), 1), 0);
    socklen_t length = sizeof(address);
    getsockname(listening_.get(), reinterpret_cast<sockaddr*>(&address), &length);
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this, to] { Carry(to); });
  }
  ~Relay() {
    stop_ = true;
    thread_.join();
  }

  int port() const { return port_; }
  // From now on one bit of what it hands on is another.
  void Garble() { garbles_ = true; }
  std::string seen() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return seen_;
  }

 private:
  void Carry(int to) {
    const Descriptor one(accept(listening_.get(), nullptr, nullptr));
    const Descriptor two = ConnectTo(to);
    const int ends[] = {one.get(), two.get()};
    for (std::vector<char> data(1 << 16); !stop_;) {
      pollfd waits[] = {{.fd = ends[0], .events = POLLIN}, {.fd = ends[1], .events = POLLIN}};
      poll(waits, 2, 10);
      for (int from : {0, 1}) {
        if (waits[from].revents == 0) continue;
        const ssize_t got = read(ends[from], data.data(), data.size());
        if (got <= 0) return;
        {
          const std::lock_guard<std::mutex> lock(mutex_);
          seen_.append(data.data(), static_cast<size_t>(got));
        }
        // Behind a record's header of 5 bytes. An alert may follow in the same read.
        if (garbles_ && got > 10) data[10] ^= 1;
        for (ssize_t sent = 0; sent < got;) {
          const ssize_t more = send(ends[1 - from], data.data() + sent,
                                    static_cast<size_t>(got - sent), MSG_NOSIGNAL);
          if (more <= 0) return;
          sent += more;
        }
      }
    }
  }

  const Descriptor listening_;
  int port_ = 0;
  std::atomic<bool> stop_ = false;
  std::atomic<bool> garbles_ = false;
  std::mutex mutex_;
  std::string seen_;
  std::thread thread_;
};

TEST(TlsTest, WhoStandsBetweenReadsNothingAndChangesNothing) {
  MemoryRendezvous store;
  std::unique_ptr<Relay> relay;
  EditedRendezvous edited(store, [&](Announced* a) {
    relay = std::make_unique<Relay>(a->port_number());
    a->port = std::to_string(relay->port());
  });
  std::vector<Status> statuses;
  Group group = MakeTlsGroup(
      2,
      [&](int rank) -> Rendezvous& { return rank == 1 ? edited : static_cast<Rendezvous&>(store); },
      &statuses, Far());
  for (const Status& s : statuses) ASSERT_TRUE(s.ok()) << Text(s);

  const std::string secret = "partial results of attention, which nobody but ranks may read";
  const auto gather = [&](Deadline deadline) {
    OnEveryRank(2, [&](int rank) {
      std::vector<char> all(2 * secret.size());
      statuses[rank] = group[rank]->AllGather(secret.data(), all.data(), secret.size(), deadline);
      if (statuses[rank].ok()) {
        EXPECT_EQ(std::string(all.data(), all.size()), secret + secret);
      }
    });
  };
  gather(Far());
  for (const Status& s : statuses) EXPECT_TRUE(s.ok()) << Text(s);
  EXPECT_GT(relay->seen().size(), 2 * secret.size());
  EXPECT_EQ(relay->seen().find("partial results"), std::string::npos);

  relay->Garble();
  gather(Far());
  for (const Status& s : statuses) EXPECT_EQ(s.code(), StatusCode::kUnavailable) << Text(s);
  EXPECT_THAT(statuses[0].message() + statuses[1].message(), HasSubstr("bad record mac"));
  group.clear();
}

}  // namespace
}  // namespace tributary::collective
