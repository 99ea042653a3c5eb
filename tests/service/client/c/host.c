/* The C interface against a service, whose address is the argument. A C program of its own: one
 * process has either libtributary or the C++ client. Ends with 0 when everything holds; says what
 * does not. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <tributary.h>

enum { kHeads = 2, kDim = 64, kMost = 8 };

static int failures = 0;
static void Check(int holds, const char* what, int line) {
  if (holds) return;
  fprintf(stderr, "host.c:%d: does not hold: %s\n", line, what);
  ++failures;
}
#define CHECK(condition) Check((condition), #condition, __LINE__)

static float ones[kMost][kHeads][kDim];
static float output[kMost][kHeads][kDim];
static float lse[kMost][kHeads];

/* A call of `rows` rows at `position` whose keys and values are all 1. */
static tributary_call Call(tributary_entry* entry, int rows) {
  entry->rows = rows;
  entry->new_tokens = rows;
  tributary_call call;
  memset(&call, 0, sizeof call);
  call.size = sizeof call;
  call.cache = "c";
  call.entries = entry;
  call.entry_count = 1;
  call.dtype = TRIBUTARY_F32;
  call.q_heads = kHeads;
  call.kv_heads = kHeads;
  call.head_dim = kDim;
  call.q = ones;
  call.k = ones;
  call.v = ones;
  call.output = output;
  call.lse = &lse[0][0];
  return call;
}

static void Connecting(void) {
  tributary_client* none = NULL;
  tributary_error* error = NULL;
  CHECK(tributary_connect(NULL, &none, &error) == TRIBUTARY_INVALID_ARGUMENT);
  CHECK(strcmp(tributary_error_field(error), "options") == 0);
  tributary_error_free(error);
  const tributary_options no_size = {.target = "unix:/nowhere"};
  CHECK(tributary_connect(&no_size, &none, &error) == TRIBUTARY_INVALID_ARGUMENT);
  CHECK(strcmp(tributary_error_field(error), "options.size") == 0);
  tributary_error_free(error);
  const tributary_options nobody = {
      .size = sizeof nobody, .target = "unix:/nowhere", .timeout_ms = 100};
  CHECK(tributary_connect(&nobody, &none, NULL) == TRIBUTARY_UNAVAILABLE);
  CHECK(none == NULL);
  tributary_close(NULL);
  tributary_error_free(NULL);
}

/* What a function that was given NULL said: the name of the argument, as the error's field. */
static void CheckMissing(tributary_code code, tributary_error* error, const char* name, int line) {
  Check(code == TRIBUTARY_INVALID_ARGUMENT, name, line);
  Check(error != NULL && strcmp(tributary_error_field(error), name) == 0, name, line);
  tributary_error_free(error);
}
#define MISSING(name, call)                      \
  do {                                           \
    tributary_error* error = NULL;               \
    const tributary_code code = (call);          \
    CheckMissing(code, error, (name), __LINE__); \
  } while (0)

static void CountRefusal(void* context, tributary_code code, const tributary_error* error) {
  CHECK(code == TRIBUTARY_INVALID_ARGUMENT);
  CHECK(strcmp(tributary_error_field(error), "client") == 0);
  ++*(int*)context;
}

