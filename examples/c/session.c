/* A host in C that works by steps: `session TARGET` puts a prompt into all layers of a sequence
 * with one step, generates three tokens with a step each, and takes the last one back with the
 * next. Build it with `cc session.c $(pkg-config --cflags --libs tributary)`. */
#include <stdio.h>
#include <tributary.h>

enum { kLayers = 2, kPrompt = 4, kHeads = 2, kHeadDim = 64 };

static const char kCache[] = "session-example";

/* Says what is wrong and frees the error. */
static int failed(const char* what, tributary_error* error) {
  fprintf(stderr, "%s: %s: %s\n", what, tributary_code_name(tributary_error_code(error)),
          tributary_error_message(error));
  tributary_error_free(error);
  return 1;
}

/* One step of all layers: `rows` tokens at `position`. A model would compute q, k and v between the
 * layers; here all keys are 0, and a token's value is its position, so that a row's output is the
 * mean of the positions that it sees. */
static int step(tributary_session* session, tributary_step_entry* entry, int rows,
                long long position, float* result) {
  static float q[kPrompt][kHeads][kHeadDim], k[kPrompt][kHeads][kHeadDim],
      v[kPrompt][kHeads][kHeadDim], output[kPrompt][kHeads][kHeadDim];
  for (int row = 0; row < rows; ++row) {
    for (int head = 0; head < kHeads; ++head) {
      for (int i = 0; i < kHeadDim; ++i) v[row][head][i] = (float)(position + row);
    }
  }
  tributary_error* error = NULL;
  entry->first_position = position;
  entry->rows = rows;
  entry->new_tokens = rows;
  const tributary_step whole = {
      .size = sizeof whole, .layers = kLayers, .entries = entry, .entry_count = 1};
  uint64_t number = 0;
  if (tributary_session_submit(session, &whole, &number, &error)) return failed("submit", error);

  const tributary_rows shape = {.rows = rows, .heads = kHeads, .dim = kHeadDim};
  tributary_session_layer layer = {
      .size = sizeof layer, .q = shape, .k = shape, .v = shape, .output = shape};
  layer.q.data = q;
  layer.k.data = k;
  layer.v.data = v;
  layer.output.data = output;
  for (int i = 0; i < kLayers; ++i) {
    if (tributary_session_attend(session, &layer, &error)) return failed("attend", error);
  }
  if (tributary_session_await(session, number, &error)) return failed("await", error);
  *result = output[rows - 1][0][0];
  return 0;
}

static int generate(tributary_session* session, uint64_t sequence) {
  tributary_step_entry entry = {.sequence = sequence};
  float mean = 0;
  if (step(session, &entry, kPrompt, 0, &mean)) return 1;
  printf("the prompt's last row: %.3f\n", mean);
  for (int position = kPrompt; position < kPrompt + 3; ++position) {
    if (step(session, &entry, 1, position, &mean)) return 1;
    printf("position %d: %.3f\n", position, mean);
  }
  entry.has_truncate_to = 1; /* the same token once more, as after a guess that was wrong */
  entry.truncate_to = kPrompt + 2;
  if (step(session, &entry, 1, kPrompt + 2, &mean)) return 1;
  printf("again: %.3f\n", mean);
  return 0;
}

static int run(tributary_client* client) {
  tributary_error* error = NULL;
  const tributary_cache_spec spec = {.size = sizeof spec,
                                     .layers = kLayers,
                                     .q_heads = kHeads,
                                     .kv_heads = kHeads,
                                     .head_dim = kHeadDim,
                                     .kv_dtype = TRIBUTARY_BF16,
                                     .capacity_tokens = 1024};
  uint64_t sequence = 0;
  if (tributary_create_cache(client, kCache, &spec, NULL, &error))
    return failed("create cache", error);
  if (tributary_open_sequence(client, kCache, &sequence, &error))
    return failed("open sequence", error);
  const tributary_session_options options = {
      .size = sizeof options, .cache = kCache, .max_rows = kPrompt, .max_new_tokens = kPrompt};
  tributary_session* session = NULL;
  tributary_session_info info = {.size = sizeof info};
  if (tributary_open_session(client, &options, &session, &info, &error))
    return failed("open session", error);
  printf("tensors lie in %s\n",
         info.memory == TRIBUTARY_MEMORY_HOST ? "shared memory" : "messages");
  const int result = generate(session, sequence);
  if (tributary_session_close(session, &error)) return failed("close session", error);
  if (tributary_delete_cache(client, kCache, &error)) return failed("delete cache", error);
  return result;
}

int main(int argc, char** argv) {
  if (argc != 2) {
    fprintf(stderr, "usage: session unix:/path | host:port\n");
    return 2;
  }
  const tributary_options options = {
      .size = sizeof options, .target = argv[1], .timeout_ms = 10000};
  tributary_client* client = NULL;
  tributary_error* error = NULL;
  if (tributary_connect(&options, &client, &error)) return failed("connect", error);
  const int result = run(client);
  tributary_close(client);
  return result;
}
