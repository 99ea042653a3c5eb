#include "service/schedule/page_allocator.h"

namespace tributary::service {

PageAllocator::PageAllocator(int32_t pages) : total_(pages) {}

bool PageAllocator::Reserve(int32_t count, std::vector<int32_t>* pages) {
  if (count > free()) return false;
  for (int32_t i = 0; i < count; ++i) {
    pages->push_back(Take());
  }
  return true;
}

int32_t PageAllocator::Take() {
  if (returned_.empty()) {
    references_.push_back(1);
    return static_cast<int32_t>(references_.size()) - 1;
  }
  const int32_t page = returned_.back();
  returned_.pop_back();
  references_[page] = 1;
  return page;
}

bool PageAllocator::Claim(int32_t page) {
  if (page < 0 || page >= total_) return false;
  if (page >= static_cast<int32_t>(references_.size())) references_.resize(page + 1);
  Retain(page);
  return true;
}

void PageAllocator::FinishClaims() {
  returned_.clear();
  for (int32_t page = 0; page < static_cast<int32_t>(references_.size()); ++page) {
    if (references_[page] == 0) returned_.push_back(page);
  }
}

void PageAllocator::Retain(int32_t page) {
  if (++references_[page] == 2) ++shared_;
}

void PageAllocator::Release(int32_t page) {
  const int32_t left = --references_[page];
  if (left == 1) --shared_;
  if (left == 0) returned_.push_back(page);
}

}  // namespace tributary::service