static void NullClients(tributary_client* client) {
  tributary_entry entry = {0};
  const tributary_call call = Call(&entry, 1);
  const tributary_options options = {.size = sizeof options, .target = "unix:/nowhere"};
  const tributary_cache_spec spec = {.size = sizeof spec};
  const tributary_session_options wanted = {.size = sizeof wanted, .cache = "c"};
  const tributary_endpoint endpoint = {.size = sizeof endpoint};
  tributary_update update = {TRIBUTARY_OPEN, 0, 0, 0};
  tributary_client* other = NULL;
  tributary_session* session = NULL;
  uint64_t sequence = 0;
  MISSING("client", tributary_connect(&options, NULL, &error));
  MISSING("client", tributary_with_timeout(NULL, 10, &other, &error));
  MISSING("other", tributary_with_timeout(client, 10, NULL, &error));
  MISSING("client", tributary_create_cache(NULL, "c", &spec, NULL, &error));
  MISSING("client", tributary_delete_cache(NULL, "c", &error));
  MISSING("client", tributary_open_sequence(NULL, "c", &sequence, &error));
  MISSING("client", tributary_reopen_sequence(NULL, "c", 1, &error));
  MISSING("client", tributary_fork_sequence(NULL, "c", 1, -1, &sequence, &error));
  MISSING("client", tributary_truncate_sequence(NULL, "c", 1, 0, NULL, &error));
  MISSING("client", tributary_close_sequence(NULL, "c", 1, &error));
  MISSING("client", tributary_update_sequences(NULL, "c", &update, 1, &error));
  MISSING("updates", tributary_update_sequences(client, "c", NULL, 1, &error));
  MISSING("client", tributary_append(NULL, &call, &error));
  MISSING("client", tributary_attend(NULL, &call, &error));
  MISSING("call", tributary_attend(client, NULL, &error));
  MISSING("client", tributary_open_session(NULL, &wanted, &session, NULL, &error));
  MISSING("session", tributary_open_session(client, &wanted, NULL, NULL, &error));
  MISSING("client", tributary_join_session(NULL, &endpoint, &session, NULL, &error));
  CHECK(tributary_attend(NULL, &call, NULL) == TRIBUTARY_INVALID_ARGUMENT);
  int told = 0;
  CHECK(tributary_attend_async(NULL, &call, CountRefusal, &told) == 0);
  CHECK(told == 1);
  CHECK(tributary_attend_async(client, &call, NULL, NULL) == 0);
  tributary_cancel(NULL, 1);
  char text[4] = "abc";
  CHECK(tributary_client_options(NULL, text, sizeof text) == 0);
  CHECK(text[0] == 0);
  CHECK(other == NULL && session == NULL);
}

static void NullSessions(void) {
  const tributary_step step = {.size = sizeof step};
  const tributary_session_layer layer = {.size = sizeof layer};
  tributary_layer_shape shape = {.size = sizeof shape};
  MISSING("session", tributary_session_layer_shape(NULL, 0, &shape, &error));
  MISSING("session", tributary_session_submit(NULL, &step, NULL, &error));
  MISSING("session", tributary_session_attend(NULL, &layer, &error));
  MISSING("session", tributary_session_append(NULL, &layer, &error));
  MISSING("session", tributary_session_await(NULL, 1, &error));
  MISSING("session", tributary_session_status(NULL, &error));
  CHECK(strcmp(tributary_session_warning(NULL), "") == 0);
  CHECK(tributary_session_close(NULL, NULL) == TRIBUTARY_OK);
  tributary_session_abandon(NULL);
}

static void Caches(tributary_client* client) {
  const float sinks[kHeads] = {0.0f, 1.0f};
  const tributary_layer layers[2] = {
      {.size = sizeof layers[0], .has_window_left = 1, .window_left = 100},
      {.size = sizeof layers[0], .sinks = sinks, .sink_count = kHeads}};
  tributary_cache_spec spec = {.size = sizeof spec,
                               .layers = 2,
                               .q_heads = kHeads,
                               .kv_heads = kHeads,
                               .head_dim = kDim,
                               .kv_dtype = TRIBUTARY_BF16,
                               .capacity_tokens = 1000,
                               .layer_specs = layers,
                               .layer_count = 2};
  tributary_cache_info info = {.size = sizeof info};
  CHECK(tributary_create_cache(client, "c", &spec, &info, NULL) == TRIBUTARY_OK);
  CHECK(info.ranks == 2 && info.capacity_tokens >= 1000 && info.page_size == 16);
  CHECK(tributary_create_cache(client, "c", &spec, NULL, NULL) == TRIBUTARY_OK);

  tributary_error* error = NULL;
  spec.head_dim = 65;
  const tributary_code refused = tributary_create_cache(client, "other", &spec, NULL, &error);
  CHECK(refused == TRIBUTARY_FAILED_PRECONDITION || refused == TRIBUTARY_INVALID_ARGUMENT);
  CHECK(strlen(tributary_error_message(error)) > 0);
  tributary_error_free(error);
}

