#pragma once

// Unrolls the loop that follows, whose bounds are constants: its arrays then live in registers.
#define TRIBUTARY_UNROLL _Pragma("GCC unroll 16")
// The opposite: for a body so long that copies of it would only fill the instruction cache.
#define TRIBUTARY_KEEP_ROLLED _Pragma("GCC unroll 1")
