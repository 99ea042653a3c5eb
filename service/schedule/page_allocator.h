// The virtual pages of one group of layers: how many are used, and which are shared.
//
// A virtual page stands for page_size * N tokens. On every rank it is one physical page, which has
// the same number everywhere. So one allocator decides for all ranks. SequenceTable owns it.
#pragma once

#include <cstdint>
#include <vector>

namespace tributary::service {

class PageAllocator {
 public:
  explicit PageAllocator(int32_t pages);

  // Takes `count` pages, each with one reference. False when fewer are free; then it takes none.
  bool Reserve(int32_t count, std::vector<int32_t>* pages);
  void Retain(int32_t page);
  // Drops a reference. The last one frees the page.
  void Release(int32_t page);

  // Rebuilds a table: takes a reference to a page, whether or not it is taken already. FinishClaims
  // must follow the last Claim, with no other call between. Returns false for an unknown page.
  bool Claim(int32_t page);
  void FinishClaims();

  // Pages with numbers from this one on were never taken.
  int32_t ever_taken() const { return static_cast<int32_t>(references_.size()); }
  // Whether more than one sequence holds the page, so that none of them may write to it.
  bool IsShared(int32_t page) const { return references_[page] > 1; }

  // How many references a page has that was taken at some time.
  int32_t references(int32_t page) const { return references_[page]; }
  int32_t total() const { return total_; }
  int32_t used() const { return static_cast<int32_t>(references_.size() - returned_.size()); }
  int32_t free() const { return total() - used(); }
  int32_t shared() const { return shared_; }

 private:
  int32_t Take();

  // The vectors grow with the number of pages that were ever taken, not with what a client asks
  // for.
  int32_t total_;
  std::vector<int32_t> references_;  // [pages ever taken]; 0 for a free page
  // Free pages. The last is taken first, because recently used pages are warm.
  std::vector<int32_t> returned_;
  int32_t shared_ = 0;
};

}  // namespace tributary::service
