/* The service within this process, in C. libtributary_embedded.so.1 has it, and all of tributary.h:
 * a program links to this library or to libtributary.so.1, never to both.
 *
 * All of tributary.h's rules hold here, for structures' sizes and for errors. */
#ifndef TRIBUTARY_EMBEDDED_H_
#define TRIBUTARY_EMBEDDED_H_

#include <stdint.h>

#include "tributary.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A coordinator and its workers, as threads of this process. */
typedef struct tributary_service tributary_service;

typedef struct tributary_service_options {
  size_t size;
  /* The path of its Unix socket, at most 107 bytes, which only this user reaches. NULL or "": it
   * lies in a folder of its own, which ends with the service. */
  const char* socket;
  const char* device;         /* "cpu" or "cuda"; NULL or "": "cpu" */
  int32_t workers;            /* parts that each sequence is spread over; 0: 1. With "cuda": GPUs */
  int32_t threads;            /* of all workers together; 0: as many as the machine has */
  int64_t memory_limit_bytes; /* of caches, on all workers together; 0: the machine's */
  int32_t first_gpu;          /* worker r takes GPU first_gpu + r */
  int32_t deterministic;      /* 1: results do not depend on what shares their step */
} tributary_service_options;

/* Since 1.2. Serves when it returns. INVALID_ARGUMENT names a field of the options;
 * FAILED_PRECONDITION: the device is missing; UNAVAILABLE: the socket cannot be bound. */
tributary_code tributary_serve(const tributary_service_options* options,
                               tributary_service** service, tributary_error** error);
/* Since 1.2. The target of its clients: "unix:" and the socket's path. Valid until it is stopped.
 */
const char* tributary_service_target(const tributary_service* service);
/* Since 1.2. Refuses new calls, waits at most drain_ms for accepted ones, and ends with all caches.
 * Clients are closed by their owners, before or after. NULL is allowed. */
void tributary_service_stop(tributary_service* service, int64_t drain_ms);

#ifdef __cplusplus
}
#endif

#endif /* TRIBUTARY_EMBEDDED_H_ */
