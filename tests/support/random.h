// Random numbers for tests: the same for the same seed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <random>
#include <vector>

namespace tributary::test {

// SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA
// 2014), an engine for the distributions of <random>. Its state is one word, so a generator per
// token costs nothing; one of std::mt19937 fills 624 words first.
class SplitMix64 {
 public:
  using result_type = uint64_t;

  explicit SplitMix64(uint64_t seed) : state_(seed) {}

  static constexpr result_type min() { return 0; }
  static constexpr result_type max() { return std::numeric_limits<result_type>::max(); }

  result_type operator()() {
    state_ += 0x9e3779b97f4a7c15;
    uint64_t mixed = state_;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111eb;
    return mixed ^ (mixed >> 31);
  }

 private:
  uint64_t state_;
};

// One seed made of several numbers, each of which changes it.
inline uint64_t MixSeeds(std::initializer_list<uint64_t> numbers) {
  uint64_t mixed = 0;
  for (const uint64_t number : numbers) mixed = SplitMix64(mixed ^ number)();
  return mixed;
}

// `count` numbers of a normal distribution around 0.
inline std::vector<float> NormalValues(size_t count, uint64_t seed, float deviation = 1.0f) {
  SplitMix64 random(seed);
  std::normal_distribution<float> normal(0.0f, deviation);
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

}  // namespace tributary::test
