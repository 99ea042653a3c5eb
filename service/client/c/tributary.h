/* The C interface of Tributary's client: caches, sequences and attention (libtributary.so.1).
 *
 * Every function that can fail returns a tributary_code, TRIBUTARY_OK for done. Its last argument,
 * which may be NULL, receives what else is known of a failure; the caller frees it
 * (tributary_error_free). After success it is not touched. No exception leaves the library.
 *
 * A function that returns a code and is given NULL for the client, the session, or a place that it
 * must write to returns INVALID_ARGUMENT, with the argument's name as the error's field;
 * tributary_attend_async tells its callback. Other functions then do nothing, and return 0 or "".
 *
 * A client may be used from many threads at once. Every call ends by the client's timeout, repeats
 * included. Calls name positions, so one whose outcome is unknown (DEADLINE_EXCEEDED, UNAVAILABLE)
 * is settled by repeating it as it was.
 *
 * Structures begin with their own size: set it to sizeof, everything else that is not needed to 0.
 * A library that is newer than its caller takes what the caller does not know as 0.
 */
#ifndef TRIBUTARY_H
#define TRIBUTARY_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The codes of gRPC. docs/api.md says which situation has which, and what a host does. */
typedef enum tributary_code {
  TRIBUTARY_OK = 0,
  TRIBUTARY_CANCELLED = 1,
  TRIBUTARY_UNKNOWN = 2,
  TRIBUTARY_INVALID_ARGUMENT = 3,
  TRIBUTARY_DEADLINE_EXCEEDED = 4,
  TRIBUTARY_NOT_FOUND = 5,
  TRIBUTARY_ALREADY_EXISTS = 6,
  TRIBUTARY_PERMISSION_DENIED = 7,
  TRIBUTARY_RESOURCE_EXHAUSTED = 8,
  TRIBUTARY_FAILED_PRECONDITION = 9,
  TRIBUTARY_ABORTED = 10,
  TRIBUTARY_OUT_OF_RANGE = 11,
  TRIBUTARY_UNIMPLEMENTED = 12,
  TRIBUTARY_INTERNAL = 13,
  TRIBUTARY_UNAVAILABLE = 14,
  TRIBUTARY_DATA_LOSS = 15,
  TRIBUTARY_UNAUTHENTICATED = 16
} tributary_code;

/* The name of a code, "OUT_OF_RANGE"; "UNKNOWN" of what is none. Never freed. */
const char* tributary_code_name(int code);
/* The library's version, "0.1.0". Never freed. */
const char* tributary_version(void);

/* What is known of a failure. Strings live as long as the error. */
typedef struct tributary_error tributary_error;
tributary_code tributary_error_code(const tributary_error* error);
const char* tributary_error_message(const tributary_error* error);
/* The field of the call that was refused, "entries[2].first_position"; "" when none is named. */
const char* tributary_error_field(const tributary_error* error);
/* Milliseconds after which the service asks for a repetition; -1 when it does not. */
int64_t tributary_error_retry_delay_ms(const tributary_error* error);
/* Tokens held, of a position beyond them; -1 when the error does not say. */
int64_t tributary_error_length(const tributary_error* error);
/* Positions [begin, end) of tokens. */
typedef struct tributary_range {
  int64_t begin;
  int64_t end;
} tributary_range;
/* What a sequence has lost of a layer (TRIBUTARY_DATA_LOSS), if something of it is left: ranges in
 * order, the first hundred, for tributary_append to bring again. Returns how many; 0 when the error
 * is another one, or nothing is left and the sequence must be opened again. Each pointer but the
 * first may be NULL; `ranges` live as long as the error. */
int32_t tributary_error_missing(const tributary_error* error, uint64_t* sequence, int32_t* layer,
                                const tributary_range** ranges);
/* NULL is allowed. */
void tributary_error_free(tributary_error* error);

/* A connection to a service, with one stream for attention. */
typedef struct tributary_client tributary_client;