static void Sequences(tributary_client* client) {
  tributary_entry entry = {0};
  CHECK(tributary_open_sequence(client, "c", &entry.sequence, NULL) == TRIBUTARY_OK);
  tributary_call call = Call(&entry, 4);
  for (call.layer = 0; call.layer < 2; ++call.layer)
    CHECK(tributary_append(client, &call, NULL) == TRIBUTARY_OK);
  uint64_t child = 0;
  CHECK(tributary_fork_sequence(client, "c", entry.sequence, 2, &child, NULL) == TRIBUTARY_OK);
  int64_t held = 0;
  CHECK(tributary_truncate_sequence(client, "c", entry.sequence, 3, &held, NULL) == TRIBUTARY_OK);
  CHECK(held == 3);

  tributary_update updates[4] = {{TRIBUTARY_OPEN, 0, 0, 0},
                                 {TRIBUTARY_FORK, 0, entry.sequence, -1},
                                 {TRIBUTARY_FORK, 0, entry.sequence, 1},
                                 {TRIBUTARY_TRUNCATE, entry.sequence, 0, 3}};
  CHECK(tributary_update_sequences(client, "c", updates, 4, NULL) == TRIBUTARY_OK);
  CHECK(updates[0].sequence != 0 && updates[1].sequence != updates[2].sequence);
  CHECK(updates[3].sequence == entry.sequence);
  CHECK(tributary_truncate_sequence(client, "c", updates[1].sequence, 9, &held, NULL) ==
        TRIBUTARY_OK);
  CHECK(held == 3);
  for (int i = 0; i < 3; ++i) updates[i].kind = TRIBUTARY_CLOSE;
  updates[3].sequence = 12345;
  tributary_error* unknown = NULL;
  CHECK(tributary_update_sequences(client, "c", updates, 4, &unknown) == TRIBUTARY_NOT_FOUND);
  CHECK(strncmp(tributary_error_field(unknown), "updates[3]", 10) == 0);
  tributary_error_free(unknown);
  CHECK(tributary_update_sequences(client, "c", updates, 3, NULL) == TRIBUTARY_OK);

  call.layer = 0;
  entry.first_position = 3;
  CHECK(tributary_attend(client, &call, NULL) == TRIBUTARY_OK);
  CHECK(fabsf(output[3][1][0] - 1.0f) < 1e-2f);
  /* Seven equal keys, q.k / sqrt(64) = 8. */
  CHECK(fabsf(lse[3][0] - (8.0f + logf(7.0f))) < 1e-2f);
  /* A repetition is answered alike. */
  CHECK(tributary_attend(client, &call, NULL) == TRIBUTARY_OK);

  tributary_error* error = NULL;
  entry.first_position = 50;
  CHECK(tributary_attend(client, &call, &error) == TRIBUTARY_OUT_OF_RANGE);
  CHECK(tributary_error_code(error) == TRIBUTARY_OUT_OF_RANGE);
  CHECK(strcmp(tributary_error_field(error), "entries[0].first_position") == 0);
  CHECK(tributary_error_length(error) == 7);
  CHECK(tributary_error_retry_delay_ms(error) == -1);
  tributary_error_free(error);
  call.entry_count = 0;
  CHECK(tributary_append(client, &call, NULL) == TRIBUTARY_INVALID_ARGUMENT);

  CHECK(tributary_close_sequence(client, "c", child, NULL) == TRIBUTARY_OK);
  CHECK(tributary_close_sequence(client, "c", child, NULL) == TRIBUTARY_NOT_FOUND);
}

/* Every value is 1, and so is every output. */
static void QuantizedOutputs(tributary_client* client) {
  tributary_entry entry = {0};
  CHECK(tributary_open_sequence(client, "c", &entry.sequence, NULL) == TRIBUTARY_OK);
  tributary_call call = Call(&entry, 4);
  unsigned char stored[4 * kHeads * kDim];
  call.output = stored;
  call.output_dtype = TRIBUTARY_FP8_E4M3;
  call.o_scale = 0.5f;
  const uint64_t elements = sizeof stored;
  CHECK(tributary_output_bytes(TRIBUTARY_FP8_E4M3, elements) == elements);
  CHECK(tributary_attend(client, &call, NULL) == TRIBUTARY_OK);
  CHECK(stored[0] == 0x40 && stored[elements - 1] == 0x40); /* 1 / o_scale, as e4m3 */
  call.o_scale = 0;                                         /* the layer's, which has none */
  CHECK(tributary_attend(client, &call, NULL) == TRIBUTARY_OK);
  CHECK(stored[0] == 0x38);
  call.output_dtype = TRIBUTARY_NVFP4;
  call.o_scale = 1.0f / 6;
  const uint64_t bytes = tributary_output_bytes(TRIBUTARY_NVFP4, elements);
  CHECK(bytes == elements / 2 + elements / 16);
  CHECK(tributary_attend(client, &call, NULL) == TRIBUTARY_OK);
  CHECK(stored[0] == 0x77 && stored[elements / 2 - 1] == 0x77);     /* 6 and 6, as e2m1 */
  CHECK(stored[elements / 2] == 0x38 && stored[bytes - 1] == 0x38); /* block scales of 1 */

  tributary_error* error = NULL;
  call.output_dtype = TRIBUTARY_BF16; /* which has no scale */
  CHECK(tributary_attend(client, &call, &error) == TRIBUTARY_INVALID_ARGUMENT);
  CHECK(strcmp(tributary_error_field(error), "o_scale") == 0);
  tributary_error_free(error);
  call.o_scale = 0;
  call.output_dtype = TRIBUTARY_FP8_E5M2;
  CHECK(tributary_attend(client, &call, &error) == TRIBUTARY_INVALID_ARGUMENT);
  CHECK(strcmp(tributary_error_field(error), "output_dtype") == 0);
  tributary_error_free(error);
  CHECK(tributary_output_bytes(TRIBUTARY_FP8_E5M2, elements) == 0);
}

