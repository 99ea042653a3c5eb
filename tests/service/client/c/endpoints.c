/* A session with two endpoints, each a process, over the C interface; the service's address is the
 * argument. The first process opens the session and tells the second one, over a pipe, how to join.
 * Ends with 0 when everything holds; says what does not. */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <tributary.h>
#include <unistd.h>

enum { kQHeads = 4, kKvHeads = 2, kDim = 64, kEndpoints = 2, kSteps = 3 };

static int failures = 0;
static void Check(int holds, const char* what, int line) {
  if (holds) return;
  fprintf(stderr, "endpoints.c:%d: does not hold: %s\n", line, what);
  ++failures;
}
#define CHECK(condition) Check((condition), #condition, __LINE__)

/* Every step brings a token whose values are 1 in KV head 0 and 2 in KV head 1. So is the output of
 * the query heads that have it. */
static void Drive(tributary_session* session, uint64_t sequence) {
  tributary_layer_shape shape = {.size = sizeof shape};
  CHECK(tributary_session_layer_shape(session, 0, &shape, NULL) == TRIBUTARY_OK);
  CHECK(shape.q_heads == kQHeads / kEndpoints);
  CHECK(shape.kv_heads == kKvHeads / kEndpoints);
  float q[kQHeads][kDim], k[kKvHeads][kDim], v[kKvHeads][kDim], output[kQHeads][kDim];
  for (int dim = 0; dim < kDim; ++dim) {
    for (int head = 0; head < kQHeads; ++head) q[head][dim] = 1;
    for (int head = 0; head < kKvHeads; ++head) k[head][dim] = 1, v[head][dim] = (float)(1 + head);
  }
  for (int at = 0; at < kSteps; ++at) {
    const tributary_step_entry entry = {
        .sequence = sequence, .first_position = at, .rows = 1, .new_tokens = 1};
    const tributary_step step = {
        .size = sizeof step, .layers = 1, .entries = &entry, .entry_count = 1};
    uint64_t number = 0;
    CHECK(tributary_session_submit(session, &step, &number, NULL) == TRIBUTARY_OK);
    const tributary_rows kv = {v[shape.first_kv_head], 1, shape.kv_heads, kDim, 0, 0};
    tributary_session_layer layer = {.size = sizeof layer, .k = kv, .v = kv};
    layer.q = (tributary_rows){q[shape.first_q_head], 1, shape.q_heads, kDim, 0, 0};
    layer.k.data = k[shape.first_kv_head];
    layer.output = (tributary_rows){output, 1, shape.q_heads, kDim, 0, 0};
    CHECK(tributary_session_attend(session, &layer, NULL) == TRIBUTARY_OK);
    for (int i = 0; i < shape.q_heads * kDim; ++i) {
      const int kv_head = (shape.first_q_head + i / kDim) / (kQHeads / kKvHeads);
      if (fabsf(output[0][i] - (float)(1 + kv_head)) < 1e-3f) continue;
      CHECK(!"the output is that of the endpoint's heads");
      break;
    }
    CHECK(tributary_session_await(session, number, NULL) == TRIBUTARY_OK);
  }
}

/* What the first process tells the second. */
struct told {
  tributary_session_info info;
  uint64_t sequence;
};

static tributary_client* Connect(const char* target) {
  const tributary_options options = {.size = sizeof options, .target = target};
  tributary_client* client = NULL;
  CHECK(tributary_connect(&options, &client, NULL) == TRIBUTARY_OK);
  return client;
}

static void Second(const char* target, int from) {
  struct told told;
  if (read(from, &told, sizeof told) != (ssize_t)sizeof told) {
    CHECK(!"the first process tells of the session");
    return;
  }
  tributary_client* client = Connect(target);
  tributary_endpoint endpoint = {
      .size = sizeof endpoint, .session = told.info.session, .endpoint = 1};
  tributary_session* session = NULL;
  tributary_error* error = NULL;
  /* Without the secret nobody joins. */
  CHECK(tributary_join_session(client, &endpoint, &session, NULL, &error) == TRIBUTARY_NOT_FOUND);
  CHECK(strcmp(tributary_error_field(error), "join.session_id") == 0);
  tributary_error_free(error);
  memcpy(endpoint.secret, told.info.secret, sizeof endpoint.secret);
  endpoint.memory = TRIBUTARY_MEMORY_MESSAGES;
  CHECK(tributary_join_session(client, &endpoint, &session, NULL, NULL) ==
        TRIBUTARY_INVALID_ARGUMENT);
  CHECK(session == NULL);
  endpoint.memory = TRIBUTARY_MEMORY_HOST;
  tributary_session_info info = {.size = sizeof info};
  CHECK(tributary_join_session(client, &endpoint, &session, &info, NULL) == TRIBUTARY_OK);
  CHECK(info.endpoint == 1 && info.endpoints == kEndpoints);
  CHECK(info.memory == TRIBUTARY_MEMORY_HOST && info.dtype == TRIBUTARY_F32);
  if (session != NULL) Drive(session, told.sequence);
  tributary_session_close(session, NULL);
  tributary_close(client);
}

static void First(const char* target, int to) {
  tributary_client* client = Connect(target);
  tributary_cache_spec spec;
  memset(&spec, 0, sizeof spec);
  spec.size = sizeof spec;
  spec.layers = 1;
  spec.q_heads = kQHeads;
  spec.kv_heads = kKvHeads;
  spec.head_dim = kDim;
  spec.kv_dtype = TRIBUTARY_BF16;
  spec.capacity_tokens = 1024;
  CHECK(tributary_create_cache(client, "endpoints", &spec, NULL, NULL) == TRIBUTARY_OK);
  struct told told = {.info = {.size = sizeof told.info}};
  CHECK(tributary_open_sequence(client, "endpoints", &told.sequence, NULL) == TRIBUTARY_OK);
  const tributary_session_options options = {.size = sizeof options,
                                             .cache = "endpoints",
                                             .memory = TRIBUTARY_MEMORY_HOST,
                                             .max_rows = 1,
                                             .max_new_tokens = 1,
                                             .endpoints = kEndpoints};
  tributary_session* session = NULL;
  CHECK(tributary_open_session(client, &options, &session, &told.info, NULL) == TRIBUTARY_OK);
  CHECK(told.info.endpoint == 0 && told.info.endpoints == kEndpoints);
  CHECK(write(to, &told, sizeof told) == (ssize_t)sizeof told);
  if (session != NULL) Drive(session, told.sequence);
  tributary_session_close(session, NULL);
  tributary_close(client);
}

int main(int argc, char** argv) {
  int ends[2];
  if (argc != 2 || pipe(ends) != 0) return 2;
  const pid_t second = fork(); /* before the library has any thread */
  if (second == 0) {
    Second(argv[1], ends[0]);
    return failures == 0 ? 0 : 1;
  }
  First(argv[1], ends[1]);
  int status = 1;
  waitpid(second, &status, 0);
  CHECK(status == 0);
  return failures == 0 ? 0 : 1;
}