typedef struct tributary_options {
  size_t size;
  const char* target; /* "host:port" or "unix:/path"; of several groups, see docs/hosts.md */
  int64_t timeout_ms; /* of every call, repeats included; 0: 30000 */
  uint64_t shared_memory_bytes; /* > 0: tensors travel in shared memory (same machine, same user) */
  int32_t max_attempts;         /* 0: as many as the timeout allows; 1: one */
  uint64_t max_message_bytes;   /* 0: 64 MiB; not more than the service's limit */
  /* Paths of PEM files and of a token's file; NULL or "": not used. */
  const char* tls_certificate;
  const char* tls_key;
  const char* tls_authorities;
  const char* token_file;
  /* The lease that sequences opened by this client belong to: 1 to 128 of [A-Za-z0-9._-], drawn at
   * random. NULL or "": none, and sequences stay until they are closed. See docs/hosts.md. */
  const char* lease;
} tributary_options;

/* UNAVAILABLE when nobody answers within the timeout. */
tributary_code tributary_connect(const tributary_options* options, tributary_client** client,
                                 tributary_error** error);
/* Since 1.2. The client's options as they are in force, one line for each: "name: value\n", with
 * the names of the C++ client. A lease is shown as "(set)", since sequences are open to whoever
 * knows it. Writes at most size - 1 bytes and a 0 to `text`, which may be NULL where size is 0.
 * Returns the length of the whole text; 0 when out of memory. */
size_t tributary_client_options(const tributary_client* client, char* text, size_t size);
/* Another client over the same connection, whose calls end by another timeout (>= 1 ms): for one
 * call or for many. It costs an allocation. It is closed like any other; the connection ends with
 * the last of them. */
tributary_code tributary_with_timeout(tributary_client* client, int64_t timeout_ms,
                                      tributary_client** other, tributary_error** error);
/* Calls of tributary_attend_async that are in flight end with CANCELLED, once no other client has
 * the connection. Not from within a callback, and not while another thread is in a call. NULL is
 * allowed. */
void tributary_close(tributary_client* client);

typedef enum tributary_dtype {
  TRIBUTARY_F32 = 1,
  TRIBUTARY_BF16 = 2,
  TRIBUTARY_F16 = 3,
  TRIBUTARY_FP8_E4M3 = 4,
  TRIBUTARY_FP8_E5M2 = 5,
  TRIBUTARY_NVFP4 = 6
} tributary_dtype;

typedef enum tributary_mode { TRIBUTARY_CAUSAL = 1, TRIBUTARY_DFLASH = 2 } tributary_mode;

/* The position p that the window of a DFLASH call is laid around: each row's own, or the first one
 * of the draft block. */
typedef enum tributary_window_base {
  TRIBUTARY_WINDOW_QUERY = 1,
  TRIBUTARY_WINDOW_ANCHOR = 2
} tributary_window_base;

/* What may differ from layer to layer. 0 and NULL stand for the cache's value or for none. */
typedef struct tributary_layer {
  size_t size;
  int32_t has_window_left; /* 1: a row at p sees keys from p - window_left on */
  int64_t window_left;
  const float* sinks; /* [q_heads] logits, natural log; NULL: none */
  int32_t sink_count;
  int32_t has_soft_cap; /* 1: soft_cap replaces the cache's; 0.0 means none */
  float soft_cap;
  float sm_scale;
  tributary_dtype kv_dtype;
  int32_t q_heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t value_head_dim;
  const float* k_scale; /* of FP8: real = stored * scale; 1 or kv_heads values; NULL: 1.0 */
  int32_t k_scale_count;
  const float* v_scale;
  int32_t v_scale_count;
  int32_t padding; /* not looked at */
  /* Since 1.3. */
  int64_t window_right; /* of DFLASH: keys up to p + window_right are seen */
  int32_t has_window_right;
  tributary_window_base window_base; /* of DFLASH; 0: QUERY */
  int32_t causal_block; /* of DFLASH; 1: a row of a draft block does not see the rows after it */
  float o_scale;        /* of outputs of FP8_E4M3 and NVFP4: real = stored * scale; 0: 1.0 */
} tributary_layer;