/* A draft block of four rows without context; how many keys a row sees is told by its LSE. */
static void Drafts(tributary_client* client) {
  const tributary_layer layers[2] = {{.size = sizeof layers[0], .causal_block = 1, .o_scale = 2.0f},
                                     {.size = sizeof layers[0],
                                      .window_right = 1,
                                      .has_window_right = 1,
                                      .window_base = TRIBUTARY_WINDOW_ANCHOR}};
  const tributary_mode modes[1] = {TRIBUTARY_DFLASH};
  tributary_cache_spec spec = {.size = sizeof spec,
                               .layers = 2,
                               .q_heads = kHeads,
                               .kv_heads = kHeads,
                               .head_dim = kDim,
                               .capacity_tokens = 1000,
                               .layer_specs = layers,
                               .layer_count = 2,
                               .modes = modes,
                               .mode_count = 1,
                               .interleave = 4,
                               .fp8_queries = 1};
  CHECK(tributary_create_cache(client, "drafts", &spec, NULL, NULL) == TRIBUTARY_OK);
  tributary_entry entry = {0};
  CHECK(tributary_open_sequence(client, "drafts", &entry.sequence, NULL) == TRIBUTARY_OK);
  tributary_call call = Call(&entry, 4);
  call.cache = "drafts";
  call.mode = TRIBUTARY_DFLASH;
  CHECK(tributary_attend(client, &call, NULL) == TRIBUTARY_OK);
  for (int row = 0; row < 4; ++row) {
    CHECK(fabsf(lse[row][0] - (8.0f + logf((float)row + 1))) < 1e-2f);
  }
  unsigned char stored[4 * kHeads * kDim];
  call.output = stored;
  call.output_dtype = TRIBUTARY_FP8_E4M3;
  CHECK(tributary_attend(client, &call, NULL) == TRIBUTARY_OK);
  CHECK(stored[0] == 0x30); /* 1 / 2, the layer's scale */
  call.layer = 1;
  CHECK(tributary_attend(client, &call, NULL) == TRIBUTARY_OK);
  for (int row = 0; row < 4; ++row) CHECK(fabsf(lse[row][0] - (8.0f + logf(2.0f))) < 1e-2f);
  call.mode = TRIBUTARY_CAUSAL; /* which this cache was not made for */
  CHECK(tributary_attend(client, &call, NULL) == TRIBUTARY_FAILED_PRECONDITION);

  tributary_error* error = NULL;
  spec.modes = NULL;
  CHECK(tributary_create_cache(client, "other", &spec, NULL, &error) == TRIBUTARY_INVALID_ARGUMENT);
  CHECK(strcmp(tributary_error_field(error), "modes") == 0);
  tributary_error_free(error);
  spec.mode_count = 0;
  spec.fp8_queries = 0;
  spec.fp8_weights = 1;
  CHECK(tributary_create_cache(client, "other", &spec, NULL, &error) != TRIBUTARY_OK);
  CHECK(strstr(tributary_error_message(error), "fp8_weights") != NULL);
  tributary_error_free(error);
  spec.fp8_weights = 0;
  spec.has_replicas = 1;
  spec.replicas = 2;
  CHECK(tributary_create_cache(client, "other", &spec, NULL, &error) == TRIBUTARY_INVALID_ARGUMENT);
  CHECK(strcmp(tributary_error_field(error), "spec.replicas") == 0);
  tributary_error_free(error);
  CHECK(tributary_delete_cache(client, "drafts", NULL) == TRIBUTARY_OK);
}

