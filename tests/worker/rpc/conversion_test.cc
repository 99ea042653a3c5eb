// Commands and replies survive the journey bit for bit.

#include "worker/rpc/conversion.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "base/status/errors.h"
#include "worker/rpc/session_conversion.h"

namespace tributary::worker {
namespace {

using std::chrono::milliseconds;

const TimePoint kNow = TimePoint(std::chrono::hours(5));

// What the other end makes of it.
absl::StatusOr<Command> Travel(std::shared_ptr<const Command> command) {
  v1::CoordinatorMessage message;
  if (!DecodeMessage(EncodeCommand(std::move(command), kNow), &message)) {
    return absl::InternalError("not a message");
  }
  return DecodeCommand(std::move(message), kNow);
}

std::shared_ptr<Command> Base() {
  auto command = std::make_shared<Command>();
  command->epoch = std::numeric_limits<uint64_t>::max() - 1;
  command->number = uint64_t{1} << 60;
  command->cache = std::numeric_limits<uint32_t>::max();
  command->deadline = kNow + milliseconds(1'234);
  return command;
}

void ExpectSameBase(const Command& a, const Command& b) {
  EXPECT_EQ(a.epoch, b.epoch);
  EXPECT_EQ(a.number, b.number);
  EXPECT_EQ(a.cache, b.cache);
  EXPECT_EQ(a.deadline, b.deadline);
  EXPECT_EQ(a.body.index(), b.body.index());
}

std::vector<std::byte> Bytes(size_t size, int seed) {
  std::vector<std::byte> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 131 + seed);
  return bytes;
}

void ExpectSameTensor(const TensorView& a, const TensorView& b) {
  EXPECT_EQ(a.dtype, b.dtype);
  ASSERT_EQ(a.bytes, b.bytes);
  if (a.bytes > 0) {
    EXPECT_EQ(std::memcmp(a.data, b.data, a.bytes), 0);
  }
}

TEST(Commands, CreateCacheKeepsEveryField) {
  const auto sent = Base();
  CacheSpec spec;
  spec.q_heads = 32;
  spec.kv_heads = 8;
  spec.head_dim = 128;
  spec.page_size = 64;
  spec.interleave = 32;
  spec.kv_dtype = DType::kFp8E5M2;
  spec.sm_scale = 0.1f;  // no exact binary fraction
  spec.soft_cap = 30.0f;
  spec.fp8_queries = true;
  spec.fp8_weights = true;
  spec.num_pages = 12'345;
  spec.layers.resize(3);
  spec.layers[1].window = {.left = 0, .right = -1};
  spec.layers[1].sinks = {-1.5f, std::numeric_limits<float>::denorm_min()};
  spec.layers[2].window = {.left = int64_t{1} << 40, .right = 7};
  spec.layers[2].k_scale = {0.3f, 0.7f};
  spec.layers[2].v_scale = {};
  spec.layers[2].window_base = WindowBase::kAnchor;
  spec.layers[2].causal_block = true;
  spec.layers[2].kv_dtype = DType::kBf16;
  spec.layers[2].soft_cap = 0.0f;
  spec.value_head_dim = 96;
  spec.layers[2].q_heads = 6;
  spec.layers[2].kv_heads = 3;
  spec.layers[2].head_dim = 192;
  spec.layers[2].value_head_dim = 80;
  spec.layers[2].sm_scale = 0.3f;
  spec.layers[2].o_scale = 0.013f;
  sent->body = CreateCacheCommand{spec};

  const absl::StatusOr<Command> got = Travel(sent);
  ASSERT_EQ(got.status(), absl::OkStatus());
  ExpectSameBase(*got, *sent);
  const CacheSpec& s = std::get<CreateCacheCommand>(got->body).spec;
  EXPECT_EQ(s.q_heads, spec.q_heads);
  EXPECT_EQ(s.kv_heads, spec.kv_heads);
  EXPECT_EQ(s.head_dim, spec.head_dim);
  EXPECT_EQ(s.page_size, spec.page_size);
  EXPECT_EQ(s.interleave, spec.interleave);
  EXPECT_EQ(s.kv_dtype, spec.kv_dtype);
  EXPECT_EQ(s.sm_scale, spec.sm_scale);
  EXPECT_EQ(s.soft_cap, spec.soft_cap);
  EXPECT_EQ(s.fp8_queries, spec.fp8_queries);
  EXPECT_EQ(s.fp8_weights, spec.fp8_weights);
  EXPECT_EQ(s.num_pages, spec.num_pages);
  EXPECT_EQ(s.value_head_dim, spec.value_head_dim);
  ASSERT_EQ(s.layers.size(), spec.layers.size());
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    EXPECT_EQ(s.layers[i].window.left, spec.layers[i].window.left) << i;
    EXPECT_EQ(s.layers[i].o_scale, spec.layers[i].o_scale) << i;
    EXPECT_EQ(s.layers[i].window.right, spec.layers[i].window.right) << i;
    EXPECT_EQ(s.layers[i].sinks, spec.layers[i].sinks) << i;
    EXPECT_EQ(s.layers[i].k_scale, spec.layers[i].k_scale) << i;
    EXPECT_EQ(s.layers[i].v_scale, spec.layers[i].v_scale) << i;
    EXPECT_EQ(s.layers[i].window_base, spec.layers[i].window_base) << i;
    EXPECT_EQ(s.layers[i].causal_block, spec.layers[i].causal_block) << i;
    EXPECT_EQ(GeometryOf(s, s.layers[i]), GeometryOf(spec, spec.layers[i])) << i;
    // The cache's own where the layer has none.
    EXPECT_EQ(s.layers[i].kv_dtype, KvDType(spec, spec.layers[i])) << i;
    EXPECT_EQ(s.layers[i].soft_cap, SoftCap(spec, spec.layers[i])) << i;
  }
}

TEST(Commands, TablesAndDropsKeepEveryField) {
  auto sent = Base();
  sent->body = SetTablesCommand{{{.sequence = ~uint64_t{0}, .first_index = 3, .pages = {5, 0, 9}},
                                 {.sequence = 1, .first_index = 0, .pages = {}}}};
  absl::StatusOr<Command> got = Travel(sent);
  ASSERT_EQ(got.status(), absl::OkStatus());
  ExpectSameBase(*got, *sent);
  const auto& tables = std::get<SetTablesCommand>(got->body).tables;
  ASSERT_EQ(tables.size(), 2u);
  EXPECT_EQ(tables[0].sequence, ~uint64_t{0});
  EXPECT_EQ(tables[0].first_index, 3);
  EXPECT_EQ(tables[0].pages, (std::vector<int32_t>{5, 0, 9}));
  EXPECT_TRUE(tables[1].pages.empty());

  sent->body = DropTablesCommand{{7, ~uint64_t{0}}};
  got = Travel(sent);
  ASSERT_EQ(got.status(), absl::OkStatus());
  EXPECT_EQ(std::get<DropTablesCommand>(got->body).sequences,
            (std::vector<SequenceId>{7, ~uint64_t{0}}));

  sent->body = DropCacheCommand{};
  got = Travel(sent);
  ASSERT_EQ(got.status(), absl::OkStatus());
  ExpectSameBase(*got, *sent);
}

TEST(Commands, ChangesOfTheNumberOfRanksKeepEveryField) {
  const auto command = Base();
  const MoveTokensCommand moved{
      .from_cache = 77,
      .ranks = {.from = 4, .to = 3},
      .keeper_stride = 2,
      .pages = {{.page = 5, .index = int64_t{1} << 30, .from = {1, -1, 9}},
                {.page = 6, .index = 0, .from = {}}}};
  command->body = moved;
  const absl::StatusOr<Command> arrived = Travel(command);
  ASSERT_TRUE(arrived.ok()) << arrived.status();
  ExpectSameBase(*command, *arrived);
  const auto& move = std::get<MoveTokensCommand>(arrived->body);
  EXPECT_EQ(move.from_cache, 77u);
  EXPECT_EQ(move.ranks, moved.ranks);
  EXPECT_EQ(move.keeper_stride, 2);
  EXPECT_EQ(move.pages, moved.pages);
}

class Tensors : public ::testing::TestWithParam<size_t> {};

TEST_P(Tensors, StepsKeepEveryByte) {
  const std::vector<std::byte> q = Bytes(GetParam(), 1);
  const std::vector<std::byte> k = Bytes(2 * GetParam(), 2);
  const std::vector<std::byte> v = Bytes(2 * GetParam(), 3);
  const auto sent = Base();
  StepCommand step;
  step.layer = 61;
  step.kind = StepKind::kPrefill;
  step.page_copies = {{1, 2}, {3, 4}};
  step.page_updates = {{.sequence = 9, .first_index = 1, .pages = {8}}};
  step.entries = {{.sequence = 9,
                   .first_position = int64_t{1} << 40,
                   .query_rows = 4,
                   .new_tokens = 0,
                   .replay = false,
                   .more_follows = true},
                  {.sequence = 10,
                   .first_position = 0,
                   .query_rows = 0,
                   .new_tokens = 5,
                   .replay = true,
                   .brings_back = true}};
  step.q = {q.data(), DType::kF16, q.size()};
  step.k = {k.data(), DType::kF32, k.size()};
  step.v = {v.data(), DType::kBf16, v.size()};
  step.bf16_partials = true;
  sent->body = step;

  const absl::StatusOr<Command> got = Travel(sent);
  ASSERT_EQ(got.status(), absl::OkStatus());
  ExpectSameBase(*got, *sent);
  const auto& s = std::get<StepCommand>(got->body);
  EXPECT_EQ(s.layer, step.layer);
  EXPECT_EQ(s.kind, step.kind);
  ASSERT_EQ(s.page_copies.size(), 2u);
  EXPECT_EQ(s.page_copies[1].source, 3);
  EXPECT_EQ(s.page_copies[1].destination, 4);
  ASSERT_EQ(s.page_updates.size(), 1u);
  EXPECT_EQ(s.page_updates[0].pages, step.page_updates[0].pages);
  ASSERT_EQ(s.entries.size(), 2u);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(s.entries[i].sequence, step.entries[i].sequence);
    EXPECT_EQ(s.entries[i].first_position, step.entries[i].first_position);
    EXPECT_EQ(s.entries[i].query_rows, step.entries[i].query_rows);
    EXPECT_EQ(s.entries[i].new_tokens, step.entries[i].new_tokens);
    EXPECT_EQ(s.entries[i].replay, step.entries[i].replay);
    EXPECT_EQ(s.entries[i].more_follows, step.entries[i].more_follows);
    EXPECT_EQ(s.entries[i].brings_back, step.entries[i].brings_back);
  }
  ExpectSameTensor(s.q, step.q);
  ExpectSameTensor(s.k, step.k);
  ExpectSameTensor(s.v, step.v);
  EXPECT_TRUE(s.bf16_partials);
}