/* The attention geometry of one model. proto/tributary/v1/types.proto states the limits. */
typedef struct tributary_cache_spec {
  size_t size;
  int32_t layers;
  int32_t q_heads; /* a multiple of kv_heads, at most 16 times as many */
  int32_t kv_heads;
  int32_t head_dim;                   /* of queries and keys: 64, 80, 96, 128, 192 or 256 */
  int32_t value_head_dim;             /* 0: head_dim */
  int32_t page_size;                  /* local slots; 0: 16 */
  tributary_dtype kv_dtype;           /* 0: FP8_E4M3 */
  float sm_scale;                     /* 0: 1 / sqrt(head_dim) */
  float soft_cap;                     /* 0: none */
  int64_t capacity_tokens;            /* over all sequences */
  int64_t window_capacity_tokens;     /* > 0: layers with a window have pages of their own, for this
                                         many tokens */
  int64_t rollback_tokens;            /* 0: 1024 */
  const tributary_layer* layer_specs; /* layer_count of them; NULL: all layers are alike */
  int32_t layer_count;                /* 1 (for every layer) or `layers` */
  int32_t padding;                    /* not looked at */
  /* Since 1.3. */
  const tributary_mode* modes; /* mode_count of them, which the host will ask for; NULL: any */
  int32_t mode_count;
  int32_t interleave;   /* tokens dealt to one worker at a time; divides page_size; 0: page_size */
  int32_t fp8_queries;  /* 1: queries are rounded to FP8 where they meet a cache that is FP8 */
  int32_t fp8_weights;  /* 1, with fp8_queries: weights of prompts may be, too, on GPUs */
  int32_t has_replicas; /* 1: `replicas` replaces the service's */
  int32_t replicas;     /* other workers that keep each worker's tokens as well: 0 or 1 */
} tributary_cache_spec;

typedef struct tributary_cache_info {
  size_t size;
  int32_t ranks; /* workers that the cache is spread over */
  int32_t page_size;
  int64_t capacity_tokens; /* rounded up to whole pages */
} tributary_cache_info;

/* Creates a cache; the same spec again is OK. `id`: 1 to 128 of A-Z a-z 0-9 . _ - ; `info` may be
 * NULL. */
tributary_code tributary_create_cache(tributary_client* client, const char* id,
                                      const tributary_cache_spec* spec, tributary_cache_info* info,
                                      tributary_error** error);
tributary_code tributary_delete_cache(tributary_client* client, const char* id,
                                      tributary_error** error);

/* Opens an empty sequence and tells its id. */
tributary_code tributary_open_sequence(tributary_client* client, const char* cache,
                                       uint64_t* sequence, tributary_error** error);
/* Opens a sequence that said DATA_LOSS again, empty. */
tributary_code tributary_reopen_sequence(tributary_client* client, const char* cache,
                                         uint64_t sequence, tributary_error** error);
/* A sequence that begins with the first `length` tokens of another; length < 0: with all of them.
 */
tributary_code tributary_fork_sequence(tributary_client* client, const char* cache, uint64_t parent,
                                       int64_t length, uint64_t* sequence, tributary_error** error);
/* Rolls back to at most `length` tokens. `held`, which may be NULL: tokens that are left. */
tributary_code tributary_truncate_sequence(tributary_client* client, const char* cache,
                                           uint64_t sequence, int64_t length, int64_t* held,
                                           tributary_error** error);
tributary_code tributary_close_sequence(tributary_client* client, const char* cache,
                                        uint64_t sequence, tributary_error** error);

typedef enum tributary_update_kind {
  TRIBUTARY_OPEN = 1,
  TRIBUTARY_FORK = 2,
  TRIBUTARY_TRUNCATE = 3,
  TRIBUTARY_CLOSE = 4
} tributary_update_kind;

/* One of many changes, as the call of its name above makes it. */
typedef struct tributary_update {
  tributary_update_kind kind;
  uint64_t sequence; /* truncated or closed; opened or made: 0, the call tells which */
  uint64_t parent;   /* of a fork */
  int64_t length;    /* of a truncation; of a fork, < 0: all that the parent holds */
} tributary_update;

/* Makes the changes in one call, in order, all of them or none. An error names the one it is about,
 * "updates[i].*". */
