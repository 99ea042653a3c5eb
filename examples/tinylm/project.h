// Matrix products of the model, in the widest vectors that the processor has.
#pragma once

#include "examples/tinylm/weights.h"

namespace tributary::tinylm {

// x W^T. A row's result does not depend on the other rows, nor on how many there are: verifying
// tokens together then writes the very text that decoding them one by one does.
Matrix Project(const Matrix& x, const Matrix& w);

}  // namespace tributary::tinylm
