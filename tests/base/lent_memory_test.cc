#include "base/cuda/lent_memory.h"

#include <gtest/gtest.h>

#include <memory>

namespace tributary::cuda {
namespace {

TEST(LentMemory, StaysUntilTheLastShareIsDropped) {
  int memory = 0;
  int freed = 0;
  std::shared_ptr<void> of_lender = LendMemory(&memory, [&](void* address) {
    EXPECT_EQ(address, &memory);
    EXPECT_EQ(ShareOfLentMemory(&memory), nullptr);
    ++freed;
  });
  std::shared_ptr<void> other = ShareOfLentMemory(&memory);
  EXPECT_EQ(other.get(), &memory);
  of_lender.reset();
  EXPECT_EQ(freed, 0);
  EXPECT_EQ(ShareOfLentMemory(&memory).get(), &memory);
  other.reset();
  EXPECT_EQ(freed, 1);
  EXPECT_EQ(ShareOfLentMemory(&memory), nullptr);
  // The address may come again.
  of_lender = LendMemory(&memory, [&](void*) { ++freed; });
  EXPECT_NE(ShareOfLentMemory(&memory), nullptr);
  of_lender.reset();
  EXPECT_EQ(freed, 2);
}

TEST(LentMemory, WhatNobodyLendsIsNotShared) {
  const int memory = 0;
  EXPECT_EQ(ShareOfLentMemory(&memory), nullptr);
}

}  // namespace
}  // namespace tributary::cuda
