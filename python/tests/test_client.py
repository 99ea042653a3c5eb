"""The package against a service: errors, tensors, threads, and random operations beside an oracle in numpy.

The service is $TRIBUTARY_COORDINATOR, or the tributary-coordinator on the PATH.
"""

import asyncio
import contextlib
import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import warnings
import weakref
from unittest import mock

import numpy as np
import served

import tributary
import tributary.aio
from tributary import CacheSpec, Entry, LayerSpec, StepEntry, errors

try:
    import ml_dtypes
except ImportError:  # it comes from PyPI
    ml_dtypes = None

HEADS, KV_HEADS, DIM = 4, 2, 64
# Of each of six kinds of cache: 3,000 in all. TRIBUTARY_TEST_OPERATIONS=2000 makes 12,000 of them.
OPERATIONS = int(os.environ.get("TRIBUTARY_TEST_OPERATIONS", "500"))


def exact(rng, shape, kv_dtype):
    """Values that every kind of cache holds as they are: few bits of mantissa, small exponents."""
    if kv_dtype == "nvfp4":  # with 6 in every block of 16, so that all block scales are 1
        values = rng.choice(np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]), shape) * rng.choice((-1.0, 1.0), shape)
        values[..., ::16] = 6
        return values.astype(np.float32)
    steps, most = (4, 7) if kv_dtype == "fp8_e5m2" else (8, 15)
    return (rng.integers(-most, most + 1, shape) / steps).astype(np.float32)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def from_e4m3(codes):
    """What FP8 codes, none of them NaN, stand for."""
    exponent, mantissa = (codes >> 3 & 15).astype(np.int32), (codes & 7) / 8
    magnitude = np.where(exponent == 0, np.ldexp(mantissa, -6), np.ldexp(1 + mantissa, exponent - 7))
    return np.where(codes & 128, -magnitude, magnitude).astype(np.float32)


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


def whole_heads():
    """q, k and v of four rows; the same in every process."""
    rng = np.random.default_rng(11)
    return [exact(rng, (4, heads, DIM), "bf16") for heads in (HEADS, KV_HEADS, KV_HEADS)]


def drive(session, sequence, position):
    """An endpoint's part of a step with `whole_heads`: output and LSE of its heads, for each layer."""
    number = session.submit([StepEntry(sequence, position, 4, 4)], layers=2)
    done = []
    for layer in range(2):
        shape = session.layer_shape(layer)
        own, of_kv = (
            slice(shape.first_q_head, shape.first_q_head + shape.q_heads),
            slice(shape.first_kv_head, shape.first_kv_head + shape.kv_heads),
        )
        q, k, v = whole_heads()
        kv = (k[:, of_kv], v[:, of_kv]) if shape.kv_heads else (None, None)
        lse = np.empty((4, shape.q_heads), np.float32)
        done.append((session.attend(q[:, own], *kv, lse=lse), lse))
    session.wait(number)
    return done


def join(target, invitation, endpoint, sequence, position):
    """What another process of the host does."""
    with tributary.Client(target) as client:
        session = client.join_session(invitation, endpoint)
        assert session.endpoint == endpoint
        done = drive(session, sequence, position)
        session.abandon()  # the step is over for all of them
        return done


