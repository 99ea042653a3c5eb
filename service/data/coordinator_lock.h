// The name under which clang's thread safety analysis knows the lock of a coordinator.
//
// The classes of a coordinator share one lock (service/coordinator/critical_section.h). The
// analysis compares locks by the expression that names them, and would take `steps_.lock_` and
// `regions_.lock_` for two locks. So the state of these classes is annotated with this one name.
// It has no state and costs nothing at run time.
#pragma once

#include "base/sync/mutex.h"

namespace tributary::service {

class TRIBUTARY_THREAD_ANNOTATION(capability("coordinator lock")) CoordinatorLockName {};

inline constexpr CoordinatorLockName kCoordinatorLock;

}  // namespace tributary::service

// A function, or a lambda, that is called with the coordinator's lock held.
#define TRIBUTARY_LOCKED TRIBUTARY_REQUIRES(::tributary::service::kCoordinatorLock)
// A function that takes the coordinator's lock itself: its caller must not hold it.
#define TRIBUTARY_UNLOCKED TRIBUTARY_EXCLUDES(::tributary::service::kCoordinatorLock)