tributary_code tributary_update_sequences(tributary_client* client, const char* cache,
                                          tributary_update* updates, int32_t count,
                                          tributary_error** error);

typedef struct tributary_entry {
  uint64_t sequence;
  int64_t first_position; /* of the first row and of the first new token */
  int32_t rows;           /* query rows; of an append: tokens */
  int32_t new_tokens;     /* 0 or rows; not looked at by an append */
} tributary_entry;

/* One call of one layer. Dense row-major host memory of the caller, borrowed until the call is
 * done. */
typedef struct tributary_call {
  size_t size;
  const char* cache;
  int32_t layer;
  tributary_mode mode; /* 0: CAUSAL */
  const tributary_entry* entries;
  size_t entry_count;
  tributary_dtype dtype; /* of q, k and v: F32, BF16 or F16; of output, too, by default */
  int32_t q_heads;       /* of an append: 0 */
  int32_t kv_heads;
  int32_t head_dim;       /* of q and k */
  int32_t value_head_dim; /* of v and output; 0: head_dim */
  const void* q;          /* [rows, q_heads, head_dim] */
  const void* k;          /* [new tokens, kv_heads, head_dim] */
  const void* v;          /* [new tokens, kv_heads, value_head_dim] */
  void* output;           /* [rows, q_heads, value_head_dim] */
  float* lse; /* [rows, q_heads], natural log, -inf where a row sees no key; NULL: not wanted */
  int32_t yield_ms; /* calls that come up to so much later go first: for work that nobody waits
                       for; 0 to 1000; not looked at by an append */
  int32_t padding;  /* not looked at */
  /* Since 1.3. Not looked at by an append. */
  tributary_dtype output_dtype; /* F32, BF16, F16, FP8_E4M3 or NVFP4; 0: dtype. How an NVFP4 output
                                   lies in memory is told in types.proto */
  float o_scale;                /* of FP8_E4M3 and NVFP4: real = stored * scale; 0: the layer's */
} tributary_call;

/* Bytes of an output of so many elements, rows * q_heads * value_head_dim. 0 for a type that no
 * output has. Since 1.3. */
uint64_t tributary_output_bytes(tributary_dtype dtype, uint64_t elements);

/* Writes K/V and computes nothing. */
tributary_code tributary_append(tributary_client* client, const tributary_call* call,
                                tributary_error** error);
/* Appends the new tokens' K/V, and computes attention of the rows. */
tributary_code tributary_attend(tributary_client* client, const tributary_call* call,
                                tributary_error** error);

/* Runs once, on a thread of the client. `error` is NULL for OK and is gone when the callback
 * returns. */
typedef void (*tributary_done)(void* context, tributary_code code, const tributary_error* error);
/* The same without waiting. Calls of one sequence take effect in the order in which they are made.
 * What the call's fields point to other than tensors may be let go of when this returns. A call
 * that cannot be begun is told to `done` too. Returns a number for tributary_cancel, or 0 when the
 * call cannot be begun. Without `done` it begins none. */
uint64_t tributary_attend_async(tributary_client* client, const tributary_call* call,
                                tributary_done done, void* context);
/* Ends a call by the number that tributary_attend_async returned: `done` is told CANCELLED, unless
 * the answer is there before. A call that is over is left alone. */
void tributary_cancel(tributary_client* client, uint64_t call);

/* ------------------------------------------------------------------------------------- sessions
 * A host that runs a model submits a whole step at once: which sequences, which rows, which layers.
 * Then it hands over one layer after another and takes back its results. docs/sessions.md. */

/* Where the tensors of a session's layers lie. */
typedef enum tributary_memory {
  TRIBUTARY_MEMORY_DEFAULT =
      0, /* HOST over a Unix socket where the service offers it, else MESSAGES */
  TRIBUTARY_MEMORY_HOST = 1,    /* shared memory of this machine */
  TRIBUTARY_MEMORY_DEVICE = 2,  /* on the GPU that is current when the session is opened; libraries
                                   without CUDA say UNIMPLEMENTED */
  TRIBUTARY_MEMORY_MESSAGES = 3 /* over the connection, from any machine */
} tributary_memory;

