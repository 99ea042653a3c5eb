#pragma once

// Unrolls the loop that follows, whose bounds are constants: its arrays then live in registers.
#define TRIBUTARY_UNROLL _Pragma("GCC unroll 16")