class WithService(served.WithService):
    SERVICE = {"workers": 3, "program": ""}
    CLIENT = {"shared_memory_bytes": 8 << 20}
    numbers = itertools.count()

    def cache(self, kv_dtype="bf16", **more):
        spec = CacheSpec(
            **{"layers": 2, "q_heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "capacity_tokens": 1 << 13,
               "kv_dtype": kv_dtype, **more})
        cache = self.client.create_cache(f"cache-{next(self.numbers)}", spec)
        self.addCleanup(cache.delete)
        return cache


    @contextlib.contextmanager
    def stopped(self):
        """The service answers nobody meanwhile."""
        process = self.service.process
        process.send_signal(signal.SIGSTOP)
        with open(f"/proc/{process.pid}/status", encoding="utf-8") as status:
            while "State:\tT" not in status.read():  # its threads stop one after the other
                time.sleep(0.001)
                status.seek(0)
        try:
            yield
        finally:
            self.service.process.send_signal(signal.SIGCONT)


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

    def test_data_loss_says_what_is_missing(self):
        error = errors.of_code(15, "lost", "entries[0].sequence_id", -1, -1, 7, 3, [(16, 32), (80, 96)])
        self.assertIsInstance(error, errors.DataLoss)
        self.assertEqual(error.missing, errors.Missing(sequence=7, layer=3, ranges=[(16, 32), (80, 96)]))
        self.assertIsNone(errors.of_code(15, "lost", "", -1, -1).missing)

    def test_many_sequences_change_in_one_call(self):
        cache = self.cache()
        q = np.ones((3, HEADS, DIM), np.float32)
        parent, other = cache.update([("open",), ("open",)])
        cache.attend(0, [Entry(parent, 0, 3, 3)], q, q[:, :KV_HEADS], q[:, :KV_HEADS])
        cache.attend(1, [Entry(parent, 0, 3, 3)], q, q[:, :KV_HEADS], q[:, :KV_HEADS])
        whole, short, cut, closed = cache.update(
            [("fork", parent), ("fork", parent, 1), ("truncate", parent, 2), ("close", other)]
        )
        self.assertEqual((cut, closed), (parent, other))
        self.assertEqual([cache.truncate(s, 9) for s in (whole, short, parent)], [3, 1, 2])
        with self.assertRaises(errors.NotFound) as caught:
            cache.update([("truncate", whole, 0), ("close", other)])
        self.assertTrue(caught.exception.field.startswith("updates[1]"))
        self.assertEqual(cache.truncate(whole, 9), 3, "all of them or none")
        with self.assertRaises(ValueError):
            cache.update([("truncate", whole)])

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
        with self.assertRaises(errors.InvalidArgument) as caught:  # a copy would be written, and lost
            cache.attend(0, [Entry(cache.open(), 0, 1)], q, out=np.zeros((1, DIM, HEADS), np.float32).transpose(0, 2, 1))
        self.assertEqual((caught.exception.field, str(caught.exception)), ("out", "out: must be contiguous"))

    def test_outputs_of_other_types(self):
        cache = self.cache(layer_specs=(LayerSpec(o_scale=0.25),))
        rng = np.random.default_rng(5)
        q, k, v = (exact(rng, (3, heads, DIM), "bf16") for heads in (HEADS, KV_HEADS, KV_HEADS))
        sequence = cache.open()
        want = cache.attend(0, [Entry(sequence, 0, 3, 3)], q, k, v).output
        rows = [Entry(sequence, 0, 3)]

        half = cache.attend(0, rows, q, output_dtype="f16").output
        np.testing.assert_array_equal(half, want.astype(np.float16))
        bf16 = cache.attend(0, rows, q, output_dtype="bf16").output
        np.testing.assert_allclose((bf16.astype(np.uint32) << 16).view(np.float32), want, rtol=2**-8)
        stored = cache.attend(0, rows, q, output_dtype="fp8_e4m3", o_scale=0.125).output
        self.assertEqual((stored.dtype, stored.shape), (np.uint8, (3, HEADS, DIM)))
        np.testing.assert_allclose(from_e4m3(stored) * 0.125, want, rtol=1 / 16, atol=2**-13)
        of_layer = cache.start(0, rows, q, output_dtype="fp8_e4m3").result().output
        np.testing.assert_allclose(from_e4m3(of_layer) * 0.25, want, rtol=1 / 16, atol=2**-12)

        scale = np.abs(want).max() / 2688
        stored = cache.attend(0, rows, q, output_dtype="nvfp4", o_scale=float(scale)).output
        self.assertEqual((stored.dtype, stored.shape), (np.uint8, (want.size * 9 // 16,)))
        codes, blocks = stored[: want.size // 2], from_e4m3(stored[want.size // 2 :]) * scale
        elements = E2M1[np.stack((codes & 15, codes >> 4), 1)].reshape(-1, 16)
        largest = np.abs(want.reshape(-1, 16)).max(1)
        np.testing.assert_allclose(blocks, largest / 6, rtol=1 / 16 + 1e-6)
        # A step of e2m1 is at most 2, and the largest number may lie a 16th beyond 6.
        error = np.abs(elements * blocks[:, None] - want.reshape(-1, 16))
        self.assertLess((error / blocks[:, None]).max(), 1 + 6 / 16)

        out = np.zeros((3, HEADS, DIM), np.uint8)
        self.assertIs(cache.attend(0, rows, q, out=out, output_dtype="fp8_e4m3", o_scale=0.125).output, out)
        with self.assertRaises(errors.InvalidArgument) as caught:
            cache.attend(0, rows, q, out=out.astype(np.float32), output_dtype="fp8_e4m3")
        self.assertEqual(caught.exception.field, "out")
        with self.assertRaises(errors.InvalidArgument) as caught:
            cache.attend(0, rows, q, out=out, output_dtype="nvfp4")
        self.assertEqual(caught.exception.field, "out")
        with self.assertRaises(errors.InvalidArgument) as caught:
            cache.attend(0, rows, q, o_scale=2.0)  # of float32
        self.assertEqual(caught.exception.field, "o_scale")
        for wrong in ({"output_dtype": "fp8_e5m2"}, {"output_dtype": "nvfp4", "o_scale": 0.0}):
            with self.assertRaises(ValueError):
                cache.attend(0, rows, q, **wrong)

    def test_masks_of_drafts(self):
        layers = (LayerSpec(causal_block=True), LayerSpec(window_right=1, window_base="anchor"))
        cache = self.cache(layer_specs=layers, modes=("dflash",), interleave=4)
        ones = np.ones((4, HEADS, DIM), np.float32)
        kv = ones[:, :KV_HEADS]
        block = [Entry(cache.open(), 0, 4, 4)]
        for layer, seen in enumerate(([1, 2, 3, 4], [2, 2, 2, 2])):  # keys of each row, told by the LSE
            lse = cache.attend(layer, block, ones, kv, kv, mode="dflash", lse=True).lse
            np.testing.assert_allclose(lse, 8 + np.log(seen)[:, None] * np.ones((1, HEADS)), atol=1e-2)
        with self.assertRaises(errors.FailedPrecondition):
            cache.attend(0, block, ones, kv, kv)
        with self.assertRaises(ValueError):
            LayerSpec(window_base="row")
        with self.assertRaises(ValueError):
            self.cache(modes=("prefill",))

    def test_options_of_caches(self):
        self.cache("fp8_e4m3", fp8_queries=True, fp8_weights=True, replicas=0)
        with self.assertRaises(errors.InvalidArgument) as caught:
            self.cache(replicas=2)
        self.assertEqual(caught.exception.field, "spec.replicas")
        for refused in ({"fp8_weights": True}, {"fp8_queries": True}):  # of a bf16 cache
            with self.subTest(refused), self.assertRaises(errors.TributaryError) as caught:
                self.cache(**refused)
            self.assertIn(next(iter(refused)), str(caught.exception))

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

    def test_options_are_data(self):
        with tributary.Client(self.service.target, timeout=5, lease="only-its-holder-knows") as client:
            options = client.options
        self.assertEqual(options["target"], self.service.target)
        self.assertEqual(options["timeout"], "5000 ms")
        self.assertEqual(options["lease"], "(set)")
        self.assertEqual(options["security.token_file"], "")
        self.assertNotIn("only-its-holder-knows", str(options))

    def test_a_closed_client_says_so(self):
        client = tributary.Client(self.service.target)
        cache = client.create_cache("closed", CacheSpec(1, 1, 1, DIM, 100))
        cache.delete()
        client.close()
        client.close()
        with self.assertRaises(errors.Cancelled):
            cache.open()


    def test_bfloat16_of_ml_dtypes(self):
        if ml_dtypes is None:
            self.skipTest("ml_dtypes is not installed")
        cache = self.cache()
        ones = np.ones((2, HEADS, DIM), ml_dtypes.bfloat16)
        done = cache.attend(0, [Entry(cache.open(), 0, 2, 2)], ones, ones[:, :KV_HEADS], 3 * ones[:, :KV_HEADS])
        self.assertEqual(done.output.dtype, ones.dtype)
        np.testing.assert_array_equal(done.output, 3 * ones)
        with cache.session(max_rows=2, dtype="bf16") as session:
            session.submit([StepEntry(cache.open(), 0, 2, 2)], layers=1)
            np.testing.assert_array_equal(session.attend(ones, ones[:, :KV_HEADS], ones[:, :KV_HEADS]), ones)

    def test_a_layer_may_have_a_dtype_of_its_own(self):
        cache = self.cache("bf16", layer_specs=(LayerSpec(), LayerSpec(kv_dtype="fp8_e4m3")))
        q, sequence = np.ones((1, HEADS, DIM), np.float32), cache.open()
        odd = np.full((1, KV_HEADS, DIM), 1.0625, np.float32)  # has more bits than FP8
        values = [cache.attend(layer, [Entry(sequence, 0, 1, 1)], q, odd, odd).output[0, 0, 0] for layer in (0, 1)]
        self.assertEqual((values[0], values[1] in (1.0, 1.125)), (1.0625, True))
        with self.assertRaises(ValueError):
            LayerSpec(kv_dtype="f64")

    def test_a_call_may_have_a_timeout_of_its_own(self):
        cache = self.cache()
        q = np.ones((1, HEADS, DIM), np.float32)
        sequence = cache.open(timeout=20)
        cache.attend(0, [Entry(sequence, 0, 1, 1)], q, q[:, :KV_HEADS], q[:, :KV_HEADS], timeout=20.5)
        cache.append(1, [(sequence, 0, 1)], q[:, :KV_HEADS], q[:, :KV_HEADS], timeout=20)
        self.assertEqual(cache.truncate(cache.fork(sequence, timeout=20), 9, timeout=20), 1)
        cache.close(sequence, timeout=20)
        for wrong in (0, -1.0):
            with self.assertRaises(errors.InvalidArgument) as caught:
                cache.open(timeout=wrong)
            self.assertEqual(caught.exception.field, "timeout")


    def test_tensors_are_in_memory_that_was_handed_over_at_the_socket(self):
        cache = self.cache()
        q = np.ones((1, HEADS, DIM), np.float32)
        cache.attend(0, [Entry(cache.open(), 0, 1, 1)], q, q[:, :KV_HEADS], q[:, :KV_HEADS])

        def regions(process):  # device and inode of each
            with open(f"/proc/{process}/maps", encoding="utf-8") as maps:
                return {tuple(line.split()[3:5]) for line in maps if "/memfd:tributary-region" in line}

        self.assertTrue(regions("self") & regions(self.service.process.pid))

    def test_a_call_that_is_started_is_waited_for_later(self):
        cache = self.cache()
        q, sequence = np.ones((1, HEADS, DIM), np.float32), cache.open()
        kv = q[:, :KV_HEADS]
        calls = [cache.start(0, [Entry(sequence, at, 1, 1)], q, kv, (at + 1) * kv, lse=True, yield_ms=at * 10)
                 for at in range(3)]
        np.testing.assert_allclose(calls[2].result().output, 2, atol=2e-2)
        self.assertEqual([call.result().lse.shape for call in calls], [(1, HEADS)] * 3)
        self.assertTrue(calls[2].done())
        calls[2].cancel()  # it is over
        np.testing.assert_allclose(calls[2].result().output, 2, atol=2e-2)
        with self.assertRaises(errors.OutOfRange) as caught:
            cache.start(0, [Entry(sequence, 9, 1)], q).result()
        self.assertEqual(caught.exception.length, 3)
        for wrong in (-1, 1001):
            with self.assertRaises(errors.InvalidArgument) as caught:
                cache.attend(0, [Entry(sequence, 0, 1)], q, yield_ms=wrong)
            self.assertEqual(caught.exception.field, "yield_ms")

    def test_a_call_is_cancelled(self):
        cache = self.cache()
        q, sequence = np.ones((1, HEADS, DIM), np.float32), cache.open()
        with self.stopped():
            call = cache.start(0, [Entry(sequence, 0, 1, 1)], q, q[:, :KV_HEADS], q[:, :KV_HEADS])
            self.assertFalse(call.done())
            call.cancel()
            with self.assertRaises(errors.Cancelled):
                call.result()
            call.cancel()
        self.assertEqual(cache.truncate(sequence, 0), 0)


class Sessions(WithService):
    def step(self, session, cache, entries, tensors, **more):
        """One step of both layers; the outputs and the LSEs of each."""
        number = session.submit(entries, layers=2, **more)
        done = []
        for q, k, v in tensors:
            lse = np.empty(q.shape[:2], np.float32)
            done.append((session.attend(q, k, v, lse=lse), lse))
        session.wait(number)
        return done

    def test_they_give_what_numpy_gives(self):
        rng = np.random.default_rng(5)
        layers = (LayerSpec(), LayerSpec(window_left=7, sinks=(0.5, -1.0, 2.0, 0.0)))
        for memory in ("host", "messages"):
            with self.subTest(memory):
                cache = self.cache(layer_specs=layers)
                held = {cache.open(): [(np.zeros((0, KV_HEADS, DIM), np.float32),) * 2] * 2 for _ in range(3)}
                with cache.session(max_rows=64, memory=memory, lse=True) as session:
                    self.assertEqual(session.memory, memory)
                    self.assertEqual(session.layer_shape(1), tributary.LayerShape(HEADS, KV_HEADS, DIM, DIM))
                    for rows in (20, 1, 1, 5, 1):
                        self.one(rng, session, cache, held, rows)

    def one(self, rng, session, cache, held, rows):
        entries = [StepEntry(s, len(layers[0][0]), rows, rows) for s, layers in held.items()]
        total, layers = rows * len(held), self.spec_layers(cache)
        tensors = [[exact(rng, (total, heads, DIM), "bf16") for heads in (HEADS, KV_HEADS, KV_HEADS)] for _ in range(2)]
        done = self.step(session, cache, entries, tensors)
        for layer, ((q, k, v), (output, lse)) in enumerate(zip(tensors, done)):
            for i, entry in enumerate(entries):
                part = slice(i * rows, (i + 1) * rows)
                kept = tuple(np.concatenate(both) for both in zip(held[entry.sequence][layer], (k[part], v[part])))
                held[entry.sequence] = [kept if n == layer else old for n, old in enumerate(held[entry.sequence])]
                want = attention(q[part], *kept, entry.first_position, layers[layer].window_left,
                                 layers[layer].sinks or None)
                np.testing.assert_allclose(output[part], want[0], atol=1e-2, rtol=1e-2)
                np.testing.assert_allclose(lse[part], want[1], atol=2e-3, rtol=2e-3)

    @staticmethod
    def spec_layers(cache):
        return cache.spec.layer_specs

    def test_forks_truncations_and_strides(self):
        cache = self.cache()
        parent, child = cache.open(), cache.open()
        fused = np.zeros((4, HEADS + 2 * KV_HEADS, DIM), np.float32)
        fused[:, -KV_HEADS:] = np.arange(4)[:, None, None]
        q, k, v = fused[:, :HEADS], fused[:, HEADS:-KV_HEADS], fused[:, -KV_HEADS:]
        with cache.session(max_rows=4, lse=True) as session:
            out = np.zeros((HEADS, 4, DIM), np.float32).transpose(1, 0, 2)
            done = self.step(session, cache, [StepEntry(parent, 0, 4, 4)], [(q, k, v)] * 2)
            np.testing.assert_allclose(done[0][0][:, 0, 0], [0, 0.5, 1, 1.5], atol=1e-2)
            number = session.submit([StepEntry(child, 2, 0, 1, truncate_to=2, fork_from=parent)], layers=2,
                                    append_only=True)
            session.append(k[:1], v[:1])
            session.append(k[:1], v[:1])
            session.wait(number)
            self.assertEqual((cache.truncate(child, 99), cache.truncate(parent, 99)), (3, 4))
            number = session.submit([StepEntry(child, 2, 1)], layers=1, first_layer=1)  # a row, and no token
            self.assertIs(session.attend(q[:1], out=out[:1]).base, out.base)
            np.testing.assert_allclose(out[0, :, 0], 1 / 3, atol=1e-2)
            session.wait(number)

    def test_outputs_of_another_type(self):
        rng = np.random.default_rng(9)
        cache = self.cache(layer_specs=(LayerSpec(o_scale=0.25),))
        q, k, v = (exact(rng, (5, heads, DIM), "bf16") for heads in (HEADS, KV_HEADS, KV_HEADS))
        sequence = cache.open()
        want = cache.attend(0, [Entry(sequence, 0, 5, 5)], q, k, v).output
        for memory, kind in itertools.product(("host", "messages"), ("fp8_e4m3", "f16", "bf16")):
            with self.subTest(memory=memory, output_dtype=kind):
                plain = cache.attend(0, [Entry(sequence, 0, 5)], q, output_dtype=kind).output
                with cache.session(max_rows=2, memory=memory, output_dtype=kind) as session:  # in three pieces
                    self.assertEqual((session.dtype, session.output_dtype), ("f32", kind))
                    number = session.submit([StepEntry(sequence, 0, 5)], layers=1)
                    with self.assertRaises(errors.InvalidArgument) as caught:
                        session.attend(q, out=np.zeros(q.shape, np.float32))
                    self.assertEqual(caught.exception.field, "out")
                    output = session.attend(q)
                    session.wait(number)
                self.assertEqual(output.dtype, plain.dtype)
                np.testing.assert_array_equal(output, plain)
        stored = cache.attend(0, [Entry(sequence, 0, 5)], q, output_dtype="fp8_e4m3").output
        np.testing.assert_allclose(from_e4m3(stored) * 0.25, want, rtol=1 / 16, atol=2**-12)
        with self.assertRaises(errors.InvalidArgument) as caught:
            cache.session(output_dtype="nvfp4")
        self.assertEqual(caught.exception.field, "options.output_dtype")

    def test_endpoints_are_processes(self):
        cache = self.cache()
        sequence = cache.open()
        processes = multiprocessing.get_context("spawn")
        for replicated in (False, True):
            with self.subTest(kv_replicated=replicated):
                position = cache.truncate(sequence, 0)
                session = cache.session(max_rows=4, memory="host", lse=True, endpoints=4, kv_replicated=replicated)
                self.assertEqual((session.endpoint, session.endpoints), (0, 4))
                with self.assertRaises(errors.InvalidArgument) as caught:
                    self.client.join_session(session.invitation, 4)
                self.assertEqual(caught.exception.field, "join.endpoint")
                with processes.Pool(3) as pool:
                    others = [
                        pool.apply_async(join, (self.service.target, session.invitation, endpoint, sequence, position))
                        for endpoint in (1, 2, 3)
                    ]
                    outputs = [drive(session, sequence, position)] + [other.get(60) for other in others]
                q, k, v = whole_heads()
                want, sums = attention(q, k, v, 0)
                for layer in range(2):
                    got = np.concatenate([output for output, _ in (of[layer] for of in outputs)], axis=1)
                    np.testing.assert_allclose(got, want, atol=1e-2, rtol=1e-2)
                    got = np.concatenate([lse for _, lse in (of[layer] for of in outputs)], axis=1)
                    np.testing.assert_allclose(got, sums, atol=2e-3, rtol=2e-3)
                session.abandon()

    def test_an_endpoint_that_leaves_ends_the_session_for_all(self):
        cache = self.cache()
        session = cache.session(max_rows=4, memory="host", endpoints=2)
        other = self.client.join_session(session.invitation, 1)
        self.assertIsNone(other.invitation)
        self.assertEqual((other.endpoint, other.max_rows, other.memory), (1, 4, "host"))
        self.assertEqual(other.layer_shape(0), tributary.LayerShape(2, 1, DIM, DIM, 2, 1))
        with self.assertRaises(errors.AlreadyExists):
            self.client.join_session(session.invitation, 1)
        other.abandon()
        q, k, v = whole_heads()
        with self.assertRaises(errors.Aborted) as caught:
            session.submit([StepEntry(cache.open(), 0, 4, 4)], layers=2)
            session.attend(q[:, :2], k[:, :1], v[:, :1])
        self.assertIn("endpoint 1", str(caught.exception))

    def test_what_does_not_fit_is_refused_and_the_session_goes_on(self):
        cache = self.cache()
        q = np.ones((2, HEADS, DIM), np.float32)
        kv = q[:, :KV_HEADS]
        with cache.session(max_rows=2) as session:
            with self.assertRaises(errors.OutOfRange) as caught:
                session.submit([StepEntry(cache.open(), 5, 1, 1)], layers=2)
            self.assertEqual(caught.exception.length, 0)
            number = session.submit([StepEntry(cache.open(), 0, 2, 2)], layers=1)
            for field, tensors in {
                "k.rows": (q, kv[:1], kv),
                "q": (q.astype(np.float16), kv, kv),
                "q.shape": (q[0], kv, kv),
            }.items():
                with self.subTest(field), self.assertRaises(errors.InvalidArgument) as caught:
                    session.attend(*tensors)
                self.assertEqual(caught.exception.field, field)
            with self.assertRaises(errors.InvalidArgument) as caught:
                session.attend(q, kv, kv, out=np.ones((2, DIM, HEADS), np.float32).transpose(0, 2, 1))
            self.assertEqual(caught.exception.field, "out.strides")
            with self.assertRaises(ValueError):
                session.attend(q, kv, kv, lse=np.zeros((2, HEADS), np.float32))
            spread = np.arange(DIM, dtype=np.float32)  # the same for all rows and heads: copied first
            output = session.attend(q, kv, np.broadcast_to(spread, kv.shape))
            np.testing.assert_allclose(output, np.broadcast_to(spread, q.shape), atol=1e-2, rtol=1e-2)
            session.wait(number)
            session.check()
        session.close()
        with self.assertRaises(errors.Cancelled):
            session.check()
        with self.assertRaises(ValueError):
            cache.session(dtype="fp8_e4m3")
        with self.assertRaises(tributary.TributaryError):  # no GPU, or a library without CUDA
            cache.session(memory="device", dtype="bf16")

    def test_an_error_in_the_with_abandons_the_step(self):
        cache, q = self.cache(), np.ones((1, HEADS, DIM), np.float32)
        sequence = cache.open()
        with self.assertRaises(KeyError), cache.session() as session:
            session.submit([StepEntry(sequence, 0, 1, 1)], layers=2)
            session.attend(q, q[:, :KV_HEADS], q[:, :KV_HEADS])
            raise KeyError
        self.assertEqual(cache.truncate(sequence, 9), 0)


class Warnings(WithService):
    def test_what_would_make_a_session_faster_is_said_once(self):
        class Core:
            """A session of the core that has something to say."""

            def info(self):
                return (1, 1, 1, 2, False, 1, 1)

            def endpoint(self):
                return (0, 1, 0, b"")

            def warning(self):
                return "another way would be faster"

            def abandon(self):
                pass

        cache = self.cache()
        cache._core = mock.Mock(open_session=lambda *_: Core())
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            sessions = [cache.session() for _ in range(2)]
        self.assertEqual([str(each.message) for each in shown], ["tributary: another way would be faster"])
        self.assertEqual(shown[0].filename, __file__)
        self.assertEqual([session.warning for session in sessions], ["another way would be faster"] * 2)
        with self.client.create_cache(cache.id, cache.spec).session() as session:
            self.assertEqual(session.warning, "")


class Asyncio(WithService):
    def run_with_client(self, work):
        async def run():
            async with await tributary.aio.connect(self.service.target) as client:
                spec = CacheSpec(layers=1, q_heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, capacity_tokens=1 << 12,
                                 kv_dtype="bf16")
                cache = await client.create_cache(self.id().rpartition(".")[2], spec)
                try:
                    await work(client, cache)
                finally:
                    await cache.delete()

        asyncio.run(asyncio.wait_for(run(), 60))

    def test_many_calls_in_flight_without_a_thread_each(self):
        q = np.ones((1, HEADS, DIM), np.float32)
        kv = q[:, :KV_HEADS]

        async def work(_, cache):
            sequences = await asyncio.gather(*(cache.open() for _ in range(8)))
            calls = [cache.attend(0, [Entry(s, at, 1, 1)], q, kv, (at + 1) * kv, timeout=30)
                     for at in range(5) for s in sequences]
            for done in (await asyncio.gather(*calls))[-8:]:
                np.testing.assert_allclose(done.output, 3, atol=2e-2)
            fork = await cache.fork(sequences[0], 3)
            self.assertEqual(await cache.truncate(fork, 2), 2)
            await cache.append(0, [(fork, 2, 1)], kv, kv)
            await cache.close(fork)
            with self.assertRaises(errors.OutOfRange) as caught:
                await cache.attend(0, [Entry(sequences[0], 9, 1)], q)
            self.assertEqual(caught.exception.length, 5)

        self.run_with_client(work)

    def test_a_session(self):
        q = np.ones((1, HEADS, DIM), np.float32)

        async def work(_, cache):
            async with await cache.session() as session:
                number = await session.submit([StepEntry(await cache.open(), 0, 1, 1)], layers=1)
                np.testing.assert_allclose(await session.attend(q, q[:, :KV_HEADS], q[:, :KV_HEADS]), 1, atol=1e-2)
                await session.wait(number)

        self.run_with_client(work)

    def test_what_is_given_up_or_cut_off(self):
        q = np.ones((1, HEADS, DIM), np.float32)

        async def work(client, cache):
            task = asyncio.create_task(cache.attend(0, [Entry(await cache.open(), 0, 1, 1)], q, q[:, :2], q[:, :2]))
            await asyncio.sleep(0)
            task.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await task
            sequence, rows = await cache.open(), q.copy()
            gone = weakref.ref(rows)
            with self.stopped():
                task = asyncio.create_task(cache.attend(0, [Entry(sequence, 0, 1, 1)], rows, q[:, :2], q[:, :2]))
                await asyncio.sleep(0)
                task.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await task
                del rows, task
                while gone() is not None:  # the call does not wait for its answer
                    await asyncio.sleep(0.01)
            self.assertEqual(await cache.truncate(sequence, 0), 0)
            other = await tributary.aio.connect(self.service.target)
            await other.close()
            await other.close()
            with self.assertRaises(errors.Cancelled):
                await other.create_cache("late", cache.spec)

        self.run_with_client(work)

    def test_the_process_may_end_with_calls_in_flight(self):
        code = f"""
import asyncio, numpy as np, tributary, tributary.aio
q = np.ones((64, 4, 64), np.float32)
async def main():
    global client
    client = await tributary.aio.connect({self.service.target!r})
    spec = tributary.CacheSpec(1, 4, 2, 64, 1 << 14, kv_dtype="bf16")
    cache = await client.create_cache("in-flight", spec)
    sequence = await cache.open()
    for at in range(20):
        asyncio.ensure_future(cache.attend(0, [(sequence, 64 * at, 64, 64)], q, q[:, :2], q[:, :2]))
    await asyncio.sleep(0)
asyncio.run(main())
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual((done.returncode, done.stderr), (0, ""))


class EmbeddedService(unittest.TestCase):
    """A service in this process: no other program is needed."""

    def test_serves_and_ends(self):
        with mock.patch.dict(os.environ, {"TRIBUTARY_COORDINATOR": "/nowhere", "PATH": ""}):
            service = tributary.serve(workers=2)
        self.assertIsNone(service.process)
        with service, tributary.Client(service.target) as client:
            cache = client.create_cache("c", CacheSpec(layers=1, q_heads=2, kv_heads=2, head_dim=64, capacity_tokens=256))
            self.assertEqual(cache.ranks, 2)
            rows = np.ones((3, 2, 64), np.float32)
            got = cache.attend(0, [Entry(cache.open(), 0, 3, 3)], rows, rows, rows).output
            np.testing.assert_allclose(got, rows, atol=1e-2)
        with self.assertRaises(errors.Unavailable):
            tributary.Client(service.target, timeout=0.2)
        service.close()  # may be repeated

    def test_two_at_a_time(self):
        with tributary.serve() as one, tributary.serve() as other:
            self.assertNotEqual(one.target, other.target)
            tributary.Client(one.target).close()
            tributary.Client(other.target).close()

    def test_what_cannot_be_is_refused(self):
        for field, parameters in (("workers", {"workers": 2000}), ("device", {"device": "tpu"})):
            with self.assertRaises(errors.InvalidArgument) as caught:
                tributary.serve(**parameters)
            self.assertEqual(caught.exception.field, field)

    def test_a_process_that_ends_without_closing_it_ends_well(self):
        code = "import tributary; s = tributary.serve(); c = tributary.Client(s.target); print('ok')"
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual((said.returncode, said.stdout, said.stderr), (0, "ok\n", ""))


class Forked(unittest.TestCase):
    """Children of os.fork have the parent's objects and none of its threads."""

    # Ends with what `child` returns there, and then with what `parent` returns.
    PROGRAM = """
import os, sys, numpy as np, tributary
from tributary import CacheSpec, Entry, StepEntry, errors

def refused(function, *args):
    try:
        function(*args)
    except errors.FailedPrecondition:
        return 0
    return 1

service = tributary.serve({serve})
client = tributary.Client(service.target, timeout=20)
cache = client.create_cache("c", CacheSpec(1, 4, 2, 64, 256, kv_dtype="bf16"))
q, sequence = np.ones((1, 4, 64), np.float32), cache.open()
session = cache.session(max_rows=1)
child = os.fork()
if child == 0:
    session.abandon()
    session.close()
    wrong = refused(cache.open) + refused(cache.attend, 0, [(sequence, 0, 1, 0)], q)
    wrong += refused(lambda: session.submit([StepEntry(sequence, 0, 1, 1)], layers=1))
    wrong += refused(tributary.Client, service.target)
    client.close()
    service.close()
    sys.exit(wrong)  # with all finalizers
wrong = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
step = session.submit([StepEntry(sequence, 0, 1, 1)], layers=1)
output = session.attend(q, q[:, :2], q[:, :2])
session.wait(step)
np.testing.assert_allclose(output, q, atol=1e-2)
session.close()
client.close()
service.close()
sys.exit(wrong)
"""

    def test_a_child_leaves_its_parents_service_alone(self):
        for serve in ("", "program=''"):  # in this process, and beside it
            with self.subTest(serve):
                program = self.PROGRAM.format(serve=serve)
                done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
                self.assertEqual((done.returncode, done.stderr), (0, ""))


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

    def refused(self, field, function, *args, **more):
        """The function refuses one of its arguments, by name; says with what words."""
        with self.assertRaises(errors.InvalidArgument) as caught:
            function(*args, **more)
        self.assertEqual(caught.exception.field, field)
        self.assertTrue(str(caught.exception).startswith(f"{field}: "), caught.exception)
        return str(caught.exception)

    def test_an_argument_that_is_not_what_it_must_be_is_named(self):
        cache = self.cache()
        q, sequence = np.ones((1, HEADS, DIM), np.float32), cache.open()
        kv = q[:, :KV_HEADS]
        cache.attend(0, [Entry(sequence, 0, 1, 1)], q, kv, kv)
        row = [Entry(sequence, 0, 1)]
        self.assertIn("'1'", self.refused("entries[0].rows", cache.attend, 0, [(sequence, 0, "1", 0)], q))
        for field, entries in {
            "entries": 7,
            "entries[0]": [7],
            "entries[0].sequence": [(-1, 0, 1, 0)],
            "entries[1].first_position": [*row, (sequence, 1 << 63, 1, 0)],
            "entries[0].rows": [(sequence, 0, -1, 0)],
            "entries[0].new_tokens": [(sequence, 0, 1, -1)],
        }.items():
            with self.subTest(field):
                self.refused(field, cache.attend, 0, entries, q)
        self.refused("layer", cache.attend, "0", row, q)
        self.refused("timeout", cache.attend, 0, row, q, timeout="soon")
        self.refused("timeout", cache.attend, 0, row, q, timeout=float("nan"))
        self.refused("length", cache.fork, sequence, -1)  # not all of them
        self.refused("sequence", cache.truncate, None, 1)
        self.refused("updates[0].length", cache.update, [("fork", sequence, -1)])
        self.refused("cache_id", self.client.create_cache, "a\0b", cache.spec)  # not "a"
        self.refused("spec.layers", self.client.create_cache, "odd", CacheSpec("2", 1, 1, DIM, 100))
        self.refused("layer_specs[0]", CacheSpec, 1, 1, 1, DIM, 100, layer_specs=(None,))
        self.refused("spec", self.client.create_cache, "odd", None)
        self.assertEqual(cache.truncate(sequence, 9), 0, "layer 1 holds nothing, and nothing has changed")

    def test_a_tensor_that_is_none_is_named(self):
        cache = self.cache()
        q, row = np.ones((1, HEADS, DIM), np.float32), [Entry(cache.open(), 0, 1)]
        self.refused("q", cache.attend, 0, row, "q")
        self.refused("q.shape", cache.attend, 0, row, q[0])
        self.assertIn("byte order", self.refused("q", cache.attend, 0, row, q.astype(">f4")))
        self.refused("q", cache.attend, 0, row, q.astype(np.float64))
        fixed = np.zeros_like(q)
        fixed.flags.writeable = False
        self.assertIn("writable", self.refused("out", cache.attend, 0, row, q, out=fixed))

    def test_a_scale_that_float32_has_not_is_refused(self):
        cache = self.cache()
        q, row = np.ones((1, HEADS, DIM), np.float32), [Entry(cache.open(), 0, 1)]
        for scale in (0, -1.0, 1e-60, 1e60, float("inf"), float("nan"), "1"):  # 1e-60 would be 0: the layer's
            with self.subTest(scale):
                self.refused("o_scale", cache.attend, 0, row, q, output_dtype="fp8_e4m3", o_scale=scale)

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

    def __init__(self, test, cache, session, seed):
        self.test, self.cache, self.session = test, cache, session  # the session is of float16
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
        output, lse = self.ask(layer, entries, q, k, v)
        at = 0
        spec = self.cache.spec.layer_specs[layer]
        for entry in entries:
            if entry.sequence in fresh:
                self.held[entry.sequence][layer] = tuple(
                    np.concatenate(both) for both in zip(self.held[entry.sequence][layer], fresh[entry.sequence]))
            want = attention(q[at : at + entry.rows], *self.held[entry.sequence][layer], entry.first_position,
                             spec.window_left, spec.sinks or None)
            np.testing.assert_allclose(output[at : at + entry.rows], want[0], atol=1e-2, rtol=1e-2)
            np.testing.assert_allclose(lse[at : at + entry.rows], want[1], atol=2e-3, rtol=2e-3)
            at += entry.rows

    def ask(self, layer, entries, q, k, v):
        """Output and LSE by a call in one of the three dtypes, or by a step of a session."""
        way = self.dice.choice(["float32", "float16", "bfloat16", "session"])
        if way == "session":
            q, k, v = (None if each is None else each.astype(np.float16) for each in (q, k, v))
            number = self.session.submit([StepEntry(*entry) for entry in entries], layers=1, first_layer=layer)
            lse = np.empty(q.shape[:2], np.float32)
            output = self.session.attend(q, k, v, lse=lse)
            self.session.wait(number)
            return output.astype(np.float32), lse
        if way == "bfloat16":
            q, k, v = (None if each is None else (each.view(np.uint32) >> 16).astype(np.uint16) for each in (q, k, v))
            done = self.cache.attend(layer, entries, q, k, v, lse=True)
            return (done.output.astype(np.uint32) << 16).view(np.float32), done.lse
        q, k, v = (None if each is None else each.astype(way) for each in (q, k, v))
        done = self.cache.attend(layer, entries, q, k, v, lse=True)
        return done.output.astype(np.float32), done.lse


class RandomOperations(WithService):
    def test_they_give_what_numpy_gives(self):
        layers = (LayerSpec(), LayerSpec(window_left=50, sinks=(0.5, -1.0, 2.0, 0.0)))
        for seed, kv_dtype in enumerate(("bf16", "f16", "fp8_e4m3", "fp8_e5m2", "f32", "nvfp4")):
            with self.subTest(kv_dtype):
                cache = self.cache(kv_dtype, layer_specs=layers, capacity_tokens=1 << 15)
                with cache.session(max_rows=128, dtype="f16", lse=True) as session:
                    oracle = Oracle(self, cache, session, seed)
                    for _ in range(OPERATIONS):
                        oracle.step()


class Importing(unittest.TestCase):
    def test_what_a_host_generates_of_the_proto_is_found_beside_the_package(self):
        with tempfile.TemporaryDirectory() as folder:
            generated = os.path.join(folder, "tributary", "v1")
            os.makedirs(generated)
            with open(os.path.join(generated, "types_pb2.py"), "w", encoding="utf-8") as file:
                file.write("MADE_BY_PROTOC = True\n")
            code = "import tributary, tributary.v1.types_pb2 as pb; assert pb.MADE_BY_PROTOC and tributary.Client"
            subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": folder})

    def test_modules_are_imported_when_they_are_named(self):
        code = "import tributary; tributary.aio.connect; assert not hasattr(tributary, 'nothing')"
        subprocess.run([sys.executable, "-c", code], check=True)

    def test_is_quick_and_brings_no_torch(self):
        code = ("import numpy, sys, time; begin = time.monotonic(); import tributary; "
                "assert 'torch' not in sys.modules; print(time.monotonic() - begin)")
        took = float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
        self.assertLess(took, 3)  # 0.1 on a quiet machine


if __name__ == "__main__":
    unittest.main(verbosity=2)