/* Used from one thread at a time. Every wait ends by its bound, also when the service dies. It has
 * a connection of its own and may outlive its client. */
typedef struct tributary_session tributary_session;

typedef struct tributary_session_options {
  size_t size;
  const char* cache;
  tributary_memory memory;
  int32_t max_rows;        /* query rows of a step */
  int32_t max_new_tokens;  /* new tokens of a step */
  tributary_dtype dtype;   /* of q, k and v: F32, BF16 or F16; 0: F32. Of output, too, by default */
  int32_t return_lse;      /* 1: layers may ask for their log-sum-exp */
  int32_t max_steps;       /* submitted and not over, at a time; 0: 2 */
  int64_t wait_timeout_ms; /* how long either side waits for a layer before the session is given up;
                              0: 10000 */
  int32_t spin_us; /* HOST: how long a wait polls before it sleeps; 0: 50; < 0: it does not */
  /* Since 1.1. HOST and DEVICE: into how many processes the model's heads are split, each of them
   * an endpoint of the session; 0: 1. The others join: see tributary_join_session. */
  int32_t endpoints;
  int32_t kv_replicated; /* 1: every endpoint has all KV heads, and endpoint 0 hands k and v over */
  int32_t padding;       /* not looked at */
  /* Since 1.3. HOST and MESSAGES: F32, BF16, F16, or FP8_E4M3 with each layer's o_scale; 0: dtype
   */
  tributary_dtype output_dtype;
} tributary_session_options;

#define TRIBUTARY_SECRET_BYTES 16

typedef struct tributary_session_info {
  size_t size;
  tributary_memory memory; /* never DEFAULT */
  int32_t max_rows;
  int32_t max_new_tokens;
  int32_t max_steps;
  /* Since 1.1. */
  tributary_dtype dtype;
  int32_t return_lse;
  int32_t endpoint; /* which endpoint this is */
  int32_t endpoints;
  /* What endpoint 0 tells the others, so that they may join. The secret is 0 elsewhere. */
  uint64_t session;
  unsigned char secret[TRIBUTARY_SECRET_BYTES];
  /* Since 1.3. */
  tributary_dtype output_dtype;
} tributary_session_info;

/* Opens a session by the client's timeout. FAILED_PRECONDITION, open.memory: the service has no
 * such memory for this host. `info` may be NULL. */
tributary_code tributary_open_session(tributary_client* client,
                                      const tributary_session_options* options,
                                      tributary_session** session, tributary_session_info* info,
                                      tributary_error** error);

/* Since 1.1. What would make the session faster, for whoever runs the host; "": nothing that the
 * service knows of. Valid until the session is closed or abandoned. */
const char* tributary_session_warning(const tributary_session* session);

/* Which endpoint of which session a process is to be. */
typedef struct tributary_endpoint {
  size_t size;
  uint64_t session; /* and the secret: as endpoint 0 was told in its tributary_session_info */
  unsigned char secret[TRIBUTARY_SECRET_BYTES];
  int32_t endpoint;        /* 1 to endpoints - 1 */
  tributary_memory memory; /* the session's: HOST (which 0 stands for) or DEVICE */
  int32_t spin_us;         /* as in tributary_session_options */
} tributary_endpoint;

/* Since 1.1. Joins a session that another process has opened with several endpoints. From then on
 * all of them do the same: submit, attend or append for each layer, await. Endpoint 0 sends the
 * step, the others wait for what becomes of it. q, k, v and output are those of the endpoint's
 * heads (tributary_session_layer_shape). The session ends for all of them when one leaves, or hands
 * nothing over for the session's wait timeout. NOT_FOUND, join.session_id: there is no session with
 * this number and secret. */
tributary_code tributary_join_session(tributary_client* client, const tributary_endpoint* endpoint,
                                      tributary_session** session, tributary_session_info* info,
                                      tributary_error** error);

