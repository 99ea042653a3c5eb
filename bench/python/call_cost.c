/* What a call and a session's step of one layer cost a host in C: call_cost.py runs this in turns
 * with the same loop in Python, and tells the difference. `call_cost_bench TARGET` prints JSON. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <time.h>
#include <tributary.h>

enum { kHeads = 8, kKvHeads = 2, kDim = 128, kContext = 1024, kWarmup = 50, kTimes = 1000 };

static float q[kHeads][kDim], k[kKvHeads][kDim], v[kKvHeads][kDim], output[kHeads][kDim];
static float context[kContext][kKvHeads][kDim];

static void check(tributary_code code, const char* what, tributary_error* error) {
  if (code == TRIBUTARY_OK) return;
  fprintf(stderr, "call_cost_bench: %s: %s\n", what, tributary_error_message(error));
  exit(1);
}

static double cpu_us(void) {
  struct rusage used;
  getrusage(RUSAGE_SELF, &used);
  return 1e6 * (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
         (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec);
}

static double wall_us(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return 1e6 * (double)now.tv_sec + 1e-3 * (double)now.tv_nsec;
}

static tributary_entry begin(tributary_client* client) {
  tributary_error* error = NULL;
  tributary_entry entry = {.rows = kContext};
  check(tributary_open_sequence(client, "c", &entry.sequence, &error), "open", error);
  const tributary_call call = {.size = sizeof call,
                               .cache = "c",
                               .entries = &entry,
                               .entry_count = 1,
                               .dtype = TRIBUTARY_F32,
                               .kv_heads = kKvHeads,
                               .head_dim = kDim,
                               .k = context,
                               .v = context};
  check(tributary_append(client, &call, &error), "append", error);
  entry.first_position = kContext;
  entry.rows = 1;
  entry.new_tokens = 1;
  return entry;
}

static void attend(tributary_client* client, tributary_entry* entry) {
  tributary_error* error = NULL;
  const tributary_call call = {.size = sizeof call,
                               .cache = "c",
                               .entries = entry,
                               .entry_count = 1,
                               .dtype = TRIBUTARY_F32,
                               .q_heads = kHeads,
                               .kv_heads = kKvHeads,
                               .head_dim = kDim,
                               .q = q,
                               .k = k,
                               .v = v,
                               .output = output};
  check(tributary_attend(client, &call, &error), "attend", error);
  ++entry->first_position;
}

static void step(tributary_session* session, tributary_step_entry* entry) {
  tributary_error* error = NULL;
  const tributary_step whole = {
      .size = sizeof whole, .layers = 1, .entries = entry, .entry_count = 1};
  const tributary_session_layer layer = {
      .size = sizeof layer,
      .q = {.data = q, .rows = 1, .heads = kHeads, .dim = kDim},
      .k = {.data = k, .rows = 1, .heads = kKvHeads, .dim = kDim},
      .v = {.data = v, .rows = 1, .heads = kKvHeads, .dim = kDim},
      .output = {.data = output, .rows = 1, .heads = kHeads, .dim = kDim}};
  uint64_t number = 0;
  check(tributary_session_submit(session, &whole, &number, &error), "submit", error);
  check(tributary_session_attend(session, &layer, &error), "attend", error);
  check(tributary_session_await(session, number, &error), "await", error);
  ++entry->first_position;
}

int main(int argc, char** argv) {
  if (argc != 2) {
    fprintf(stderr, "usage: call_cost_bench TARGET\n");
    return 2;
  }
  tributary_client* client = NULL;
  tributary_error* error = NULL;
  const tributary_options options = {
      .size = sizeof options, .target = argv[1], .shared_memory_bytes = 16 << 20};
  check(tributary_connect(&options, &client, &error), "connect", error);
  const tributary_cache_spec spec = {.size = sizeof spec,
                                     .layers = 1,
                                     .q_heads = kHeads,
                                     .kv_heads = kKvHeads,
                                     .head_dim = kDim,
                                     .kv_dtype = TRIBUTARY_FP8_E4M3,
                                     .capacity_tokens = 1 << 14};
  check(tributary_create_cache(client, "c", &spec, NULL, &error), "create cache", error);
  for (int i = 0; i < kContext * kKvHeads * kDim; ++i)
    ((float*)context)[i] = (float)(i * 7919 % 1000) / 500.0F - 1.0F;
  for (int i = 0; i < kHeads * kDim; ++i) ((float*)q)[i] = ((float*)context)[i];

  tributary_entry entry = begin(client);
  for (int i = 0; i < kWarmup; ++i) attend(client, &entry);
  double cpu = cpu_us(), wall = wall_us();
  for (int i = 0; i < kTimes; ++i) attend(client, &entry);
  printf("{\"call\": {\"cpu_us\": %.2f, \"wall_us\": %.2f}, ", (cpu_us() - cpu) / kTimes,
         (wall_us() - wall) / kTimes);

  entry = begin(client);
  tributary_step_entry rows = {
      .sequence = entry.sequence, .first_position = kContext, .rows = 1, .new_tokens = 1};
  tributary_session* session = NULL;
  const tributary_session_options terms = {
      .size = sizeof terms, .cache = "c", .max_rows = 1, .max_new_tokens = 1};
  check(tributary_open_session(client, &terms, &session, NULL, &error), "open session", error);
  for (int i = 0; i < kWarmup; ++i) step(session, &rows);
  cpu = cpu_us();
  wall = wall_us();
  for (int i = 0; i < kTimes; ++i) step(session, &rows);
  printf("\"step\": {\"cpu_us\": %.2f, \"wall_us\": %.2f}}\n", (cpu_us() - cpu) / kTimes,
         (wall_us() - wall) / kTimes);
  check(tributary_session_close(session, &error), "close session", error);
  check(tributary_delete_cache(client, "c", &error), "delete cache", error);
  tributary_close(client);
  return 0;
}
