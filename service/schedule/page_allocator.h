// The virtual pages of one cache: who uses how many, and which are shared.
//
// A virtual page stands for page_size * N tokens: one physical page of all layers on every rank,
// under the same number everywhere. So one allocator decides for the whole group.
#pragma once

#include <cstdint>
#include <vector>

namespace tributary::service {

class PageAllocator {
 public:
  explicit PageAllocator(int32_t pages);

  // Takes `count` pages, each with one reference. All or nothing: false when fewer are free.
  bool Reserve(int32_t count, std::vector<int32_t>* pages);
  void Retain(int32_t page);
  // The last reference frees the page.
  void Release(int32_t page);

  // More than one holder: not to be written to.
  bool IsShared(int32_t page) const { return references_[page] > 1; }

  int32_t total() const { return total_; }
  int32_t used() const { return static_cast<int32_t>(references_.size() - returned_.size()); }
  int32_t free() const { return total() - used(); }
  int32_t shared() const { return shared_; }

 private:
  int32_t Take();

  // Memory grows with the pages that were ever taken, not with what a client asks for.
  int32_t total_;
  std::vector<int32_t> references_;  // by page, of those taken once; 0 for free
  std::vector<int32_t> returned_;    // the last is taken first: recently used pages are warm
  int32_t shared_ = 0;
};

}  // namespace tributary::service