/* Outcomes of calls that were made without waiting. */
typedef struct {
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  int ok, refused;
} outcomes;

static void Done(void* context, tributary_code code, const tributary_error* error) {
  outcomes* told = context;
  pthread_mutex_lock(&told->mutex);
  if (code == TRIBUTARY_OK && error == NULL) ++told->ok;
  if (code == TRIBUTARY_OUT_OF_RANGE && tributary_error_length(error) == 3) ++told->refused;
  pthread_cond_signal(&told->changed);
  pthread_mutex_unlock(&told->mutex);
}

static void WithoutWaiting(tributary_client* client) {
  outcomes told = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0};
  tributary_entry entry = {0};
  CHECK(tributary_open_sequence(client, "c", &entry.sequence, NULL) == TRIBUTARY_OK);
  tributary_call call = Call(&entry, 1);
  for (entry.first_position = 0; entry.first_position < 3; ++entry.first_position) {
    tributary_attend_async(client, &call, Done, &told);
  }
  pthread_mutex_lock(&told.mutex);
  while (told.ok < 3)
    pthread_cond_wait(&told.changed, &told.mutex); /* each ends by the client's timeout */
  pthread_mutex_unlock(&told.mutex);
  tributary_cancel(client, 12345); /* of no call */
  entry.first_position = 9;
  call.yield_ms = 1;
  CHECK(tributary_attend_async(client, &call, Done, &told) != 0);
  pthread_mutex_lock(&told.mutex);
  while (told.refused < 1) pthread_cond_wait(&told.changed, &told.mutex);
  pthread_mutex_unlock(&told.mutex);
}

static void Options(tributary_client* client) {
  char text[1024] = "";
  const size_t length = tributary_client_options(client, text, sizeof text);
  CHECK(length == strlen(text));
  CHECK(tributary_client_options(client, NULL, 0) == length);
  CHECK(strstr(text, "timeout: ") != NULL);
  CHECK(strncmp(text, "target: ", 8) == 0);
  char few[8];
  CHECK(tributary_client_options(client, few, sizeof few) == length);
  CHECK(strcmp(few, "target:") == 0);
}

static void Timeouts(tributary_client* client) {
  tributary_client* hasty = NULL;
  tributary_error* error = NULL;
  CHECK(tributary_with_timeout(client, 0, &hasty, &error) == TRIBUTARY_INVALID_ARGUMENT);
  CHECK(strcmp(tributary_error_field(error), "timeout_ms") == 0);
  tributary_error_free(error);
  CHECK(hasty == NULL);
  CHECK(tributary_with_timeout(client, 15000, &hasty, NULL) == TRIBUTARY_OK);
  uint64_t sequence = 0;
  CHECK(tributary_open_sequence(hasty, "c", &sequence, NULL) == TRIBUTARY_OK);
  tributary_close(hasty);
  CHECK(tributary_close_sequence(client, "c", sequence, NULL) == TRIBUTARY_OK);
}

/* The next layer of a step with `rows` rows, all of them ones. */
static tributary_session_layer Layer(int rows) {
  const tributary_rows shape = {.data = ones, .rows = rows, .heads = kHeads, .dim = kDim};
  tributary_session_layer layer = {
      .size = sizeof layer, .q = shape, .k = shape, .v = shape, .output = shape};
  layer.output.data = output;
  return layer;
}

