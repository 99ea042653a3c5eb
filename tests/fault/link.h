// A connection that a test may slow down or cut without either end being told: a proxy between two
// Unix sockets.
#pragma once

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

namespace tributary::test {

class Link {
 public:
  // Listens at `path`, and connects whoever comes to `target`, the path of another socket.
  Link(std::string path, std::string target);
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  // From now on nothing gets through, in either direction; what is under way arrives later.
  void Cut() { cut_ = true; }
  void Mend() { cut_ = false; }
  // From now on everything arrives so much later.
  void SetDelay(std::chrono::milliseconds delay) { delay_ = delay; }

 private:
  void Accept();
  // Carries bytes one way until one end is closed.
  void Carry(int from, int to);

  const std::string path_, target_;
  int listening_ = -1;
  std::atomic<bool> stopping_ = false;
  std::atomic<bool> cut_ = false;
  std::atomic<std::chrono::milliseconds> delay_{std::chrono::milliseconds(0)};
  std::thread accepting_;
};

}  // namespace tributary::test
