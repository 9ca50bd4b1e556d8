// Which plan serves calls of given sizes: what the dispatcher decided (core/dispatch.py), for calls
// that come here without asking it again.
#pragma once

#include <array>
#include <cstdint>
#include <shared_mutex>
#include <string>
#include <unordered_map>

namespace fastkernels {

class Served {
 public:
  // What an operator's decision follows from, in an order of its own; unused ones are 0.
  using Sizes = std::array<int64_t, 8>;

  // The one of an operator; lives as long as the process.
  static Served& Of(const std::string& op);

  // A plan's handle; 0 where there is none.
  int64_t Find(const Sizes& sizes) const {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    auto found = plans_.find(sizes);
    return found == plans_.end() ? 0 : found->second;
  }

  void Add(const Sizes& sizes, int64_t plan);
  void Clear();

 private:
  struct Hash {
    size_t operator()(const Sizes& sizes) const {
      uint64_t hash = 0;
      for (int64_t size : sizes) hash = (hash ^ static_cast<uint64_t>(size)) * 0x9E3779B97F4A7C15u;
      return hash ^ hash >> 32;
    }
  };

  mutable std::shared_mutex mutex_;
  std::unordered_map<Sizes, int64_t, Hash> plans_;
};

}  // namespace fastkernels
