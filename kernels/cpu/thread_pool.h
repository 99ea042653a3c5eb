// A fixed set of threads that run the parts of one job at a time. Jobs of several callers queue.
//
// Jobs of a step follow one another within microseconds, and waking a thread takes longer than
// that: a thread looks for 50 us whether there is another job (the caller: whether the others are
// done) before it sleeps. An idle pool uses no processor time.
#pragma once

#include <functional>
#include <memory>

namespace tributary::cpu {

class ThreadPool {
 public:
  // `threads` counts the caller, which takes part: 1 starts no thread.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const;

  // Calls body(part) once for every part in [0, parts), on any thread, and returns when all are
  // done.
  void Run(int parts, const std::function<void(int part)>& body);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tributary::cpu
