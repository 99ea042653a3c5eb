"""tributary.vllm beside a block manager that does what vLLM's does: prefix caching, preemption, rejected guesses.

The oracle is a paged cache: keys and values lie in slots, and attention gathers them by the block table.
"""

import random
import unittest

import numpy as np
from served import WithService

from tributary import CacheSpec, StepEntry
from tributary.vllm import PADDING, BlockMap

HEADS, KV_HEADS, DIM, LAYERS, BLOCK = 4, 2, 64, 2, 4


class Request:
    def __init__(self, name, tokens, new):
        self.name, self.tokens, self.new = name, tokens, new  #: prompt and text; tokens to be written after it
        self.blocks, self.computed = [], 0


class Scheduler:
    """Blocks as vLLM has them: full ones are found again by their whole prefix, until they are needed for others."""

    def __init__(self, blocks):
        self.free = list(range(blocks))  #: in the order in which they are taken
        self.users = dict.fromkeys(range(blocks), 0)
        self.prefixes = {}  #: tokens up to a block's end: block

    def take(self, request, length):
        """Blocks for `length` tokens; False: there are none, and nothing was taken."""
        needed = -(-length // BLOCK) - len(request.blocks)
        if needed > len(self.free):
            return False
        for _ in range(needed):
            block = self.free.pop(0)
            self.prefixes = {prefix: held for prefix, held in self.prefixes.items() if held != block}
            self.users[block] = 1
            request.blocks.append(block)
        return True

    def find_prefix(self, request):
        """Blocks that are there already; the last token is computed in any case."""
        for end in range(BLOCK, len(request.tokens), BLOCK):
            block = self.prefixes.get(tuple(request.tokens[:end]))
            if block is None:
                break
            if self.users[block] == 0:
                self.free.remove(block)
            self.users[block] += 1
            request.blocks.append(block)
            request.computed = end

    def computed(self, request, length):
        request.computed = length
        for end in range(BLOCK, length + 1, BLOCK):
            self.prefixes.setdefault(tuple(request.tokens[:end]), request.blocks[end // BLOCK - 1])

    def release(self, request):
        for block in reversed(request.blocks):
            self.users[block] -= 1
            if self.users[block] == 0:
                self.free.append(block)
        request.blocks, request.computed = [], 0


def of_token(token, position, layer, kind, heads):
    """What a model would project: of the token, its position and the layer. Exact in bfloat16."""
    rng = np.random.default_rng([token, position, layer, kind])
    return (rng.integers(-15, 16, (heads, DIM)) / 8).astype(np.float32)


class Engine:
    """Runs steps on a session and on the paged cache, and compares them."""

    def __init__(self, test, cache, blocks):
        self.test, self.scheduler = test, Scheduler(blocks)
        self.map = BlockMap(cache, BLOCK)
        self.session = cache.session(max_rows=256)
        self.keys = np.zeros((LAYERS, blocks * BLOCK, KV_HEADS, DIM), np.float32)
        self.values = np.zeros_like(self.keys)

    def metadata(self, parts):
        """As vLLM states it, with a row of padding at the end."""
        counts = [count for _, count in parts]
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        table = np.zeros((len(parts) + 1, 64), np.int32)
        slots = []
        for i, (request, count) in enumerate(parts):
            table[i, : len(request.blocks)] = request.blocks
            at = np.arange(request.computed, request.computed + count)
            slots.append(np.asarray(request.blocks)[at // BLOCK] * BLOCK + at % BLOCK)
        lengths = np.asarray([request.computed + count for request, count in parts] + [0], np.int32)
        return {"requests": [request.name for request, _ in parts], "block_table": table, "seq_lens": lengths,
                "query_start_loc": np.append(starts, starts[-1] + 1),
                "slot_mapping": np.append(np.concatenate(slots), PADDING)}  # fmt: skip

    def step(self, parts, fails=False):
        """Computes so many tokens of each request."""
        told = self.metadata(parts)
        step = self.map.step(**told)
        if fails:
            self.map.failed(step)
            step = self.map.step(**told)
        number = self.session.submit(step.entries, layers=LAYERS)
        where = [(request, at) for request, count in parts for at in range(request.computed, request.computed + count)]
        self.test.assertEqual(step.rows.tolist(), list(range(len(where))))
        for layer in range(LAYERS):
            q, k, v = (np.stack([of_token(r.tokens[at], at, layer, kind, heads) for r, at in where])
                       for kind, heads in ((0, HEADS), (1, KV_HEADS), (2, KV_HEADS)))  # fmt: skip
            slots = told["slot_mapping"][: len(where)]
            self.keys[layer, slots], self.values[layer, slots] = k, v
            output = self.session.attend(q, k, v)
            for row, (request, at) in enumerate(where):
                self.test_row(layer, q[row], output[row], request, at)
        self.session.wait(number)

    def test_row(self, layer, q, output, request, at):
        seen = np.arange(at + 1)
        slots = np.asarray(request.blocks)[seen // BLOCK] * BLOCK + seen % BLOCK
        keys, values = self.keys[layer, slots].repeat(2, 1), self.values[layer, slots].repeat(2, 1)
        logits = np.einsum("hd,thd->ht", q, keys) / DIM**0.5
        weights = np.exp(logits - logits.max(1, keepdims=True))
        want = np.einsum("ht,thd->hd", weights / weights.sum(1, keepdims=True), values)
        np.testing.assert_allclose(output, want, atol=1e-2, rtol=1e-2)


class VLLM(WithService):
    def setUp(self):
        spec = CacheSpec(LAYERS, HEADS, KV_HEADS, DIM, capacity_tokens=1 << 13, kv_dtype="bf16")
        self.cache = self.client.create_cache(self.id().rpartition(".")[2], spec)
        self.addCleanup(self.cache.delete)

    def test_batches_as_vllm_schedules_them(self):
        dice = random.Random(1)
        engine = Engine(self, self.cache, 26)
        scheduler = engine.scheduler
        prompts = [[dice.randrange(50) for _ in range(24)] for _ in range(3)]
        names = (f"request-{i}" for i in range(1000))
        running, hits, preempted = [], 0, 0
        for number in range(120):
            if len(running) < 4 and dice.random() < 0.5:
                prefix = dice.choice(prompts)[: dice.randint(1, 24)]
                tokens = prefix + [dice.randrange(50) for _ in range(dice.randint(1, 9))]
                request = Request(next(names), tokens, dice.randint(1, 12))
                scheduler.find_prefix(request)
                hits += request.computed > 0
                running.append(request)
            parts = []
            for request in list(running):
                left = len(request.tokens) - request.computed
                count = min(left, dice.choice([3, 8, 32]))
                guesses = dice.choice([0, 0, 3]) if count == left else 0
                request.tokens = request.tokens + [dice.randrange(50) for _ in range(guesses)]
                if not scheduler.take(request, request.computed + count + guesses):
                    request.tokens = request.tokens[: len(request.tokens) - guesses]
                    scheduler.release(request)  # it begins anew, later
                    engine.map.finish([request.name])
                    preempted += 1
                    running.remove(request)
                    continue
                parts.append((request, count, guesses))
            if not parts:
                continue
            engine.step([(request, count + guesses) for request, count, guesses in parts], fails=number % 7 == 3)
            for request, count, guesses in parts:
                accepted = dice.randint(0, guesses)
                request.tokens = request.tokens[: len(request.tokens) - guesses + accepted]
                scheduler.computed(request, request.computed + count + accepted)
                if request.computed == len(request.tokens):
                    request.tokens = [*request.tokens, dice.randrange(50)]
                    request.new -= 1
                if request.new <= 0:
                    engine.map.finish([request.name])
                    scheduler.release(request)
                    running.remove(request)
            self.assertLessEqual(len(engine.map), 26 + len(running))
        self.assertGreater(hits, 5)
        self.assertGreater(preempted, 0)
        engine.session.close()
        engine.map.close()

    def told(self, blocks, length, count, slots=None, name="a"):
        at = np.arange(length - count, length)
        lies = np.asarray(blocks)[at // BLOCK] * BLOCK + at % BLOCK if slots is None else slots
        return {"requests": [name], "block_table": [blocks], "seq_lens": [length], "query_start_loc": [0, count],
                "slot_mapping": lies}  # fmt: skip

    def test_what_is_not_so_is_refused(self):
        blocks = BlockMap(self.cache, BLOCK)
        step = blocks.step(**self.told([3, 9], 5, 5))
        self.assertEqual(step.entries, [StepEntry(blocks.sequence("a"), 0, 5, 5)])
        with self.assertRaisesRegex(ValueError, "slot_mapping: a"):
            blocks.step(**self.told([3, 9], 6, 1, slots=[0]))
        with self.assertRaisesRegex(ValueError, "seq_lens: a: 5 tokens"):
            blocks.step(**self.told([3, 9], 8, 1))
        with self.assertRaisesRegex(ValueError, "block_table: b"):
            blocks.step(**self.told([7, 9, 11], 9, 1, name="b"))
        fork = blocks.step(**self.told([3, 12], 6, 2, name="c")).entries[0]
        self.assertEqual((fork.fork_from, fork.fork_length, fork.first_position), (step.entries[0].sequence, 4, 4))
        again = blocks.step(**self.told([3, 9], 4, 1)).entries[0]
        self.assertEqual(again.truncate_to, 3)
        self.assertEqual(len(blocks), 2)
        blocks.finish(["a", "c", "nobody"])
        blocks.step(**self.told([3, 12], 8, 8, name="d"))  # all blocks of a and c
        self.assertEqual(len(blocks), 1)
        blocks.close()
        self.assertEqual(len(blocks), 0)


if __name__ == "__main__":
    unittest.main(verbosity=2)
