// Errors of operators. Across the stable ABI, std::invalid_argument arrives in Python as ValueError
// and std::out_of_range as IndexError.
#pragma once

#include <sstream>
#include <stdexcept>

namespace gact_graph {

template <typename Error, typename... Parts>
[[noreturn, gnu::cold, gnu::noinline]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw Error(message.str());
}

}  // namespace gact_graph

// The parts of the message are evaluated only if the condition is false.
#define GACT_CHECK(Error, condition, ...)                                          \
  do {                                                                             \
    if (__builtin_expect(!(condition), 0)) ::gact_graph::fail<Error>(__VA_ARGS__); \
  } while (false)
#define GACT_CHECK_VALUE(condition, ...) GACT_CHECK(std::invalid_argument, condition, __VA_ARGS__)
#define GACT_CHECK_INDEX(condition, ...) GACT_CHECK(std::out_of_range, condition, __VA_ARGS__)