// None, copied with the rest, and slices of their own.
INSTANTIATE_TEST_SUITE_P(Sizes, Tensors, ::testing::Values(0, 1, 3000, 4096, 1 << 20));

// One buffer serves all ranks: the command lives until the last of them has it, and no longer.
TEST(Commands, SessionsKeepEveryField) {
  const auto sent = Base();
  OpenSessionCommand open{.session = uint64_t{1} << 50,
                          .max_rows = 1 << 20,
                          .max_new_tokens = 7,
                          .max_steps = 16,
                          .q_dtype = DType::kBf16,
                          .kv_dtype = DType::kF16,
                          .output_dtype = DType::kF32,
                          .return_lse = true,
                          .wait_timeout = std::chrono::microseconds(12'345),
                          .host_gpu = "GPU-1",
                          .measures = true,
                          .endpoints = 3};
  open.layout = mailbox::LayOut(4, {.q = 1000, .k = 200, .v = 300, .output = 4000, .lse = 50},
                                {.endpoints = 3, .timed = true, .in_parts = true});
  sent->body = open;
  absl::StatusOr<Command> got = Travel(sent);
  ASSERT_TRUE(got.ok()) << got.status();
  ExpectSameBase(*sent, *got);
  const auto& opened = std::get<OpenSessionCommand>(got->body);
  EXPECT_EQ(opened.session, open.session);
  EXPECT_EQ(opened.max_rows, open.max_rows);
  EXPECT_EQ(opened.max_new_tokens, open.max_new_tokens);
  EXPECT_EQ(opened.max_steps, open.max_steps);
  EXPECT_EQ(opened.q_dtype, open.q_dtype);
  EXPECT_EQ(opened.kv_dtype, open.kv_dtype);
  EXPECT_EQ(opened.output_dtype, open.output_dtype);
  EXPECT_EQ(opened.return_lse, open.return_lse);
  EXPECT_EQ(opened.layout, open.layout);
  EXPECT_EQ(opened.wait_timeout, open.wait_timeout);
  EXPECT_EQ(opened.host_gpu, open.host_gpu);
  EXPECT_TRUE(opened.measures);
  EXPECT_EQ(opened.endpoints, open.endpoints);

  sent->body = CloseSessionCommand{9, 14};
  got = Travel(sent);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(std::get<CloseSessionCommand>(got->body).session, 9u);
  EXPECT_EQ(std::get<CloseSessionCommand>(got->body).status, 14);

  sent->body = SessionStepCommand{
      .session = 9,
      .kind = StepKind::kDflash,
      .first_count = 0xfffffffe,
      .layers = {{3, 0}, {4, 31}},
      .changes = {{3, {{1, 2}}, {{7, 1, {5, 6}}}}, {4, {}, {}}},
      .entries = {{.sequence = 7, .first_position = 1 << 30, .query_rows = 8, .new_tokens = 8},
                  {.sequence = 8, .replay = true}},
      .waiting = Waiting::kStreamMemoryOps};
  got = Travel(sent);
  ASSERT_TRUE(got.ok()) << got.status();
  const auto& step = std::get<SessionStepCommand>(got->body);
  EXPECT_EQ(step.session, 9u);
  EXPECT_EQ(step.kind, StepKind::kDflash);
  EXPECT_EQ(step.first_count, 0xfffffffeu);
  ASSERT_EQ(step.layers.size(), 2u);
  EXPECT_EQ(step.layers[1].cache, 4u);
  EXPECT_EQ(step.layers[1].layer, 31);
  ASSERT_EQ(step.changes.size(), 2u);
  EXPECT_EQ(step.changes[0].cache, 3u);
  EXPECT_EQ(step.changes[0].page_copies.at(0).destination, 2);
  EXPECT_EQ(step.changes[0].page_updates.at(0).pages, (std::vector<int32_t>{5, 6}));
  ASSERT_EQ(step.entries.size(), 2u);
  EXPECT_EQ(step.entries[0].first_position, 1 << 30);
  EXPECT_EQ(step.entries[0].query_rows, 8);
  EXPECT_TRUE(step.entries[1].replay);
  EXPECT_EQ(step.waiting, Waiting::kStreamMemoryOps);
}

TEST(Commands, NewsOfSessionsKeepEveryField) {
  SessionNews news{.session = 5, .rank = 3, .ended = 0xffffffff};
  news.conflicts = {{4, 1}, {8, 0}};
  SessionNews got = DecodeNews(3, EncodeNews(news));
  EXPECT_EQ(got.session, 5u);
  EXPECT_EQ(got.rank, 3);
  EXPECT_EQ(got.ended, 0xffffffffu);
  EXPECT_TRUE(got.status.ok());
  EXPECT_EQ(got.conflicts, news.conflicts);
  news.status = absl::DeadlineExceededError("silent");
  got = DecodeNews(0, EncodeNews(news));
  EXPECT_EQ(got.status, news.status);
}

TEST(Commands, BuffersKeepTheCommandAlive) {
  auto command = Base();
  auto bytes = std::make_shared<std::vector<std::byte>>(Bytes(1 << 16, 1));
  StepCommand step;
  step.q = {bytes->data(), DType::kF32, bytes->size()};
  command->body = step;
  command->owner = bytes;
  const std::weak_ptr<Command> alive = command;
  {
    grpc::ByteBuffer first = EncodeCommand(std::move(command), kNow);
    const std::vector<grpc::ByteBuffer> copies(3, first);
    first.Clear();
    EXPECT_FALSE(alive.expired());
    v1::CoordinatorMessage message;
    ASSERT_TRUE(DecodeMessage(copies[2], &message));
    EXPECT_EQ(std::memcmp(message.q().data(), bytes->data(), bytes->size()), 0);
  }
  EXPECT_TRUE(alive.expired());
}

TEST(Commands, ADeadlineGoneByLeavesNoTime) {
  const auto command = Base();
  command->deadline = kNow - milliseconds(5);
  const absl::StatusOr<Command> got = Travel(command);
  ASSERT_EQ(got.status(), absl::OkStatus());
  EXPECT_EQ(got->deadline, kNow);
}

TEST(Commands, RefusesWhatItDoesNotKnow) {
  v1::CoordinatorMessage message;
  message.mutable_command();
  EXPECT_EQ(FieldOf(DecodeCommand(message, kNow).status()), "command.body");
  message.mutable_command()->mutable_create_cache()->set_kv_dtype(static_cast<v1::DType>(77));
  EXPECT_EQ(FieldOf(DecodeCommand(message, kNow).status()), "create_cache.kv_dtype");
  v1::StepCommand* step = message.mutable_command()->mutable_step();
  EXPECT_EQ(FieldOf(DecodeCommand(message, kNow).status()), "step.kind");
  step->set_kind(v1::StepCommand::DECODE);
  EXPECT_EQ(FieldOf(DecodeCommand(message, kNow).status()), "step.q_dtype");
  step->set_q_dtype(v1::DTYPE_F32);
  step->set_k_dtype(v1::DTYPE_F32);
  EXPECT_EQ(FieldOf(DecodeCommand(message, kNow).status()), "step.v_dtype");
  message.mutable_command()->set_timeout_us(~uint64_t{0});
  step->set_v_dtype(v1::DTYPE_F32);
  const absl::StatusOr<Command> endless = DecodeCommand(message, kNow);
  ASSERT_EQ(endless.status(), absl::OkStatus());
  EXPECT_GT(endless->deadline, kNow);
}

TEST(Replies, KeepEveryBit) {
  Reply sent{.epoch = 3, .number = 1u << 31, .rank = 0};
  sent.conflicts = {0, 7};
  sent.more_memory = true;
  sent.mailbox = {.handle = std::string("h\0h", 3),
                  .gpu = "GPU-2",
                  .address = uint64_t{1} << 40,
                  .process_nonce = "n",
                  .machine = "m",
                  .several_gpus = true};
  sent.o = {0.1f, -0.0f, std::numeric_limits<float>::infinity(),
            std::numeric_limits<float>::denorm_min()};
  sent.lse = {-std::numeric_limits<float>::infinity(), 1e-30f};
  uint32_t odd_nan_bits = 0x7fc0'1234;
  float odd_nan;
  std::memcpy(&odd_nan, &odd_nan_bits, sizeof(odd_nan));
  sent.o.push_back(odd_nan);
  sent.times = {
      .plan = 1e-6, .append = 0.25, .attend = 3, .exchange = 4, .exchange_in_attend = true};

  v1::WorkerMessage message;
  ASSERT_TRUE(DecodeMessage(EncodeMessage(EncodeReply(sent)), &message));
  const absl::StatusOr<Reply> got = DecodeReply(message.epoch(), message.reply());
  ASSERT_EQ(got.status(), absl::OkStatus());
  EXPECT_EQ(got->epoch, sent.epoch);
  EXPECT_EQ(got->number, sent.number);
  EXPECT_EQ(got->rank, sent.rank);
  EXPECT_EQ(got->status, absl::OkStatus());
  EXPECT_TRUE(got->more_memory);
  EXPECT_EQ(got->conflicts, sent.conflicts);
  ASSERT_EQ(got->o.size(), sent.o.size());
  EXPECT_EQ(std::memcmp(got->o.data(), sent.o.data(), sent.o.size() * sizeof(float)), 0);
  EXPECT_EQ(got->lse, sent.lse);
  EXPECT_EQ(got->times.plan, sent.times.plan);
  EXPECT_EQ(got->times.append, sent.times.append);
  EXPECT_EQ(got->times.attend, sent.times.attend);
  EXPECT_EQ(got->times.exchange, sent.times.exchange);
  EXPECT_TRUE(got->times.exchange_in_attend);
  EXPECT_EQ(got->mailbox.handle, sent.mailbox.handle);
  EXPECT_EQ(got->mailbox.gpu, sent.mailbox.gpu);
  EXPECT_EQ(got->mailbox.address, sent.mailbox.address);
  EXPECT_EQ(got->mailbox.process_nonce, sent.mailbox.process_nonce);
  EXPECT_EQ(got->mailbox.machine, sent.mailbox.machine);
  EXPECT_TRUE(got->mailbox.several_gpus);
}

TEST(Replies, ErrorsKeepTheirField) {
  Reply sent{.epoch = 3, .number = 4, .rank = 2};
  sent.status = InvalidField("entries[2].new_tokens", "must be >= 0");
  const v1::WorkerMessage message = EncodeReply(sent);
  const absl::StatusOr<Reply> got = DecodeReply(message.epoch(), message.reply());
  ASSERT_EQ(got.status(), absl::OkStatus());
  EXPECT_EQ(got->status, sent.status);
  EXPECT_EQ(FieldOf(got->status), "entries[2].new_tokens");
}

TEST(Replies, AnErrorWithCodeOkIsNoReply) {
  v1::CommandReply message;
  message.mutable_status()->set_message("not really");
  EXPECT_EQ(FieldOf(DecodeReply(1, message).status()), "reply.status");
}

TEST(Messages, RubbishIsNoMessage) {
  const std::string rubbish = "\x0a\xff\xff\xff\xff\x0f rubbish";
  const grpc::Slice slice(rubbish);
  v1::WorkerMessage message;
  EXPECT_FALSE(DecodeMessage(grpc::ByteBuffer(&slice, 1), &message));
}

}  // namespace
}  // namespace tributary::worker