/* What the tensors of a layer must be. */
typedef struct tributary_layer_shape {
  size_t size;
  int32_t q_heads;
  int32_t kv_heads;       /* 0: another endpoint hands k and v over, and this one leaves them out */
  int32_t head_dim;       /* of queries and keys */
  int32_t value_head_dim; /* of values and output */
  /* Since 1.1: which of the layer's heads the first ones are. */
  int32_t first_q_head;
  int32_t first_kv_head;
} tributary_layer_shape;
tributary_code tributary_session_layer_shape(const tributary_session* session, int32_t layer,
                                             tributary_layer_shape* shape, tributary_error** error);

/* One sequence of a step. The fork, the truncation and the rows apply in this order. */
typedef struct tributary_step_entry {
  uint64_t sequence;
  int64_t first_position; /* of the first row and of the first new token */
  int32_t rows;           /* query rows; 0 in an append-only step */
  int32_t new_tokens;
  int32_t has_truncate_to; /* 1: first rolls the sequence back to `truncate_to` tokens */
  int32_t has_fork_from;   /* 1: first makes it a fork of `fork_from`, as that is before the step */
  int64_t truncate_to;
  uint64_t fork_from;
  int64_t fork_length; /* tokens of the fork; < 0: all */
} tributary_step_entry;

typedef struct tributary_step {
  size_t size;
  tributary_mode mode; /* 0: CAUSAL */
  int32_t first_layer;
  int32_t layers; /* how many, from first_layer on */
  const tributary_step_entry* entries;
  size_t entry_count;
  int32_t append_only; /* 1: tokens are written and nothing is computed */
} tributary_step;

/* Returns when the service has accepted the step for all its layers, or refused it: then nothing
 * has changed and none of its layers may be handed over. May be called while earlier steps run.
 * `number`, which may be NULL, is for tributary_session_await. */
tributary_code tributary_session_submit(tributary_session* session, const tributary_step* step,
                                        uint64_t* number, tributary_error** error);

/* Rows of heads. Within a head elements are dense; rows and heads lie so many elements apart, so a
 * view of a fused projection is taken as it is. On a GPU the address, `dim` and strides are
 * multiples of 16 bytes. */
typedef struct tributary_rows {
  const void* data; /* NULL: none */
  int32_t rows;
  int32_t heads;
  int32_t dim;
  int64_t row_stride;  /* elements; 0: heads * dim */
  int64_t head_stride; /* elements; 0: dim */
} tributary_rows;

/* One layer of a submitted step. */
typedef struct tributary_session_layer {
  size_t size;
  tributary_rows q;
  tributary_rows k; /* as many rows as the step has new tokens */
  tributary_rows v;
  tributary_rows
      output;   /* written; of q's rows and heads. Without data the results are not copied */
  float* lse;   /* [rows, q_heads]; NULL: not wanted */
  void* stream; /* DEVICE: a cudaStream_t, NULL is the default stream */
} tributary_session_layer;

/* Hands over the next layer, in the order of steps and layers, and takes its results. In host
 * memory it waits for them. On a GPU it puts two launches into `stream`, which may be captured in a
 * CUDA graph, and returns; when the session ends before its time, results are NaN and
 * tributary_session_status says why. INVALID_ARGUMENT names what does not fit the step: the layer
 * has then not been handed over. Any other error is why the session is over. */
tributary_code tributary_session_attend(tributary_session* session,
                                        const tributary_session_layer* layer,
                                        tributary_error** error);
/* The same for a layer of an append-only step, which has k and v only and no result to wait for. On
 * a GPU an endpoint without KV heads leaves `data` out and states `rows` all the same. */
tributary_code tributary_session_append(tributary_session* session,
                                        const tributary_session_layer* layer,
                                        tributary_error** error);

/* What became of a step; waits until it is over. */
tributary_code tributary_session_await(tributary_session* session, uint64_t step,
                                       tributary_error** error);
/* Why the session is over; OK while it is not. */
tributary_code tributary_session_status(const tributary_session* session, tributary_error** error);
/* Ends the session when its steps are over, and frees it whatever the outcome is. NULL is allowed.
 */
tributary_code tributary_session_close(tributary_session* session, tributary_error** error);
/* Ends it at once: steps that are not over change no length. Frees it. NULL is allowed. */
void tributary_session_abandon(tributary_session* session);

#ifdef __cplusplus
}
#endif

#endif /* TRIBUTARY_H */