static void Sessions(tributary_client* client, tributary_memory memory) {
  tributary_session* session = NULL;
  tributary_error* error = NULL;
  const tributary_session_options options = {.size = sizeof options,
                                             .cache = "c",
                                             .memory = memory,
                                             .max_rows = kMost,
                                             .max_new_tokens = kMost,
                                             .return_lse = 1};
  tributary_session_info info = {.size = sizeof info};
  CHECK(tributary_open_session(client, &options, &session, &info, NULL) == TRIBUTARY_OK);
  if (session == NULL) return;
  CHECK(info.memory == memory && info.max_rows == kMost && info.max_steps == 2);
  tributary_layer_shape shape = {.size = sizeof shape};
  CHECK(tributary_session_layer_shape(session, 1, &shape, NULL) == TRIBUTARY_OK);
  CHECK(strcmp(tributary_session_warning(session), "") == 0);
  CHECK(shape.q_heads == kHeads && shape.head_dim == kDim && shape.value_head_dim == kDim);
  CHECK(tributary_session_layer_shape(session, -1, &shape, NULL) == TRIBUTARY_INVALID_ARGUMENT);

  tributary_step_entry entry = {.rows = 4, .new_tokens = 4};
  CHECK(tributary_open_sequence(client, "c", &entry.sequence, NULL) == TRIBUTARY_OK);
  tributary_step step = {.size = sizeof step, .layers = 2, .entries = &entry, .entry_count = 1};
  uint64_t number = 0;
  CHECK(tributary_session_submit(session, &step, &number, NULL) == TRIBUTARY_OK);
  tributary_session_layer layer = Layer(4);
  layer.lse = &lse[0][0];
  CHECK(tributary_session_attend(session, &layer, NULL) == TRIBUTARY_OK);
  CHECK(fabsf(output[3][1][0] - 1.0f) < 1e-2f);
  CHECK(fabsf(lse[3][0] - (8.0f + logf(4.0f))) < 1e-2f);
  layer.k.rows = 3; /* refused, and not handed over */
  CHECK(tributary_session_attend(session, &layer, &error) == TRIBUTARY_INVALID_ARGUMENT);
  CHECK(strcmp(tributary_error_field(error), "k.rows") == 0);
  tributary_error_free(error);
  layer.k.rows = 4;
  CHECK(tributary_session_attend(session, &layer, NULL) == TRIBUTARY_OK);
  CHECK(tributary_session_await(session, number, NULL) == TRIBUTARY_OK);

  /* A fork that is rolled back, and grows without being looked at. */
  tributary_step_entry child = {.first_position = 2,
                                .new_tokens = 2,
                                .has_truncate_to = 1,
                                .truncate_to = 2,
                                .has_fork_from = 1,
                                .fork_from = entry.sequence,
                                .fork_length = -1};
  CHECK(tributary_open_sequence(client, "c", &child.sequence, NULL) == TRIBUTARY_OK);
  step.entries = &child;
  step.append_only = 1;
  CHECK(tributary_session_submit(session, &step, &number, NULL) == TRIBUTARY_OK);
  layer = Layer(2);
  for (int i = 0; i < 2; ++i)
    CHECK(tributary_session_append(session, &layer, NULL) == TRIBUTARY_OK);
  CHECK(tributary_session_await(session, number, NULL) == TRIBUTARY_OK);
  int64_t held = 0;
  CHECK(tributary_truncate_sequence(client, "c", child.sequence, 100, &held, NULL) == TRIBUTARY_OK);
  CHECK(held == 4);

  entry.first_position = 50; /* refused, and the session goes on */
  step.entries = &entry;
  step.append_only = 0;
  CHECK(tributary_session_submit(session, &step, NULL, &error) == TRIBUTARY_OUT_OF_RANGE);
  CHECK(tributary_error_length(error) == 4);
  tributary_error_free(error);
  step.entry_count = 0;
  CHECK(tributary_session_submit(session, &step, NULL, NULL) == TRIBUTARY_INVALID_ARGUMENT);
  CHECK(tributary_session_status(session, NULL) == TRIBUTARY_OK);
  CHECK(tributary_session_close(session, NULL) == TRIBUTARY_OK);

  /* A step that is not over when its session is abandoned has changed nothing. */
  CHECK(tributary_open_session(client, &options, &session, NULL, NULL) == TRIBUTARY_OK);
  entry.first_position = 4;
  step.entry_count = 1;
  CHECK(tributary_session_submit(session, &step, NULL, NULL) == TRIBUTARY_OK);
  layer = Layer(4);
  CHECK(tributary_session_attend(session, &layer, NULL) == TRIBUTARY_OK);
  tributary_session_abandon(session);
  CHECK(tributary_truncate_sequence(client, "c", entry.sequence, 100, &held, NULL) == TRIBUTARY_OK);
  CHECK(held == 4);
}

