// Which plan serves calls of which sizes: what the dispatcher decided (core/dispatch.py), for calls
// that come here without asking it again.
#pragma once

#include <array>
#include <cstdint>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace fastkernels {

class Served {
 public:
  // What an operator's decision follows from, in an order of its own; unused ones are 0. What is
  // fixed must be equal; of what varies a decision holds for a range, both ends included.
  using Fixed = std::array<int64_t, 6>;
  using Varying = std::array<int64_t, 2>;

  // The one of an operator; lives as long as the process.
  static Served& Of(const std::string& op);

  // A plan's handle; 0 where there is none.
  int64_t Find(const Fixed& fixed, const Varying& at) const {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    auto found = boxes_.find(fixed);
    if (found == boxes_.end()) return 0;
    for (const Box& box : found->second) {
      if (box.low[0] <= at[0] && at[0] <= box.high[0] && box.low[1] <= at[1] &&
          at[1] <= box.high[1]) {
        return box.plan;
      }
    }
    return 0;
  }

  void Add(const Fixed& fixed, const Varying& low, const Varying& high, int64_t plan);
  void Clear();

 private:
  struct Box {
    Varying low, high;
    int64_t plan;
  };

  struct Hash {
    size_t operator()(const Fixed& sizes) const {
      uint64_t hash = 0;
      for (int64_t size : sizes) hash = (hash ^ static_cast<uint64_t>(size)) * 0x9E3779B97F4A7C15u;
      return hash ^ hash >> 32;
    }
  };

  mutable std::shared_mutex mutex_;
  std::unordered_map<Fixed, std::vector<Box>, Hash> boxes_;
};

}  // namespace fastkernels
