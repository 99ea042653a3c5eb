"""The package against a service: errors, tensors, threads, and random operations beside an oracle in numpy.

The service is $TRIBUTARY_COORDINATOR, or the tributary-coordinator on the PATH.
"""

import os
import random
import subprocess
import sys
import threading
import time
import unittest

import numpy as np

import tributary
from tributary import CacheSpec, Entry, LayerSpec, errors

HEADS, KV_HEADS, DIM = 4, 2, 64
OPERATIONS = int(os.environ.get("TRIBUTARY_TEST_OPERATIONS", "500"))


def exact(rng, shape, kv_dtype):
    """Values that every kind of cache holds as they are: few bits of mantissa, small exponents."""
    steps, most = (4, 7) if kv_dtype == "fp8_e5m2" else (8, 15)
    return (rng.integers(-most, most + 1, shape) / steps).astype(np.float32)


def attention(q, keys, values, first_position, window_left=None, sinks=None):
    """(output, lse) of rows at first_position, ...; all in float64. keys, values: [tokens, KV_HEADS, DIM]."""
    rows, heads = q.shape[:2]
    output, lse = np.zeros((rows, heads, values.shape[2])), np.full((rows, heads), -np.inf)
    for row in range(rows):
        position = first_position + row
        begin = 0 if window_left is None else max(0, position - window_left)
        for head in range(heads):
            kv = head // (heads // keys.shape[1])
            logits = keys[begin : position + 1, kv].astype(np.float64) @ q[row, head].astype(np.float64)
            logits /= np.sqrt(q.shape[2])
            top = logits.max()
            weights = np.exp(logits - top)
            lse[row, head] = top + np.log(weights.sum())
            output[row, head] = weights @ values[begin : position + 1, kv] / weights.sum()
            if sinks is not None:
                output[row, head] /= 1 + np.exp(sinks[head] - lse[row, head])
    return output, lse


