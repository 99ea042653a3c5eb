#include "service/page_allocator.h"

namespace tributary::service {

PageAllocator::PageAllocator(int32_t pages) : references_(pages, 0) {
  free_.reserve(pages);
  for (int32_t page = pages - 1; page >= 0; --page) free_.push_back(page);
}

bool PageAllocator::Reserve(int32_t count, std::vector<int32_t>* pages) {
  if (count > free()) return false;
  for (int32_t i = 0; i < count; ++i) {
    const int32_t page = free_.back();
    free_.pop_back();
    references_[page] = 1;
    pages->push_back(page);
  }
  return true;
}

void PageAllocator::Retain(int32_t page) {
  if (++references_[page] == 2) ++shared_;
}

void PageAllocator::Release(int32_t page) {
  const int32_t left = --references_[page];
  if (left == 1) --shared_;
  if (left == 0) free_.push_back(page);
}

}  // namespace tributary::service