/* A step of two pieces. Its layers state no o_scale: it is 1. */
static void SessionsWithOutputsInFp8(tributary_client* client, tributary_memory memory) {
  tributary_session* session = NULL;
  tributary_session_options options = {.size = sizeof options,
                                       .cache = "c",
                                       .memory = memory,
                                       .max_rows = 2,
                                       .max_new_tokens = 2,
                                       .output_dtype = TRIBUTARY_FP8_E4M3};
  tributary_session_info info = {.size = sizeof info};
  CHECK(tributary_open_session(client, &options, &session, &info, NULL) == TRIBUTARY_OK);
  if (session == NULL) return;
  CHECK(info.dtype == TRIBUTARY_F32 && info.output_dtype == TRIBUTARY_FP8_E4M3);
  tributary_step_entry entry = {.rows = 4, .new_tokens = 4};
  CHECK(tributary_open_sequence(client, "c", &entry.sequence, NULL) == TRIBUTARY_OK);
  const tributary_step step = {
      .size = sizeof step, .layers = 1, .entries = &entry, .entry_count = 1};
  CHECK(tributary_session_submit(session, &step, NULL, NULL) == TRIBUTARY_OK);
  unsigned char stored[4 + 1][kHeads][kDim] = {{{0}}};
  tributary_session_layer layer = Layer(4);
  layer.output.data = stored;
  CHECK(tributary_session_attend(session, &layer, NULL) == TRIBUTARY_OK);
  const unsigned char one = 0x38; /* 1.0 */
  for (int row = 0; row < 4; ++row) {
    CHECK(stored[row][0][0] == one && stored[row][kHeads - 1][kDim - 1] == one);
  }
  CHECK(stored[4][0][0] == 0);
  CHECK(tributary_session_close(session, NULL) == TRIBUTARY_OK);
  CHECK(tributary_close_sequence(client, "c", entry.sequence, NULL) == TRIBUTARY_OK);
}

static void SessionsThatAreRefused(tributary_client* client) {
  tributary_session* session = NULL;
  tributary_error* error = NULL;
  tributary_session_options options = {
      .size = sizeof options, .cache = "c", .memory = TRIBUTARY_MEMORY_DEVICE, .max_rows = 1};
  /* The service has no GPU here, or the library no CUDA, or the machine neither. */
  CHECK(tributary_open_session(client, &options, &session, NULL, NULL) != TRIBUTARY_OK);
  options.memory = TRIBUTARY_MEMORY_MESSAGES;
  options.cache = "no such cache";
  CHECK(tributary_open_session(client, &options, &session, NULL, &error) == TRIBUTARY_NOT_FOUND);
  tributary_error_free(error);
  options.cache = "c";
  options.output_dtype = TRIBUTARY_NVFP4;
  CHECK(tributary_open_session(client, &options, &session, NULL, &error) ==
        TRIBUTARY_INVALID_ARGUMENT);
  CHECK(strcmp(tributary_error_field(error), "options.output_dtype") == 0);
  tributary_error_free(error);
  CHECK(tributary_open_session(client, NULL, &session, NULL, NULL) == TRIBUTARY_INVALID_ARGUMENT);
  CHECK(session == NULL);
  tributary_session_abandon(NULL);
  CHECK(tributary_session_close(NULL, NULL) == TRIBUTARY_OK);
}

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  for (int i = 0; i < kMost * kHeads * kDim; ++i) (&ones[0][0][0])[i] = 1.0f;
  CHECK(strcmp(tributary_code_name(TRIBUTARY_DATA_LOSS), "DATA_LOSS") == 0);
  CHECK(strcmp(tributary_code_name(99), "UNKNOWN") == 0);
  Connecting();
  NullSessions();
  const tributary_options options = {.size = sizeof options,
                                     .target = argv[1],
                                     .timeout_ms = 20000,
                                     .shared_memory_bytes = 1 << 20};
  tributary_client* client = NULL;
  CHECK(tributary_connect(&options, &client, NULL) == TRIBUTARY_OK);
  if (client == NULL) return 1;
  Caches(client);
  NullClients(client);
  Sequences(client);
  QuantizedOutputs(client);
  Drafts(client);
  WithoutWaiting(client);
  Options(client);
  Timeouts(client);
  Sessions(client, TRIBUTARY_MEMORY_HOST);
  Sessions(client, TRIBUTARY_MEMORY_MESSAGES);
  SessionsWithOutputsInFp8(client, TRIBUTARY_MEMORY_HOST);
  SessionsWithOutputsInFp8(client, TRIBUTARY_MEMORY_MESSAGES);
  SessionsThatAreRefused(client);
  CHECK(tributary_delete_cache(client, "c", NULL) == TRIBUTARY_OK);
  tributary_close(client);
  return failures == 0 ? 0 : 1;
}