class WithService(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.service = tributary.serve(workers=3)
        cls.addClassCleanup(cls.service.close)
        cls.client = tributary.Client(cls.service.target, shared_memory_bytes=8 << 20)
        cls.addClassCleanup(cls.client.close)

    def cache(self, kv_dtype="bf16", **more):
        spec = CacheSpec(
            **{"layers": 2, "q_heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "capacity_tokens": 1 << 13,
               "kv_dtype": kv_dtype, **more})
        cache = self.client.create_cache(f"{self.id().rpartition('.')[2]}-{kv_dtype}", spec)
        self.addCleanup(cache.delete)
        return cache


class Calls(WithService):
    def test_shapes_and_dtypes(self):
        cache = self.cache()
        self.assertEqual((cache.ranks, cache.page_size), (3, 16))
        ones = np.ones((2, HEADS, DIM), np.float16)
        kv = np.ones((2, KV_HEADS, DIM), np.float16)
        done = cache.attend(0, [Entry(cache.open(), 0, 2, 2)], ones, kv, kv, lse=True)
        self.assertEqual((done.output.dtype, done.output.shape), (np.float16, (2, HEADS, DIM)))
        np.testing.assert_allclose(done.output.astype(np.float32), 1, atol=1e-2)
        np.testing.assert_allclose(done.lse, 8 + np.log([[1], [2]]) * np.ones((1, HEADS)), atol=1e-2)

    def test_bits_of_bfloat16(self):
        cache = self.cache()
        ones = (np.ones((1, HEADS, DIM), np.float32).view(np.uint32) >> 16).astype(np.uint16)
        done = cache.attend(0, [Entry(cache.open(), 0, 1, 1)], ones, ones[:, :KV_HEADS], ones[:, :KV_HEADS])
        np.testing.assert_array_equal(done.output, ones)

    def test_output_goes_where_the_caller_wants(self):
        cache = self.cache()
        q = np.ones((1, HEADS, DIM), np.float32)
        out = np.zeros_like(q)
        done = cache.attend(0, [Entry(cache.open(), 0, 1, 1)], q, q[:, :KV_HEADS], q[:, :KV_HEADS], out=out)
        self.assertIs(done.output, out)
        np.testing.assert_allclose(out, 1, atol=1e-2)
        with self.assertRaises(TypeError):  # a copy would be written, and lost
            cache.attend(0, [Entry(cache.open(), 0, 1)], q, out=np.zeros((1, DIM, HEADS), np.float32).transpose(0, 2, 1))

    def test_wrong_shapes_name_the_tensor(self):
        cache = self.cache()
        q = np.ones((1, HEADS, DIM), np.float32)
        kv = q[:, :KV_HEADS]
        entry = [Entry(cache.open(), 0, 1, 1)]
        for field, tensors in {
            "q.shape": (np.ones((2, HEADS, DIM), np.float32), kv, kv),
            "k.shape": (q, np.ones((1, KV_HEADS, DIM // 2), np.float32), kv),
            "v.shape": (q, kv, np.ones((1, DIM), np.float32)),
            "k": (q, None, kv),
            "v": (q, kv, kv.astype(np.float16)),
            "q": (q.astype(np.float64), kv, kv),
        }.items():
            with self.subTest(field), self.assertRaises(errors.InvalidArgument) as caught:
                cache.attend(0, entry, *tensors)
            self.assertEqual(caught.exception.field, field)

    def test_threads_run_while_a_call_waits(self):
        cache = self.cache()
        q = np.ones((1, HEADS, DIM), np.float32)
        failures = []

        def work():
            try:
                sequence = cache.open()
                for position in range(20):
                    cache.attend(0, [Entry(sequence, position, 1, 1)], q, q[:, :KV_HEADS], q[:, :KV_HEADS])
            except Exception as error:  # pylint: disable=broad-except
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        self.assertEqual(failures, [])

    def test_a_closed_client_says_so(self):
        client = tributary.Client(self.service.target)
        cache = client.create_cache("closed", CacheSpec(1, 1, 1, DIM, 100))
        cache.delete()
        client.close()
        client.close()
        with self.assertRaises(errors.Cancelled):
            cache.open()


class Errors(WithService):
    def test_a_position_beyond_the_end_tells_the_length(self):
        cache = self.cache()
        q = np.ones((1, HEADS, DIM), np.float32)
        sequence = cache.open()
        cache.append(0, [(sequence, 0, 1)], q[:, :KV_HEADS], q[:, :KV_HEADS])
        with self.assertRaises(errors.OutOfRange) as caught:
            cache.attend(0, [Entry(sequence, 5, 1)], q)
        error = caught.exception
        self.assertEqual((error.code, error.field, error.length, error.retry_after),
                         ("OUT_OF_RANGE", "entries[0].first_position", 1, None))
        with self.assertRaises(errors.AlreadyExists):
            cache.append(0, [(sequence, 0, 1)], 2 * q[:, :KV_HEADS], q[:, :KV_HEADS])

    def test_what_is_unknown(self):
        with self.assertRaises(errors.NotFound):
            self.cache().close(7)
        with self.assertRaises(tributary.TributaryError):
            self.client.create_cache("odd", CacheSpec(1, 1, 1, 65, 100))
        with self.assertRaises(ValueError):
            CacheSpec(1, 1, 1, DIM, 100, kv_dtype="int3")

    def test_nobody_answers(self):
        begin = time.monotonic()
        with self.assertRaises(errors.Unavailable):
            tributary.Client("unix:/nowhere", timeout=0.2)
        self.assertLess(time.monotonic() - begin, 10)

    def test_every_code_has_its_exception(self):
        for code in range(1, 17):
            error = errors.of_code(code, "why", "field", 1500, 7)
            self.assertIsInstance(error, tributary.TributaryError)
            self.assertEqual((str(error), error.field, error.retry_after, error.length), ("why", "field", 1.5, 7))
        self.assertEqual(len({type(errors.of_code(code, "", "", -1, -1)) for code in range(1, 17)}), 16)
        self.assertEqual(errors.of_code(14, "", "", -1, -1).retry_after, None)


class Oracle:
    """What the sequences of a cache hold, and random operations on both."""

    def __init__(self, test, cache, seed):
        self.test, self.cache = test, cache
        self.dice, self.rng = random.Random(seed), np.random.default_rng(seed)
        self.held = {}  # sequence: [(keys, values) of each layer]

    def tensor(self, tokens, heads):
        return exact(self.rng, (tokens, heads, DIM), self.cache.spec.kv_dtype)

    def step(self):
        kinds = ["attend"] * 5 + ["append", "fork", "truncate", "close", "open", "beyond"]
        kind = self.dice.choice(kinds) if self.held else "open"
        if len(self.held) > 12:
            kind = "close"
        getattr(self, kind)()

    def some(self):
        return self.dice.choice(list(self.held))

    def open(self):
        nothing = np.zeros((0, KV_HEADS, DIM), np.float32)
        self.held[self.cache.open()] = [(nothing, nothing)] * self.cache.spec.layers

    def close(self):
        sequence = self.some()
        self.cache.close(sequence)
        del self.held[sequence]

    def fork(self):
        parent = self.some()
        most = min(len(keys) for keys, _ in self.held[parent])
        length = self.dice.choice([None, self.dice.randint(0, most)])
        child = self.cache.fork(parent, length)
        kept = most if length is None else length
        self.held[child] = [(keys[:kept], values[:kept]) for keys, values in self.held[parent]]

    def truncate(self):
        sequence = self.some()
        length = self.dice.randint(0, max(len(keys) for keys, _ in self.held[sequence]))
        self.held[sequence] = [(keys[:length], values[:length]) for keys, values in self.held[sequence]]
        least = min(len(keys) for keys, _ in self.held[sequence])
        self.test.assertEqual(self.cache.truncate(sequence, length), least)

    def append(self):
        sequence, layer, tokens = self.some(), self.dice.randrange(2), self.dice.randint(1, 40)
        k, v = self.tensor(tokens, KV_HEADS), self.tensor(tokens, KV_HEADS)
        keys, values = self.held[sequence][layer]
        self.cache.append(layer, [(sequence, len(keys), tokens)], k, v)
        self.held[sequence][layer] = (np.concatenate([keys, k]), np.concatenate([values, v]))

    def beyond(self):
        sequence, layer = self.some(), self.dice.randrange(2)
        length = len(self.held[sequence][layer][0])
        with self.test.assertRaises(errors.OutOfRange) as caught:
            self.cache.attend(layer, [Entry(sequence, length + 1, 1)], self.tensor(1, HEADS))
        self.test.assertEqual(caught.exception.length, length)

    def attend(self):
        layer = self.dice.randrange(2)
        entries, rows, fresh = [], 0, {}
        for sequence in self.dice.sample(list(self.held), self.dice.randint(1, min(3, len(self.held)))):
            length = len(self.held[sequence][layer][0])
            count = self.dice.choice([1, 1, 4, 30])
            if length >= count and self.dice.random() < 0.3:
                entries.append(Entry(sequence, self.dice.randint(0, length - count), count))
            else:
                entries.append(Entry(sequence, length, count, count))
                fresh[sequence] = (self.tensor(count, KV_HEADS), self.tensor(count, KV_HEADS))
            rows += count
        q = self.tensor(rows, HEADS)
        k, v = (np.concatenate([fresh[e.sequence][i] for e in entries if e.new_tokens]) if fresh else None
                for i in (0, 1))
        done = self.cache.attend(layer, entries, q, k, v, lse=True)
        at = 0
        spec = self.cache.spec.layer_specs[layer]
        for entry in entries:
            if entry.sequence in fresh:
                self.held[entry.sequence][layer] = tuple(
                    np.concatenate(both) for both in zip(self.held[entry.sequence][layer], fresh[entry.sequence]))
            output, lse = attention(q[at : at + entry.rows], *self.held[entry.sequence][layer], entry.first_position,
                                    spec.window_left, spec.sinks or None)
            np.testing.assert_allclose(done.lse[at : at + entry.rows], lse, atol=2e-3, rtol=2e-3)
            np.testing.assert_allclose(done.output[at : at + entry.rows], output, atol=1e-2, rtol=1e-2)
            at += entry.rows


class RandomOperations(WithService):
    def test_they_give_what_numpy_gives(self):
        layers = (LayerSpec(), LayerSpec(window_left=50, sinks=(0.5, -1.0, 2.0, 0.0)))
        for seed, kv_dtype in enumerate(("bf16", "f16", "fp8_e4m3", "fp8_e5m2")):
            with self.subTest(kv_dtype):
                oracle = Oracle(self, self.cache(kv_dtype, layer_specs=layers, capacity_tokens=1 << 15), seed)
                for _ in range(OPERATIONS):
                    oracle.step()


class Importing(unittest.TestCase):
    def test_is_quick_and_brings_no_torch(self):
        code = ("import numpy, sys, time; begin = time.monotonic(); import tributary; "
                "assert 'torch' not in sys.modules; print(time.monotonic() - begin)")
        took = float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
        self.assertLess(took, 3)  # 0.1 on a quiet machine


if __name__ == "__main__":
    unittest.main(verbosity=2)
