// Numbers for people.
#pragma once

#include <cstdint>
#include <string>

namespace tributary::cli {

std::string Bytes(double bytes);                 // "512 B", "1.50 MiB"
std::string Count(int64_t count);                // "1,234,567"
std::string Rate(double per_second);             // "1,234", "12.3"
std::string Seconds(double seconds);             // "85.0 us", "1.25 ms", "3.00 s", "2 h 5 min"
std::string Percent(double part, double whole);  // "12.5%"; "-" of nothing

}  // namespace tributary::cli
