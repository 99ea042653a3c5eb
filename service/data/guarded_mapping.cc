#include "service/data/guarded_mapping.h"

#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

namespace tributary::service {

// All mappings of this process. A signal handler can be told nothing, so there is one list per
// process, which the handler finds by itself.
//
// The lock is made of one atomic word, because a handler may not wait for a mutex. The thread that
// the signal interrupted does not hold it: while it is held nobody touches mapped memory.
class GuardedMappings {
 public:
  static GuardedMappings& OfProcess() {
    static GuardedMappings* const mappings = new GuardedMappings;  // outlives every thread
    return *mappings;
  }

  void Add(GuardedMapping* mapping) {
    const Lock lock(locked_);
    mapping->next_ = first_;
    if (first_ != nullptr) first_->previous_ = mapping;
    first_ = mapping;
  }

  void Remove(GuardedMapping* mapping) {
    const Lock lock(locked_);
    (mapping->previous_ == nullptr ? first_ : mapping->previous_->next_) = mapping->next_;
    if (mapping->next_ != nullptr) mapping->next_->previous_ = mapping->previous_;
  }

 private:
  class Lock {
   public:
    explicit Lock(std::atomic<bool>& locked) : locked_(locked) {
      while (locked_.exchange(true, std::memory_order_acquire)) sched_yield();
    }
    ~Lock() { locked_.store(false, std::memory_order_release); }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

   private:
    std::atomic<bool>& locked_;
  };

  GuardedMappings() {
    struct sigaction action {};
    action.sa_sigaction = [](int signal, siginfo_t* info, void* context) {
      OfProcess().OnSignal(signal, info, context);
    };
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, &before_);
  }

  void OnSignal(int signal, siginfo_t* info, void* context) {
    const int error = errno;
    // Only what the processor reports has a code above 0; others may send the signal, too.
    if (info->si_code > 0 && Replace(reinterpret_cast<uintptr_t>(info->si_addr))) {
      errno = error;
      return;
    }
    // Not ours: what would have happened without us. After SIG_DFL the access is repeated and ends
    // the process where it went wrong.
    if ((before_.sa_flags & SA_SIGINFO) != 0) {
      before_.sa_sigaction(signal, info, context);
    } else if (before_.sa_handler != SIG_DFL && before_.sa_handler != SIG_IGN) {
      before_.sa_handler(signal);
    } else {
      sigaction(SIGBUS, &before_, nullptr);
      if (info->si_code <= 0) raise(SIGBUS);
    }
    errno = error;
  }

  // Whether the address lies in a mapping, which is memory without an object from now on. The
  // mapping stays while we look at it: the thread that touched it keeps it.
  bool Replace(uintptr_t address) {
    GuardedMapping* const mapping = Find(address);
    if (mapping == nullptr) return false;
    mapping->cut_short_.store(true);  // before anybody can read what lies there then
    return mmap(mapping->data_, mapping->bytes_, PROT_READ | PROT_WRITE,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) != MAP_FAILED;
  }

  GuardedMapping* Find(uintptr_t address) {
    const Lock lock(locked_);
    for (GuardedMapping* mapping = first_; mapping != nullptr; mapping = mapping->next_) {
      if (address - reinterpret_cast<uintptr_t>(mapping->data_) < mapping->bytes_) return mapping;
    }
    return nullptr;
  }

  struct sigaction before_ {};
  std::atomic<bool> locked_{false};
  GuardedMapping* first_ = nullptr;
};

std::unique_ptr<GuardedMapping> GuardedMapping::Create(int file, size_t bytes) {
  GuardedMappings& mappings = GuardedMappings::OfProcess();
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (data == MAP_FAILED) return nullptr;
  std::unique_ptr<GuardedMapping> mapping(new GuardedMapping(static_cast<std::byte*>(data), bytes));
  mappings.Add(mapping.get());
  return mapping;
}

void GuardedMapping::Pin(const MemoryPinner& pinner, size_t first) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t begin = first / page * page;
  if (pinner) pin_ = pinner(data_ + begin, bytes_ - begin);
}

GuardedMapping::~GuardedMapping() {
  pin_.reset();
  GuardedMappings::OfProcess().Remove(this);
  munmap(data_, bytes_);
}

}  // namespace tributary::service
